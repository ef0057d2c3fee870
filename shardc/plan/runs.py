"""Run dry runs of a model with few of its layers, each once, and build stages from them.

    five units of layers on four stages     [first, 1]   [1]   [2]   [1, last]      one compile, four dry runs
    two units, and three                    the whole model on one stage

A unit is a period of the model's layers. If gradients are summed in buckets that hold several periods, a unit has as
many as fill a bucket: then each unit sends, and keeps, the same. A model without a long list of layers runs whole.
"""

from __future__ import annotations

import json
import math
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
from shardc.optional import registered
from shardc.plan.few_layers import Subject, facts
from shardc.plan.space import Choice, Core, Facts, Layers, spec
from shardc.plan.stage import CAUSES, FLOPS, Key, Meter, Stage, Vector, lines, memory_of, roles, stage
from shardc.runtime import ops
from shardc.runtime.schedule import SCHEDULES
from shardc.runtime.step.engine_optimizer import assumed
from shardc.spec import Spec
from shardc.spec.data_section import Data

#: Buckets of a stage after which one more keeps no more bytes: one fills while the previous one is summed.
_BASE = 2
#: The most units of a model whose dry run takes no longer than those of a few.
_SHORT = 9


class Weights(NamedTuple):
    """A stage's parameters, in bytes. casts: copies in the compute dtype; trained: with gradients.

    experts: those that are split over an axis of experts. buckets: the smallest buckets that they fill; each parameter
    counts for at most one. of_experts: buckets of experts. copies: number of ops that cast weights.
    """

    casts: float = 0.0
    experts: float = 0.0
    trained: float = 0.0
    buckets: float = 0.0
    of_experts: float = 0.0
    copies: float = 0.0


@dataclass(frozen=True)
class Rank:
    """The dry run of one rank, and what its price needs of the program. roles: of the mesh's axes."""

    run: DryRun
    mesh: Mesh
    roles: Mapping[str, str]
    weights: Weights

    @cached_property
    def memory(self) -> Mapping[Key, Vector]:
        """The vectors of the run without times."""
        return memory_of(self.run)


@dataclass(frozen=True)
class Stages:
    """Stages of one rank each: "first", middle with `base` units ("one") and one more ("two"), "last".

    Without a pipeline all but "two" are the whole model; without repeated layers there is only the "whole".
    ranks: those that were run. period: layers of a unit; before: layers of the first stage besides its units.
    """

    ranks: Mapping[str, Rank]
    stages: Mapping[str, Stage]
    period: int = 1
    before: int = 0
    base: int = 1

    def at(self, index: int, count: int, layers: float) -> Stage:
        """Return stage `index` of `count`, with so many layers."""
        if "whole" in self.stages:
            return self.stages["whole"]
        name = "first" if index == 0 else "last" if index == count - 1 else "one"
        units = (layers - (self.before if index == 0 else 0)) / self.period - self.base
        return lines(self.stages[name], self.stages["two"], self.stages["one"], units)

    def runs(self, count: int) -> list[DryRun]:
        """Return the dry runs that represent `count` stages."""
        names = ["first", *["one"] * (count - 2), "last"] if count > 1 else [*self.ranks][-1:]
        return [self.ranks[name].run for name in names]

    @property
    def trained(self) -> float:
        """Bytes of gradients of a unit of layers."""
        one, two = (self.ranks[name].weights.trained if name in self.ranks else 0.0 for name in ("one", "two"))
        return two - one


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
                of = roles(program.spec)
                ranks = [Rank(self._dry_run(program, c), program.mesh, of, _weights(program, c)) for c in at]
                self._found[key] = ranks
            except ShardcError as e:
                self._found[key] = e
        found = self._found[key]
        if isinstance(found, ShardcError):
            raise found
        return found

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

        False with `every: 2`, patterns for single layers, or a feature that decides over all layers.
        """
        if self.facts.layers is None:
            return True
        if any(entry.every > 1 for entry in spec.checkpoint):
            return False
        if any(spans(spec) for spans in registered("section", "spans_layers")):
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
    mesh, held = program.mesh, [p for p in program.params if coordinate in (p.stages or (0,))]
    names, copies = {p.name for p in program.params}, (torch.ops.aten._to_copy.default, ops.cast_once)
    copied = [n for n in calls(program.stages[coordinate].graph) if n.target in copies]
    casts = [n for n in copied if operands_of(n)[0].name in names]
    experts = program.spec.experts
    parts = {part for e in experts if e.axis in mesh.names for part in mesh.digits(e.axis)}
    trained, smallest = [p for p in held if p.requires_grad], Data().bucket_bytes()
    spread = [p for p in held if any(isinstance(p.layout[x], Shard) for x in parts)]
    buckets = {p.name: min(p.value.nbytes(mesh) / smallest, 1.0) for p in trained}
    return Weights(
        float(sum(n.meta["value"].nbytes(mesh) for n in casts)),
        float(sum(p.value.nbytes(mesh) for p in spread)),
        float(sum(p.value.nbytes(mesh) for p in trained)),
        sum(buckets.values()),
        sum(buckets.get(p.name, 0.0) for p in spread),
        float(len(casts)),
    )


@dataclass
class Library:
    """Stages of every way to split and recompute, on one device. facts: of the model, with the precision of its specs.

    headroom: the share of the device's memory to leave free. sequence, number: of tokens and layers, if not the
    model's. microbatches: of the runs of blocks: a first and a last one, or 1 if the model cannot run in microbatches,
    as with statistics of the batch. `dataclasses.replace` makes one for another device of this kind, sequence or number
    of layers, with the same dry runs.
    """

    runs: Runs
    facts: Facts
    device: Device
    headroom: float = 0.0
    sequence: int | None = None
    microbatches: int = 2
    number: int | None = None
    _stages: dict[object, Stage] = field(default_factory=dict, init=False)
    _priced: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def usable(self) -> float:
        """Bytes of the device's memory that a step may use."""
        return self.device.memory * (1 - self.headroom)

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
        few = self.pipelined if self.layers is not None else self.alone
        return few(entries, choice.batch, more=rows)

    def pipelined(self, spec: Mapping[str, Any], rows: int, axis: str = "pp", times: int = 1, more: int = 1) -> Stages:
        """Return a spec's stages, from a pipeline of four stages along `axis` instead of the spec's pipeline.

        They have five units of layers; nine if units fill buckets (_BASE). times: periods of layers in a unit.
        more: factor on the rows.
        """
        layers, sizes = self.layers, spec["mesh"]
        assert layers is not None
        split = SCHEDULES[spec.get("pipeline", {}).get("schedule", "1f1b")].splits_backward
        mesh = {a: n for a, n in sizes.items() if a != axis}
        inside = axis in sizes and next(iter(sizes)) != axis  # then neighbours along outer axes are further apart
        base, p = _BASE if times > 1 else 1, times * layers.period
        counts = [layers.first + base * p, base * p, (base + 1) * p, base * p]
        pipeline = {"axis": axis, "balance": counts, "schedule": "zb-h1" if split else "1f1b"}
        document = {**spec, "mesh": {axis: 4, **mesh}, "pipeline": pipeline}
        units = (sum(counts) - layers.first) // layers.period
        each = self.runs.ranks(document, rows, units, self.sequence, (0, 1, 2, 3))
        ranks = dict(zip(("first", "one", "two", "last"), each, strict=True))
        stages = {name: self._stage(rank, sizes if inside else None, more) for name, rank in ranks.items()}
        return Stages(ranks, stages, p, layers.first, base)

    def alone(self, spec: Mapping[str, Any], rows: int, times: int = 1, more: int = 1) -> Stages:
        """Return the only stage of a spec without a pipeline, if possible from two and three units of layers.

        times, more: as of `pipelined`; more only without layers.
        """
        layers = self.layers
        if layers is None:
            whole = self._only(spec, rows, None)
            return Stages({"whole": whole}, {"whole": self._stage(whole, rows=more)})
        ranks = {name: self._only(spec, rows, n * times) for name, n in (("one", 2), ("two", 3))}
        one, two = map(self._stage, ranks.values())
        stages = {"first": one, "one": one, "two": two, "last": one}
        return Stages(ranks, stages, times * layers.period, layers.first, 2)

    def periods(self, bucket: float, trained: float, most: float) -> int:
        """Return the periods of layers in a unit: 1, or as many as fill a bucket, if that is less than `most`.

        0: the whole model's dry run takes no longer than those of few such units.
        """
        times, layers = fill(bucket, trained), self.layers
        if not 1 < times < most or layers is None:
            return 1
        if layers.number - layers.first > _SHORT * times * layers.period:
            return times
        return 0 if self.number is None else 1

    def _only(self, spec: Mapping[str, Any], rows: int, units: int | None) -> Rank:
        return self.runs.ranks(spec, rows, units, self.sequence, (0,))[0]

    def _stage(self, rank: Rank, sizes: Mapping[str, int] | None = None, rows: int = 1) -> Stage:
        """Return a rank's stage. sizes: of the mesh that it is a part of, if another one was run."""
        if (key := (id(rank), rows, sizes and tuple(sizes.items()))) not in self._stages:
            mesh, number = (rank.mesh, rank.run.rank) if sizes is None else (ordered(rank.mesh, sizes), 0)
            clock = Meter(self.device, mesh, number, roles=rank.roles, rows=rows, priced=self._priced)
            self._stages[key] = stage(rank.run, rank.memory, clock)
        return self._stages[key]

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
        forward, backward = (float(self._of_model(kind, 1)[FLOPS]) for kind in "FB")
        return forward + min(backward, 2 * forward)

    @property
    def products(self) -> float:
        """Seconds of forward's products of one row on one device, in a large microbatch."""
        return float(self._of_model("F", 64)[CAUSES][0]) / 64

    def _of_model(self, kind: str, rows: int) -> Vector:
        """Return a part of a microbatch of the whole model on one device. Memory is not that of the whole."""
        s = self.block(Core(), rows)
        if self.layers is None:
            return s.stages["whole"].part(kind, "middle")
        first, one, two, last = (x.part(kind, "middle") for x in s.stages.values())
        return first + last + ((self.layers.number - s.before) / s.period - 2) * (two - one)


def fill(bucket: float, trained: float) -> int:
    """Return about how many periods of layers fill a bucket. trained: bytes of gradients of a period.

    >>> fill(25.0, 8.0), fill(25.0, 10.0), fill(25.0, 40.0), fill(0.0, 10.0)
    (3, 3, 1, 1)
    """
    if bucket <= trained or not trained:
        return 1
    some = math.floor(bucket / trained), math.ceil(bucket / trained)
    return min(some, key=lambda n: abs(1 - bucket / (n * trained)))


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
