"""What was found out about one model, kept in memory and on disk: dry runs of its programs, which no device has a part
in; prices on a device; what its graph is made of. Every answer is found out once.

A second question about the same model, in this process or another, starts from these: with other devices, another
number of them, another batch, less memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from shardc.compile import compile as compiled
from shardc.cost.dry_run import DryRun, dry_run
from shardc.cost.known_ops import KnownOps
from shardc.errors import Errors, ShardcError
from shardc.ir.graph import calls, operands_of
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Shard
from shardc.ir.program import Program
from shardc.ir.stored import Param
from shardc.plan import traces
from shardc.plan.disk_cache import DiskCache, packed, unpacked
from shardc.plan.few_layers import Subject
from shardc.plan.fingerprint import Unknown, fingerprint
from shardc.plan.stage_vectors import roles
from shardc.runtime import ops
from shardc.runtime.step.engine_optimizer import assumed
from shardc.spec import Spec


class Weights(NamedTuple):
    """What an estimate needs to know of a stage's weights. casts: bytes of them in the dtype of products, which are
    kept for backward once a step, and copies: how many ops make them; plain: bytes of those that are used as they are
    stored, as an embedding's table; experts: of the parameters that are experts', spread over an axis of theirs.
    """

    casts: float = 0.0
    copies: float = 0.0
    plain: float = 0.0
    experts: float = 0.0


@dataclass(frozen=True)
class Rank:
    """The dry run of one rank, and what its price needs of the program. roles: of the mesh's axes."""

    run: DryRun
    mesh: Mesh
    roles: Mapping[str, str]
    weights: Weights


@dataclass
class Records:
    """subject: the model. cpu: its device is one, which runs other kernels. disk: None keeps nothing there."""

    subject: Subject
    cpu: bool = False
    disk: DiskCache | None = None
    _known: KnownOps = field(default_factory=KnownOps)
    _texts: dict[str, bytes] = field(default_factory=dict)
    _last: dict[tuple[str, int, int | None], tuple[Program, tuple[DryRun, ...]]] = field(default_factory=dict)

    @cached_property
    def _model(self) -> str | None:
        """What files on disk are looked up by, of this model; None: nothing is."""
        if self.disk is None:
            return None
        try:
            return fingerprint(self.subject.model, self.subject.batch, self.subject.loss)
        except (Unknown, OSError, RecursionError):
            return None

    def answer(self, question: Mapping[str, Any], find: Callable[[], Any]) -> Any:
        """The answer to a question of plain values: as it is known, else what `find` returns, plain values too. What
        compile refused before it refuses again: raises ShardcError.
        """
        key = json.dumps(question)  # in its order: that of a mesh's axes counts
        named = {"model": self._model, "question": key}
        disk = self.disk if self._model is not None else None
        data = self._texts.get(key) or (disk.packed(named) if disk is not None else None)
        known = unpacked(data) if data is not None else None
        if known is None:
            try:
                known = {"found": find()}
            except ShardcError as e:
                known = {"errors": e.to_json() if e.errors == (e,) else [x.to_json()[0] for x in e.errors]}
            data = packed(known)
            if disk is not None:
                disk.keep(named, data)
        assert data is not None
        self._texts[key] = data
        if "errors" in known:
            errors = Errors()
            for each in known["errors"]:
                errors.add(each["what"], where=each["where"], fix=each["fix"])
            errors.raise_any()
        return known["found"]

    def ranks(
        self, spec: Mapping[str, Any], rows: int, units: int | None, sequence: int | None, coordinates: tuple[int, ...]
    ) -> list[Rank]:
        """Ranks of the program of a spec for a global batch of so many rows: of the whole model, or of so many units of
        its layers; by their coordinates on the pipeline's axis. Raises ShardcError if compile does.
        """
        question = {"ranks": spec, "rows": rows, "units": units, "sequence": sequence, "at": coordinates}
        question["cpu"] = self.cpu

        def find() -> Any:
            program = self.compiled(spec, rows, units, sequence)
            runs = [self.dry_run(program, c) for c in coordinates]
            return {
                "mesh": program.mesh.axes,
                "roles": roles(program.spec) if program.spec is not None else {},
                "weights": [_weights(program, c) for c in coordinates],
                "runs": [traces.encoded(r) for r in runs],
            }

        found = self.answer(question, find)
        mesh = Mesh(tuple((a, n) for a, n in found["mesh"]))
        runs = [traces.decoded(r) for r in found["runs"]]
        each = zip(runs, found["weights"], strict=True)
        return [Rank(run, mesh, found["roles"], Weights(*weights)) for run, weights in each]

    def compiled(
        self, spec: Mapping[str, Any], rows: int, units: int | None = None, sequence: int | None = None
    ) -> Program:
        captured = self.subject.captured(rows, units, sequence)
        example = self.subject.example(rows, sequence)
        model = self.subject.model_of(units)
        return compiled(model, example, spec, loss=self.subject.loss, captured=captured, prove=False)

    def whole(self, spec: str, rows: int, sequence: int | None) -> tuple[Program, tuple[DryRun, ...]]:
        """The program of a spec, as JSON, and the dry runs of its ranks. The last one is kept, for other devices."""
        key = spec, rows, sequence
        if key not in self._last:
            program = self.compiled(json.loads(spec), rows, None, sequence)
            ranks = program.schedule.ranks if program.schedule is not None else 1
            self._last = {key: (program, tuple(self.dry_run(program, c) for c in range(ranks)))}
        return self._last[key]

    def dry_run(self, program: Program, coordinate: int) -> DryRun:
        return dry_run(program, coordinate, assumed(program), cpu=self.cpu, known=self._known)


def _held(program: Program, coordinate: int) -> list[Param]:
    """A stage's parameters."""
    return [p for p in program.params if coordinate in (p.stages or (0,))]


def _casts(program: Program, coordinate: int) -> list[fx.Node]:
    """The ops that cast a stage's weights for products."""
    params = {p.name for p in program.params}
    casts = (torch.ops.aten._to_copy.default, ops.cast_once)
    some = [n for n in calls(program.stages[coordinate].graph) if n.target in casts]
    return [n for n in some if operands_of(n)[0].name in params]


def _weights(program: Program, coordinate: int) -> Weights:
    mesh, held, casts = program.mesh, _held(program, coordinate), _casts(program, coordinate)
    cast = {operands_of(n)[0].name for n in casts}
    experts = program.spec.experts if program.spec is not None else ()
    parts = {part for e in experts if e.axis in mesh.names for part in mesh.parts(e.axis)}
    spread = [p for p in held if any(isinstance(p.layout[part], Shard) for part in parts)]
    return Weights(
        float(sum(n.meta["value"].nbytes(mesh) for n in casts)),
        float(len(casts)),
        float(sum(p.value.nbytes(mesh) for p in held if p.name not in cast)),
        float(sum(p.value.nbytes(mesh) for p in spread)),
    )


def spec_text(spec: Spec) -> str:
    """A spec as JSON, with its mesh's sizes."""
    return json.dumps({**spec.to_dict(), "mesh": dict(spec.mesh.axes)})
