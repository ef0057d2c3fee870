"""Run dry runs of a model with few of its layers, each once, and build stages from them.

    five units of layers on four stages     [first, 1]   [1]   [2]   [1, last]      one compile, four dry runs
    two units, and three                    the whole model on one stage

A unit is a period of the model's layers. A model runs as a whole if it has no long list of layers, or if its gradients
are summed in buckets that hold several units.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from shardc.compile import compile as compiled
from shardc.cost.dry_run import dry_run
from shardc.cost.growth import Growth
from shardc.cost.known_ops import KnownOps
from shardc.cost.recorded import DryRun
from shardc.errors import ShardcError
from shardc.ir.graph import calls, operands_of
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Shard
from shardc.ir.program import Program
from shardc.machine.device import Device
from shardc.plan.few_layers import UNITS, Subject, facts
from shardc.plan.space import Choice, Core, Facts, Layers, spec
from shardc.plan.stage import FLOPS, Meter, Stage, lines, part_of, roles, stage
from shardc.runtime import ops
from shardc.runtime.schedule import SCHEDULES
from shardc.runtime.step.engine_optimizer import assumed
from shardc.spec import Spec
from shardc.spec.data_section import Data


class Weights(NamedTuple):
    """A stage's parameters, in bytes. casts: copies in the compute dtype; trained: with gradients.

    experts: those that are split over an axis of experts. buckets: the smallest buckets that they fill; each parameter
    counts for at most one. copies: number of ops that cast weights.
    """

    casts: float = 0.0
    experts: float = 0.0
    trained: float = 0.0
    buckets: float = 0.0
    copies: float = 0.0


@dataclass(frozen=True)
class Rank:
    """The dry run of one rank, and what its price needs of the program. roles: of the mesh's axes."""

    run: DryRun
    mesh: Mesh
    roles: Mapping[str, str]
    weights: Weights


@dataclass(frozen=True)
class Stages:
    """Stages of one rank each: first, middle with `one` unit and with `two`, last; or only `whole`.

    whole: for a model without repeated layers. period: layers of a unit. before: layers of the first stage besides its
    units. ranks: the ranks that were run, by the name of their stage.
    """

    ranks: Mapping[str, Rank]
    whole: Stage | None = None
    first: Stage = field(default_factory=dict)
    one: Stage = field(default_factory=dict)
    two: Stage = field(default_factory=dict)
    last: Stage = field(default_factory=dict)
    period: int = 1
    before: int = 0

    def at(self, index: int, count: int, layers: float) -> Stage:
        """Return stage `index` of `count` (more than one), with so many layers."""
        if index == 0:
            return lines(self.first, self.two, self.one, (layers - self.before) / self.period - 1)
        base = self.last if index == count - 1 else self.one
        return lines(base, self.two, self.one, layers / self.period - 1)


@dataclass
class Runs:
    """The dry runs of one model. cpu: the device is a CPU, which runs other kernels."""

    subject: Subject
    cpu: bool = False
    _known_ops: KnownOps = field(default_factory=KnownOps)
    _found: dict[str, list[Rank] | ShardcError] = field(default_factory=dict)
    _whole: dict[str, tuple[Program, tuple[DryRun, ...]]] = field(default_factory=dict)

    @cached_property
    def facts(self) -> Facts:
        """The model's facts. Raises ShardcError as capture does."""
        return facts(self.subject)

    def ranks(
        self, spec: Mapping[str, Any], rows: int, units: int | None, sequence: int | None, at: tuple[int, ...]
    ) -> list[Rank]:
        """Return ranks of a spec's program for a global batch of so many rows, each compiled and run once.

        units: of layers; None: all. at: coordinates on the pipeline's axis. Raises ShardcError if compile does.
        """
        key = json.dumps([spec, rows, units, sequence, at])  # not sorted: the order of a mesh's axes matters
        if key not in self._found:
            try:
                program = self._compiled(spec, rows, units, sequence)
                assert program.spec is not None
                role = roles(program.spec)
                ranks = [Rank(self._dry_run(program, c), program.mesh, role, _weights(program, c)) for c in at]
                self._found[key] = ranks
            except ShardcError as e:
                self._found[key] = e
        result = self._found[key]
        if isinstance(result, ShardcError):
            raise result
        return result

    def whole(self, spec: Spec, rows: int, sequence: int | None) -> tuple[Program, tuple[DryRun, ...]]:
        """Return a spec's program and its ranks' dry runs. The last result is kept, for other devices."""
        document = {**spec.to_dict(), "mesh": dict(spec.mesh.axes)}
        key = json.dumps([document, rows, sequence])
        if key not in self._whole:
            program = self._compiled(document, rows, None, sequence)
            ranks = program.schedule.ranks if program.schedule is not None else 1
            self._whole = {key: (program, tuple(self._dry_run(program, c) for c in range(ranks)))}
        return self._whole[key]

    def treats_layers_alike(self, spec: Spec) -> bool:
        """Return whether a spec treats all layers in the same way: only then do few layers represent many.

        False with `every: 2`, patterns for single layers, or matrices with owners, which are balanced over all layers.
        """
        if self.subject.layers is None:
            return True
        if spec.optimizer.matrices is not None or any(entry.every > 1 for entry in spec.checkpoint):
            return False
        patterns = {r.pattern for r in spec.shard} | {r.pattern for r in spec.activations}
        patterns |= {e.match for e in spec.experts} | {e.match for e in spec.checkpoint}
        return self.subject.match_layers_alike(patterns)

    def _compiled(self, spec: Mapping[str, Any], rows: int, units: int | None, sequence: int | None) -> Program:
        captured, example = self.subject.captured(rows, units, sequence), self.subject.example(rows, sequence)
        model = self.subject.model_of(units)
        return compiled(model, example, spec, loss=self.subject.loss, captured=captured, prove=False)

    def _dry_run(self, program: Program, coordinate: int) -> DryRun:
        return dry_run(program, coordinate, assumed(program), cpu=self.cpu, known=self._known_ops, growth=Growth())


def _weights(program: Program, coordinate: int) -> Weights:
    mesh, params = program.mesh, [p for p in program.params if coordinate in (p.stages or (0,))]
    names, copies = {p.name for p in program.params}, (torch.ops.aten._to_copy.default, ops.cast_once)
    copied = [n for n in calls(program.stages[coordinate].graph) if n.target in copies]
    casts = [n for n in copied if operands_of(n)[0].name in names]
    experts = program.spec.experts if program.spec is not None else ()
    parts = {part for e in experts if e.axis in mesh.names for part in mesh.parts(e.axis)}
    trained, smallest = [p for p in params if p.requires_grad], Data().bucket_bytes()
    spread = [p for p in params if any(isinstance(p.layout[x], Shard) for x in parts)]
    return Weights(
        float(sum(n.meta["value"].nbytes(mesh) for n in casts)),
        float(sum(p.value.nbytes(mesh) for p in spread)),
        float(sum(p.value.nbytes(mesh) for p in trained)),
        sum(min(p.value.nbytes(mesh) / smallest, 1.0) for p in trained),
        float(len(casts)),
    )


@dataclass
class Library:
    """Stages of every way to split and recompute, on one device. facts: of the model with its precision.

    microbatches: of the runs of blocks: a first and a last one, or 1 if the model cannot run in microbatches, as with
    statistics of the batch. number: of layers, if it differs from the model's.
    """

    runs: Runs
    facts: Facts
    device: Device
    sequence: int | None = None
    microbatches: int = 2
    number: int | None = None
    _priced: dict[Any, Any] = field(default_factory=dict, repr=False)

    def on(self, device: Device) -> Library:
        """Return the library for another device of this kind, with the same dry runs."""
        return replace(self, device=device, _priced={})

    def of_length(self, sequence: int) -> Library:
        """Return the library for rows of so many tokens."""
        return replace(self, sequence=sequence)

    def of_layers(self, number: int) -> Library:
        """Return the library for a model with so many layers."""
        return replace(self, number=number)

    @property
    def layers(self) -> Layers | None:
        """The model's list of repeated layers, with the library's number of them."""
        layers = self.facts.layers
        return layers if layers is None or self.number is None else replace(layers, number=self.number)

    def block(self, core: Core, rows: int = 1) -> Stages:
        """Return a core's stages for so many rows a microbatch, from a dry run of one row without a data axis.

        Raises ShardcError if compile refuses it.
        """
        choice = Choice(**core._asdict(), microbatches=self.microbatches)
        entries = spec(choice, self.facts)
        if self.layers is not None:
            return self.pipelined(entries, choice.batch, more_rows=rows)
        whole = self._only(entries, choice.batch, None)
        return Stages({"whole": whole}, self._stage(whole, rows=rows))

    def pipelined(self, spec: Mapping[str, Any], rows: int, axis: str = "pp", more_rows: int = 1) -> Stages:
        """Return a spec's stages, from a pipeline of four along `axis`. more_rows: factor on the rows."""
        layers, sizes = self.layers, spec["mesh"]
        assert layers is not None
        split = SCHEDULES[spec.get("pipeline", {}).get("schedule", "1f1b")].splits_backward
        inside = axis in sizes and next(iter(sizes)) != axis  # then neighbours along it are further apart
        ranks = self._four({**spec, "mesh": {a: n for a, n in sizes.items() if a != axis}}, rows, axis, split)
        named = dict(zip(("first", "one", "two", "last"), ranks, strict=True))
        first, one, two, last = (self._stage(rank, sizes if inside else None, more_rows) for rank in ranks)
        return Stages(named, None, first, one, two, last, layers.period, layers.first)

    def _four(self, spec: Mapping[str, Any], rows: int, axis: str, split: bool) -> list[Rank]:
        """Return the ranks of the program of five units of layers on four stages."""
        layers = self.layers
        assert layers is not None
        counts = [layers.first + layers.period, layers.period, 2 * layers.period, layers.period]
        pipeline = {"axis": axis, "balance": counts, "schedule": "zb-h1" if split else "1f1b"}
        document = {**spec, "mesh": {axis: 4, **spec["mesh"]}, "pipeline": pipeline}
        return self.runs.ranks(document, rows, UNITS, self.sequence, (0, 1, 2, 3))

    def alone(self, spec: Mapping[str, Any], rows: int, bucket: float = 0.0) -> tuple[Stage, DryRun]:
        """Return the whole model as one stage, and the dry run that represents it.

        Both come from two and three units of layers, if possible. bucket: bytes of a sum of gradients; 0: no sums.
        """
        layers = self.layers
        if layers is not None:
            two, three = (self._only(spec, rows, n) for n in (2, 3))
            if self.number is not None or not several(three.weights.trained - two.weights.trained, bucket):
                few, units = self._stage(two), (layers.number - layers.first) / layers.period
                return lines(few, self._stage(three), few, units - 2), three.run
        only = self._only(spec, rows, None)
        return self._stage(only), only.run

    def _only(self, spec: Mapping[str, Any], rows: int, units: int | None) -> Rank:
        return self.runs.ranks(spec, rows, units, self.sequence, (0,))[0]

    def _stage(self, rank: Rank, sizes: Mapping[str, int] | None = None, rows: int = 1) -> Stage:
        """Return a rank's stage. sizes: of the mesh that it is a part of, if another one was run."""
        mesh, number = (rank.mesh, rank.run.rank) if sizes is None else (ordered(rank.mesh, sizes), 0)
        return stage(rank.run, Meter(self.device, mesh, number, roles=rank.roles, rows=rows, priced=self._priced))

    def takes_microbatches(self) -> None:
        """Find out whether the model can run in microbatches. Raises ShardcError if compile always refuses it."""
        try:
            self.block(Core())
        except ShardcError as e:
            self.microbatches = 1
            try:
                self.block(Core())
            except ShardcError:
                raise e from None

    @property
    def flops(self) -> float:
        """FLOPs of one row, forward and backward (at most twice forward's), with nothing recomputed."""
        s, layers = self.block(Core()), self.layers

        def of(kind: str) -> float:
            if s.whole is not None:
                return float(part_of(s.whole, kind, "middle")[FLOPS])
            first, one, two, last = (float(part_of(x, kind, "middle")[FLOPS]) for x in (s.first, s.one, s.two, s.last))
            return first + last + ((layers.number - s.before) / s.period - 2) * (two - one) if layers else 0.0

        forward, backward = of("F"), of("B")
        return forward + min(backward, 2 * forward)


def several(trained: float, bucket: float) -> bool:
    """Return whether a bucket of gradients holds several units of so many bytes: few differ from many."""
    return 0 < 4 / 3 * trained < bucket


def ordered(mesh: Mesh, sizes: Mapping[str, int]) -> Mesh:
    """Return the mesh with other sizes in another order; an axis that has several digits keeps them.

    >>> ordered(Mesh((("pp", 4), ("dp", 2), ("tp.0", 2), ("tp.1", 2))), {"dp": 2, "pp": 8, "tp": 4}).axes
    (('dp', 2), ('pp', 8), ('tp.0', 2), ('tp.1', 2))
    """
    axes: list[tuple[str, int]] = []
    for name, size in sizes.items():
        digits = [(a, n) for a, n in mesh.axes if a.partition(".")[0] == name and a != name]
        axes += digits or [(name, size)]
    return Mesh(tuple(axes))
