"""What is found out by compiling: ranks of a spec's program, dry-run, as plain values; and whole programs."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import fx

from shardc.compile import compile as compiled
from shardc.cost.dry_run import dry_run
from shardc.cost.growth import Growth
from shardc.cost.known_ops import KnownOps
from shardc.cost.recorded import DryRun
from shardc.ir.graph import calls, operands_of
from shardc.ir.placement import Shard
from shardc.ir.program import Program
from shardc.ir.stored import Param
from shardc.plan import traces
from shardc.plan.few_layers import Subject, facts
from shardc.plan.records import Weights, spec_text
from shardc.plan.stage_vectors import roles
from shardc.runtime import ops
from shardc.runtime.step.engine_optimizer import assumed
from shardc.spec import Spec
from shardc.spec.data_section import Data


@dataclass
class CompiledRanks:
    """cpu: the device is one, which runs other kernels."""

    subject: Subject
    cpu: bool = False
    _known: KnownOps = field(default_factory=KnownOps)
    _last: dict[tuple[str, int, int | None], tuple[Program, tuple[DryRun, ...]]] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """shardc.plan.facts.Facts. Raises ShardcError as capture does."""
        return asdict(facts(self.subject))

    def ranks(
        self, spec: Mapping[str, Any], rows: int, units: int | None, sequence: int | None, coordinates: tuple[int, ...]
    ) -> dict[str, Any]:
        """As of Records.ranks."""
        program = self.compiled(spec, rows, units, sequence)
        runs = [self.dry_run(program, c) for c in coordinates]
        return {
            "mesh": program.mesh.axes,
            "roles": roles(program.spec) if program.spec is not None else {},
            "weights": [_weights(program, c) for c in coordinates],
            "runs": [traces.encoded(r) for r in runs],
        }

    def compiled(
        self, spec: Mapping[str, Any], rows: int, units: int | None = None, sequence: int | None = None
    ) -> Program:
        captured = self.subject.captured(rows, units, sequence)
        example = self.subject.example(rows, sequence)
        model = self.subject.model_of(units)
        return compiled(model, example, spec, loss=self.subject.loss, captured=captured, prove=False)

    def whole(self, spec: Spec, rows: int, sequence: int | None) -> tuple[Program, tuple[DryRun, ...]]:
        """The program of a spec, and the dry runs of its ranks. The last one is kept, for other devices."""
        key = spec_text(spec), rows, sequence
        if key not in self._last:
            program = self.compiled({**spec.to_dict(), "mesh": dict(spec.mesh.axes)}, rows, None, sequence)
            ranks = program.schedule.ranks if program.schedule is not None else 1
            self._last = {key: (program, tuple(self.dry_run(program, c) for c in range(ranks)))}
        return self._last[key]

    def dry_run(self, program: Program, coordinate: int) -> DryRun:
        return dry_run(program, coordinate, assumed(program), cpu=self.cpu, known=self._known, growth=Growth())


def _held(program: Program, coordinate: int) -> list[Param]:
    """A stage's parameters."""
    return [p for p in program.params if coordinate in (p.stages or (0,))]


def _casts(program: Program, coordinate: int) -> list[fx.Node]:
    """The ops that cast a stage's weights for products."""
    params = {p.name for p in program.params}
    casts = (torch.ops.aten._to_copy.default, ops.cast_once)
    some = [n for n in calls(program.stages[coordinate].graph) if n.target in casts]
    return [n for n in some if operands_of(n)[0].name in params]


def _together(program: Program, coordinate: int, large: Set[str]) -> set[str]:
    """The large parameters that one op uses with others: backward finishes their gradients at the same time."""

    of: dict[fx.Node, fx.Node] = {}  # of which a value is made, as by a cast: itself, where it is made of several
    found = set[str]()
    for n in program.stages[coordinate].graph.nodes:
        operands = [of[x] for x in operands_of(n)] if n.op == "call_function" else []
        of[n] = operands[0] if len(operands) == 1 else n
        names = {x.name for x in operands} & large
        found |= names if len(names) > 1 else set()
    return found


def _weights(program: Program, coordinate: int) -> Weights:
    mesh, held, casts = program.mesh, _held(program, coordinate), _casts(program, coordinate)
    cast = {operands_of(n)[0].name for n in casts}
    experts = program.spec.experts if program.spec is not None else ()
    parts = {part for e in experts if e.axis in mesh.names for part in mesh.parts(e.axis)}
    spread = [p for p in held if any(isinstance(p.layout[part], Shard) for part in parts)]
    smallest = Data().bucket_bytes()
    shares = {p.name: min(p.value.nbytes(mesh) / smallest, 1.0) for p in held if p.requires_grad}
    of_experts = sum(shares.get(p.name, 0.0) for p in spread)
    together = [p for p in held if p.name in _together(program, coordinate, {n for n, s in shares.items() if s == 1.0})]
    return Weights(
        float(sum(n.meta["value"].nbytes(mesh) for n in casts)),
        float(len(casts)),
        float(sum(p.value.nbytes(mesh) for p in held if p.name not in cast)),
        float(sum(p.value.nbytes(mesh) for p in spread)),
        sum(shares.values()) - of_experts,
        of_experts,
        float(sum(p.value.nbytes(mesh) for p in together)),
        float(len(together)),
        float(sum(p.value.nbytes(mesh) for p in held if p.requires_grad)),
    )
