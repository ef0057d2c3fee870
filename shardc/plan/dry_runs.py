"""Dry runs of one microbatch on one stage, for every way to split and recompute, with a few of the model's layers.

    five units of layers on four stages     [first, 1]   [1]   [2]   [1, last]      one compile, four dry runs
    a stage of n units                      [1] + (n - 1) · ([2] - [1]),  likewise the first stage and the last one

A unit is a period of the model's layers; where gradients are summed in buckets that hold several, it is as many as fill
one, so that each unit sends, and keeps, as much as the next.

A model without a long list of layers is run as a whole, as one stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.machine.collectives import places
from shardc.machine.device import Device
from shardc.plan.facts import Facts
from shardc.plan.highest_moment import Moments, moments, raised
from shardc.plan.records import Rank, Records, Weights
from shardc.plan.reserved_bytes import Few
from shardc.plan.space import Choice, Core, Layers, SpecTemplate, budget, spec
from shardc.plan.stage_vectors import (
    CAUSES,
    FIXED,
    FLOPS,
    PRODUCTS,
    SURE,
    WHAT,
    Key,
    Meter,
    Prices,
    Stage,
    axes_of,
    elsewhere,
    lines,
    part_of,
    stage,
    then,
)
from shardc.runtime.schedule import SCHEDULES

#: Of causes of time: waiting for other stages.
_STAGES = WHAT.index("pp")
#: Units of a stage that are buckets, so many that one more keeps no more: one fills while the one before it is summed.
_BASE = 2
#: Units of a model whose dry run takes no longer than those of a few.
_SHORT = 9


@dataclass(frozen=True)
class Stages:
    """Stages of one rank each: of a model of layers the first, a middle one of one unit and of two, and the last; of
    another model only `whole`.

    period: layers of a unit; before: layers of the first stage besides its units. base: units of the first, a middle
    (`one`) and the last stage; `two` has one more. weights: of the first, a middle and
    the last stage. ranks: those that were run, by the name of their stage. least: these are lower bounds of stages that
    were not run (shardc.plan.bounds); beside: of each that they follow from, what the first stage and the last take for
    what is no layer, in the time of a layer.
    """

    whole: Stage | None = None
    first: Stage = field(default_factory=dict)
    one: Stage = field(default_factory=dict)
    two: Stage = field(default_factory=dict)
    last: Stage = field(default_factory=dict)
    period: int = 1
    before: int = 0
    base: int = 1
    weights: tuple[Weights, Weights, Weights] = (Weights(), Weights(), Weights())
    ranks: Mapping[str, Rank] = field(default_factory=dict, repr=False)
    least: bool = False
    beside: tuple[tuple[float, float], ...] = ()
    _moments: dict[str, dict[Key, Moments]] = field(default_factory=dict, repr=False, compare=False)

    def at(self, index: int, count: int, layers: float) -> Stage:
        """Stage `index` of `count`, with so many layers (several stages)."""
        assert self.whole is None
        if index == 0:
            return lines(self.first, self.two, self.one, (layers - self.before) / self.period - self.base)
        base = self.last if index == count - 1 else self.one
        return lines(base, self.two, self.one, layers / self.period - self.base)

    def highest(self, index: int, count: int, layers: float) -> Stage:
        """As `at`, at the moments that are the highest with so many layers. Of dry runs, not of what follows from
        others.
        """
        name = "first" if index == 0 else "last" if index == count - 1 else "one"
        units = (layers - self.before * (index == 0)) / self.period - self.base
        if name not in self._moments:
            self._moments[name] = moments(*(self.ranks[k].run for k in (name, "one", "two")))
        return raised(self.at(index, count, layers), self._moments[name], units)

    def few(self, counts: Sequence[int]) -> Few:
        """The dry runs that stand for those of stages with so many layers each."""
        first, one, two, last = (self.ranks[name].run for name in ("first", "one", "two", "last"))
        base = [first, *[one] * (len(counts) - 2), last]
        units = [(n - self.before * (i == 0)) / self.period - self.base for i, n in enumerate(counts)]
        return Few(base, units, one, two)

    def alone(self, layers: int) -> Stage:
        """The whole model as one stage, from the first and the last stage run one after the other."""
        if self.whole is not None:
            return self.whole
        front = lines(self.first, self.two, self.one, (layers - self.before) / self.period - 2)
        joined: Stage = {}
        for key in {**front, **self.last}:
            kind, which = key
            if kind.startswith(("SEND", "RECV")):
                continue
            a, b = part_of(front, kind, which), part_of(self.last, kind, which)
            joined[key] = then(b, a) if kind in ("B", "I", "W") else then(a, b)
            for columns in (CAUSES, FIXED, SURE):
                joined[key][columns][_STAGES] = 0.0  # there are no others, to hand on a loss to
        return joined


def mixed(a: Stages, b: Stages, share: float) -> Stages:
    """a + share · (b - a)."""
    b = replace(b, beside=a.beside + b.beside)
    if a.whole is not None and b.whole is not None:
        return replace(b, whole=lines(a.whole, b.whole, a.whole, share))
    pairs = (a.first, b.first), (a.one, b.one), (a.two, b.two), (a.last, b.last)
    first, one, two, last = (lines(x, y, x, share) for x, y in pairs)
    return replace(b, first=first, one=one, two=two, last=last)


@dataclass
class Library:
    """The stages of every way to split and recompute, on one device. records: dry runs, which are made once. template:
    what all specs have in common. microbatches: of the runs for estimates: a first and a last one, or 1 for a model
    that cannot be run in microbatches, as where statistics of the batch are used.
    """

    records: Records
    template: SpecTemplate
    device: Device
    sequence: int | None = None
    microbatches: int = 2
    number: int | None = None
    _cores: dict[Core, Stages | ShardcError] = field(default_factory=dict)
    _elsewhere: dict[tuple[Core, tuple[int, ...]], Stages] = field(default_factory=dict)
    _moved: dict[object, Stage] = field(default_factory=dict)
    _axes: dict[tuple[Core, str], tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    _pipelined: dict[str, Stages] = field(default_factory=dict)
    _priced: Prices = field(default_factory=Prices, repr=False)
    _alone: dict[str, tuple[Stage, Few]] = field(default_factory=dict)

    @property
    def facts(self) -> Facts:
        return self.records.facts

    def on(self, device: Device) -> Library:
        """The same on another device of its kind, from the same dry runs."""
        assert (device.kind == "cpu") == (self.device.kind == "cpu")
        return Library(self.records, self.template, device, self.sequence, self.microbatches)

    def of_length(self, sequence: int) -> Library:
        """The same with rows of so many tokens."""
        return Library(self.records, self.template, self.device, sequence, self.microbatches)

    def of_layers(self, number: int) -> Library:
        """The same of a model with so many layers, from the same dry runs."""
        return replace(self, number=number, _alone={})

    @property
    def layers(self) -> Layers | None:
        """The model's list of layers that repeats."""
        layers = self.facts.layers
        return layers if layers is None or self.number is None else replace(layers, number=self.number)

    def core(self, choice: Choice) -> Stages:
        """The stages for a choice's core: one row a microbatch, no data axis. Raises ShardcError if compile refuses
        it.
        """
        key = choice.core
        if key not in self._cores:
            try:
                self._cores[key] = self._core(Choice(**key._asdict(), microbatches=self.microbatches))
            except ShardcError as e:
                self._cores[key] = e
        core = self._cores[key]
        if isinstance(core, ShardcError):
            raise core
        return core

    def ask(self, core: Core) -> None:
        """Ask for the dry runs of a core, and leave it at that. Raises ShardcError if compile refuses it."""
        for keep in (core.checkpoint,) if budget(core.checkpoint) is None else ("full", "none"):
            choice = Choice(**core._replace(checkpoint=keep)._asdict(), microbatches=self.microbatches)
            entries = spec(choice, self.template)
            if self.layers is None:
                self._only(entries, choice.batch, None)
            else:
                self._four(entries, choice.batch, (0, 1, 2, 3))

    @property
    def known(self) -> dict[Core, Stages]:
        """Those that have been run already, and that compile has accepted."""
        return {core: found for core, found in self._cores.items() if isinstance(found, Stages)}

    def knows(self, core: Core) -> bool:
        """Whether it is one of these."""
        return isinstance(self._cores.get(core), Stages)

    def elsewhere(self, core: Core, other: Core) -> Stages:
        """The stages of a core that was run, where its collectives are between as many ranks as another core's."""
        stages = self.core(Choice(**core._asdict()))
        if core[:3] == other[:3]:
            return stages
        if (share := budget(core.checkpoint)) is not None:
            full, none = (self.elsewhere(core._replace(checkpoint=keep), other) for keep in ("full", "none"))
            return mixed(full, none, share)
        key = core, other[:3]
        if key not in self._elsewhere:
            four: dict[str, int] = {} if self.layers is None else {"pp": 4}
            sizes = {**four, **{a: n for a, n in Choice(**other._asdict()).mesh.items() if n > 1}}
            named = {name: self._on(core, name, rank, sizes) for name, rank in stages.ranks.items()}
            self._elsewhere[key] = replace(stages, **named, ranks={})  # type: ignore[arg-type]
        return self._elsewhere[key]

    def _on(self, core: Core, name: str, rank: Rank, sizes: Mapping[str, int]) -> Stage:
        """A stage on a mesh of other sizes. Many of these have the same ranks in a node, for all axes that it uses."""
        mesh = ordered(rank.mesh, sizes)
        axes = self._axes.get((core, name))
        if axes is None:
            axes = self._axes[core, name] = axes_of(rank.run)
        key = core, name, *(places(self.device, mesh.group(0, each)) for each in axes)
        if key not in self._moved:
            there = Meter.of(self.device, mesh, 0, rank.roles, self._priced)
            self._moved[key] = elsewhere(getattr(self.core(Choice(**core._asdict())), name), rank.run, there)
        return self._moved[key]

    def pipelined(self, spec: Mapping[str, Any], rows: int, axis: str = "pp", times: int = 1) -> Stages:
        """A spec's stages, from a pipeline of four stages along `axis` in place of its own. times: so many periods of
        layers are a unit.
        """
        layers = self.layers
        assert layers is not None
        split = SCHEDULES[spec.get("pipeline", {}).get("schedule", "1f1b")].splits_backward
        sizes = spec["mesh"]
        mesh = {a: n for a, n in sizes.items() if a != axis}
        inside = axis in sizes and next(iter(sizes)) != axis  # then neighbours elsewhere lie further apart
        key = repr(({**spec, "pipeline": split, "mesh": mesh}, rows, list(sizes.items()) if inside else (), times))
        if key not in self._pipelined:
            ranks = self._four({**spec, "mesh": mesh}, rows, (0, 1, 2, 3), axis, split, times)
            named = dict(zip(("first", "one", "two", "last"), ranks, strict=True))
            first, one, two, last = self._stages(named, sizes if inside else None).values()
            weights = ranks[0].weights, ranks[1].weights, ranks[3].weights
            period, base = times * layers.period, _BASE if times > 1 else 1
            self._pipelined[key] = Stages(None, first, one, two, last, period, layers.first, base, weights, named)
        return self._pipelined[key]

    def _four(
        self,
        spec: Mapping[str, Any],
        rows: int,
        at: tuple[int, ...],
        axis: str = "pp",
        split: bool = False,
        times: int = 1,
    ) -> list[Rank]:
        """Ranks of the program of five units of layers on four stages; of nine where units fill buckets (_BASE)."""
        layers = self.layers
        assert layers is not None
        base = _BASE if times > 1 else 1
        p = times * layers.period
        counts = [layers.first + base * p, base * p, (base + 1) * p, base * p]
        mesh = {axis: 4, **{a: n for a, n in spec["mesh"].items() if a != axis}}
        pipeline = {"axis": axis, "balance": counts, "schedule": "zb-h1" if split else "1f1b"}
        units = (sum(counts) - layers.first) // layers.period
        return self.records.ranks({**spec, "mesh": mesh, "pipeline": pipeline}, rows, units, self.sequence, at)

    def alone(self, spec: Mapping[str, Any], rows: int, bucket: float = 0.0) -> tuple[Stage, Few]:
        """The whole model on one stage, and the dry runs that stand for it: from two units of its layers and three, or
        as it is. bucket: bytes of gradients that are summed over data axes at once; 0: none are.
        """
        layers = self.layers
        if layers is None:
            only = self._only(spec, rows, None)
            return self._stage(only), Few([only.run], [0], only.run, only.run)
        key = repr((spec, rows, bucket))
        if key not in self._alone:
            two, three = self._of_units(spec, rows, 1)
            units = (layers.number - layers.first) / layers.period
            times = fill(bucket, three.weights.trained - two.weights.trained)
            if 1 < times < units and self.short(times) and self.number is None:
                only = self._only(spec, rows, None)
                self._alone[key] = self._stage(only), Few([only.run], [0], only.run, only.run)
                return self._alone[key]
            if times > 1 and not self.short(times):
                two, three = self._of_units(spec, rows, times)
                units /= times
            few, more = self._stage(two), self._stage(three)
            whole = raised(lines(few, more, few, units - 2), moments(two.run, two.run, three.run), units - 2)
            self._alone[key] = whole, Few([three.run], [units - 3], two.run, three.run)
        return self._alone[key]

    def short(self, times: int) -> bool:
        """Whether a dry run of the whole model takes no longer than those of a few units of so many periods."""
        layers = self.layers
        return layers is None or layers.number - layers.first <= _SHORT * times * layers.period

    def _of_units(self, spec: Mapping[str, Any], rows: int, times: int) -> tuple[Rank, Rank]:
        """The model with two units of so many periods of its layers, and with three."""
        asks = [partial(self._only, spec, rows, units * times) for units in (2, 3)]
        self.records.begin(asks[0], asks[1:])
        two, three = (ask() for ask in asks)
        return two, three

    def _only(self, spec: Mapping[str, Any], rows: int, units: int | None) -> Rank:
        return self.records.ranks(spec, rows, units, self.sequence, (0,))[0]

    def _core(self, choice: Choice) -> Stages:
        if (share := budget(choice.checkpoint)) is not None:  # chosen by cost: not worse than a mixture
            full, none = (self.core(replace(choice, checkpoint=keep)) for keep in ("full", "none"))
            return mixed(full, none, share)
        entries = spec(choice, self.template)
        if self.layers is not None:
            return self.pipelined(entries, choice.batch)
        rank = self._only(entries, choice.batch, None)
        named = {"whole": rank}
        whole = self._stages(named)["whole"]
        return Stages(whole, weights=(rank.weights, Weights(), Weights()), ranks=named)

    def _stages(self, ranks: Mapping[str, Rank], sizes: Mapping[str, int] | None = None) -> dict[str, Stage]:
        """{name: stage}. sizes: of the mesh that they are a part of, where that is not the one that was run."""
        made = {}
        for name, rank in ranks.items():
            mesh, number = (rank.mesh, rank.run.rank) if sizes is None else (ordered(rank.mesh, sizes), 0)
            made[name] = stage(rank.run, Meter.of(self.device, mesh, number, rank.roles, self._priced))
        return made

    def _stage(self, rank: Rank) -> Stage:
        return stage(rank.run, Meter.of(self.device, rank.mesh, rank.run.rank, rank.roles))

    def takes_microbatches(self) -> None:
        """Find out whether the model can be run in microbatches. Raises ShardcError if compile refuses it at all."""
        try:
            self.core(Choice())
        except ShardcError as e:
            self.microbatches = 1
            self._cores.clear()
            try:
                self.core(Choice())
            except ShardcError:
                raise e from None

    @cached_property
    def flops(self) -> float:
        """Of the model and one row: three times forward's products, as each has two in backward; nothing recomputed."""
        return 3 * self._of_forward(FLOPS)

    @cached_property
    def least_seconds(self) -> float:
        """Of these products on one device, whatever shapes they have with more rows."""
        return 3 * self._of_forward(PRODUCTS)

    def _of_forward(self, column: int) -> float:
        whole = self.core(Choice()).alone(self.layers.number if self.layers else 0)
        return float(part_of(whole, "F", "middle")[column])


def fill(bucket: float, trained: float) -> int:
    """How many periods of layers fill a bucket of gradients, about. trained: bytes of one's parameters that get
    gradients.

    >>> fill(25.0, 8.0), fill(25.0, 10.0), fill(25.0, 40.0), fill(0.0, 10.0)
    (3, 3, 1, 1)
    """
    if bucket <= trained or not trained:
        return 1
    some = math.floor(bucket / trained), math.ceil(bucket / trained)
    return min(some, key=lambda n: abs(1 - bucket / (n * trained)))


def ordered(mesh: Mesh, sizes: Mapping[str, int]) -> Mesh:
    """The mesh with other sizes, in another order; an axis that is seen as several digits stays so.

    >>> ordered(Mesh((("pp", 4), ("dp", 2), ("tp.0", 2), ("tp.1", 2))), {"dp": 2, "pp": 8, "tp": 4}).axes
    (('dp', 2), ('pp', 8), ('tp.0', 2), ('tp.1', 2))
    """
    axes: list[tuple[str, int]] = []
    for name, size in sizes.items():
        digits = [(a, n) for a, n in mesh.axes if a.partition(".")[0] == name and a != name]
        axes += digits or [(name, size)]
    return Mesh(tuple(axes))
