"""The price of a spec, from dry runs of its own: a schedule assembled from stages of a few layers, or the whole program
where it is small.

`Priced` is step time, what it is spent on, peak memory by kind, and what a device has to have for it, on the spec's own
mesh, with ZeRO's buckets and overlap as in the engine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardc.cost.peak_memory import memory
from shardc.cost.peak_memory import reserved as allocated
from shardc.cost.recorded import DryRun, parts
from shardc.cost.step import assemble
from shardc.machine.collectives import collective_seconds
from shardc.plan.runs import Library, Stages, several
from shardc.plan.stage import (
    BYTES,
    CAUSES,
    FLOPS,
    HIGH,
    NET,
    OF_UPDATE,
    SENT,
    WHAT,
    Meter,
    Stage,
    Vector,
    computing,
    part_of,
    parts_of,
    roles,
    typical,
)
from shardc.runtime import schedule as schedules
from shardc.runtime.schedule import Costs, Schedule
from shardc.spec import Spec

#: Of causes of time: waiting for other stages.
_STAGES = WHAT.index("pp")
#: Parts of a step outside of microbatches.
ENDS = ("before", "REDUCE", "STEP", "after", "update")


@dataclass(frozen=True)
class Priced:
    """One training step. batch: rows of the global batch.

    memory: bytes at the peak, by kind, of the rank that has the highest; reserved: bytes that torch's allocator takes
    for these tensors, of the rank that has most; outside: bytes of a device that are no tensor's and not the
    allocator's (as of shardc.cost.step.Cost). spent: seconds of the busiest rank, by cause (stage.WHAT), and "bubble";
    flops: that it computes. counts: layers of each stage of a pipeline.
    """

    batch: int
    step_seconds: float
    memory: Mapping[str, float]
    spent: Mapping[str, float]
    reserved: float
    outside: float
    counts: tuple[int, ...]
    flops: float

    @property
    def peak(self) -> float:
        """Live bytes."""
        return sum(self.memory.values())

    @property
    def needs(self) -> float:
        """Bytes that a device has to have: reserved and outside."""
        return self.reserved + self.outside

    @property
    def limit(self) -> str:
        """What most of a step's time goes to: compute, memory, launch, bubble, or the axis whose collectives are waited
        for.
        """
        return max(self.spent, key=self.spent.__getitem__)


def price(library: Library, spec: Spec, batch: int) -> Priced:
    """The price of a spec for a global batch of so many rows. Raises ShardcError if compile does."""
    each, p, layers = spec.batch.microbatches, spec.pipeline, library.layers
    if batch % (each * spec.data_ranks):
        return _whole(library, spec, batch)  # compile raises the error
    pairs = spec.execution.overlap != "none"  # of actions, which cost what their text takes
    if pairs or not library.runs.treats_layers_alike(spec):
        return _whole(library, spec, batch)
    some = min(each, 3)  # the first, one like all between, the last
    less = {**spec.to_dict(), "mesh": dict(spec.mesh.axes)}
    less["batch"] = {**less.get("batch", {}), "microbatches": some}
    rows, of = batch // each * some, roles(spec)
    summing = math.prod(n for axis, n in spec.mesh.axes if of[axis] in ("dp", "cp", "ep"))  # ranks, of gradients
    bucket = spec.data.bucket_bytes(summing) if summing > 1 else 0.0
    if p is None or spec.mesh.size(p.axis) == 1:
        less.pop("pipeline", None)
        stage, only = library.alone(less, rows, bucket)
        return _composed(library, spec, batch, [stage], [only], schedules.alone(each), ())
    maker = schedules.SCHEDULES.get(p.schedule)
    if layers is None or maker is None or maker.pairs or p.cut is not None:
        return _whole(library, spec, batch)
    stages = library.pipelined(less, rows, p.axis)
    count = p.stages or schedules.default_stages(p.schedule, spec.mesh.size(p.axis))
    counts = p.balance or balanced(beside_layers(stages), count, layers.number, stages.before)
    middle, two = stages.ranks["one"].weights.trained, stages.ranks["two"].weights.trained
    if library.number is None and several(two - middle, bucket):
        return _whole(library, spec, batch, counts)
    schedule = schedules.make(p.schedule, stages=len(counts), ranks=spec.mesh.size(p.axis), microbatches=each)
    costs = [stages.at(i, len(counts), n) for i, n in enumerate(counts)]
    first, one, last = (stages.ranks[name].run for name in ("first", "one", "last"))
    few = [first, *[one] * (len(counts) - 2), last]
    return _composed(library, spec, batch, costs, few, schedule, counts)


def balanced(beside: tuple[float, float], count: int, layers: int, before: int) -> tuple[int, ...]:
    """Layers for each of `count` stages, such that the slowest is as fast as possible. beside: what the first and the
    last take for what is no layer, in the time of a layer; before: layers that the first has in any case.
    """
    first, last = beside
    busy = [1.0] * count
    busy[0] += first
    busy[-1] += last
    more = spread(busy, layers - count - before)
    return tuple(1 + (before if i == 0 else 0) + n for i, n in enumerate(more))


def beside_layers(stages: Stages) -> tuple[float, float]:
    """How long the first stage and the last one take for what is no layer of the pattern, in the time of a layer: at
    least what it computes, as two may wait less for gathers than one does, which has nothing to hide them.
    """

    def seconds(s: Stage, causes: slice = CAUSES) -> float:
        return float(sum(typical(s, kind)[causes].sum() for kind in computing(s)))

    here = slice(CAUSES.start, CAUSES.start + 3)
    one, two = stages.one, stages.two
    more = max(seconds(two) - seconds(one), seconds(two, here) - seconds(one, here), 1e-12) / stages.period
    return (seconds(stages.first) - seconds(one)) / more, (seconds(stages.last) - seconds(one)) / more


def spread(busy: Sequence[float], layers: int) -> list[int]:
    """How many more layers each gets that is busy for so long, in the time of a layer, such that the slowest is as fast
    as possible. Of equal ones the last gets the next, as later stages keep fewer microbatches.

    >>> spread([1.5, 1.0, 1.0], 3)
    [0, 1, 2]
    """
    counts = [0] * len(busy)
    soonest = [(round(seconds, 6), -i) for i, seconds in enumerate(busy)]
    heapq.heapify(soonest)
    for _ in range(layers):
        i = -soonest[0][1]
        counts[i] += 1
        heapq.heapreplace(soonest, (round(busy[i] + counts[i], 6), -i))
    return counts


def _composed(
    library: Library,
    spec: Spec,
    batch: int,
    stages: Sequence[Stage],
    few: Sequence[DryRun],
    schedule: Schedule,
    counts: tuple[int, ...],
) -> Priced:
    """A step, assembled from the parts of its stages. few: the dry runs that stand for theirs, with few layers."""
    own = [{s: stages[s] for s in schedule.stages_of(rank)} for rank in range(schedule.ranks)]
    peaks = [_memory(mine, schedule, rank) for rank, mine in enumerate(own)]
    ends = [_once_a_step([np.sum([part_of(s, k, "")[CAUSES] for k in ENDS], 0) for s in mine.values()]) for mine in own]
    fullest = max(range(len(peaks)), key=lambda r: peaks[r].sum())
    each = [np.sum([_all(s, schedule.microbatches) for s in mine.values()], 0) for mine in own]
    whole = [v[CAUSES] + end for v, end in zip(each, ends, strict=True)]
    slow = max(range(schedule.ranks), key=lambda r: float(whole[r].sum()))
    if schedule.ranks == 1:
        step = float(whole[0].sum())
    else:
        transfer, mesh = {}, spec.mesh
        axis = spec.pipeline.axis if spec.pipeline is not None else ""
        for s in range(schedule.stages - 1):
            pair = [mesh.rank({**dict.fromkeys(mesh.names, 0), axis: schedule.placement[i]}) for i in (s, s + 1)]
            transfer[s, s + 1] = collective_seconds(
                library.device, "send_recv", float(part_of(stages[s], "SEND_F", "middle")[SENT]), (pair[0], pair[1])
            )
        step = schedules.timeline(schedule, costs(stages, transfer, schedule)).end + max(float(e.sum()) for e in ends)
    spent = dict(zip(WHAT, map(float, whole[slow]), strict=True))
    spent["bubble"] = max(step - sum(spent.values()), 0.0)
    by = dict(zip(BYTES, map(float, peaks[fullest]), strict=True))
    by["temporaries"] += by.pop("still")
    kinds = {k: n for k, n in by.items() if n > 0}
    beside = library.device.outside_bytes(max(len(_communicators(run)) for run in few))
    taken = reserved(library, few, max(float(v.sum()) for v in peaks), library.device.memory - beside)
    return Priced(batch, step, kinds, spent, taken, beside, counts, float(each[slow][FLOPS]))


def _once_a_step(ends: Sequence[Vector]) -> Vector:
    """Seconds by cause of what a rank does once a step; ends: of each of its stages. For other stages it waits once,
    however many stages it has: they hand on one loss.
    """
    spent: Vector = np.sum(ends, 0)
    spent[_STAGES] = max(float(e[_STAGES]) for e in ends)
    return spent


def _all(s: Stage, microbatches: int) -> Vector:
    """All microbatches on a stage: the first and the last one, and those between."""
    some = {"first": 1, "middle": max(microbatches - 2, 0), "last": int(microbatches > 1)}
    return np.sum([n * part_of(s, kind, which) for kind in computing(s) for which, n in some.items()], 0)  # type: ignore[no-any-return]


def costs(stages: Sequence[Stage], transfer: Mapping[tuple[int, int], float], schedule: Schedule) -> Costs:
    """Of a schedule's actions: of microbatches between the first and the last, of these two, and when ranks begin.
    What was begun with the last update is under way on all ranks: a rank's first stage waits for it, and others find it
    there.
    """

    def seconds(s: Stage, kind: str, which: str) -> float:
        return float(part_of(s, kind, which)[CAUSES].sum())

    def of(*kinds: str) -> tuple[float, ...]:
        return tuple(sum(seconds(s, k, "middle") for k in kinds if k in computing(s)) for s in stages)

    single = {}
    for i, s in enumerate(stages):
        for kind in ("F", "B", "I", "W"):
            whole = kind in computing(s) or kind == "B"
            for which, m in (("last", schedule.microbatches - 1), ("first", 0)) if whole else ():
                single[kind, i, m] = seconds(s, kind, which)
    begin = [0.0] * schedule.ranks
    for i, s in enumerate(stages):
        late, rank = max(float(part_of(s, "F", "first")[OF_UPDATE]), 0.0), schedule.placement[i]
        single["F", i, 0] -= late
        begin[rank] = begin[rank] or late
    return Costs(of("F"), of("B", "I"), of("W"), transfer, single=single, begin=begin)


def _memory(mine: Mapping[int, Stage], schedule: Schedule, rank: int) -> Vector:
    """Bytes by kind at the highest moment of a rank's step. What a part leaves may be above its highest moment, which
    was another one in fewer layers.
    """
    last = schedule.microbatches - 1
    each = [s["before", ""] for s in mine.values()]
    for a in schedules.computed(schedule.actions[rank]):
        if a.stage >= 0:
            m = a.microbatch
            which = "" if m < 0 else "first" if m == 0 else "last" if m == last else "middle"
            each.append(part_of(mine[a.stage], a.kind, which))
    each += [s[kind, ""] for kind in ("after", "update") for s in mine.values()]
    live: Vector = np.sum([s["resident", ""][NET] for s in mine.values()], 0)
    best = live
    for part in each:
        best = max(best, live + part[HIGH], live + part[NET], key=np.sum)
        live = live + part[NET]
    return np.maximum(best, 0)


def _whole(library: Library, spec: Spec, batch: int, counts: tuple[int, ...] = ()) -> Priced:
    """A spec whose program is compiled as it is, with a dry run of each of its ranks. counts: of layers of its stages,
    which it leaves open.
    """
    if counts:
        p = {k: v for k, v in spec.to_dict()["pipeline"].items() if k not in ("stages", "cut")}
        spec = Spec.load({**spec.to_dict(), "mesh": dict(spec.mesh.axes), "pipeline": {**p, "balance": counts}})
    program, each = library.runs.whole(spec, batch, library.sequence)
    schedule = schedules.of(program)
    cost = assemble(program, schedule, each, library.device)
    spent: list[dict[str, float]] = []
    for r in each:
        clock = Meter(library.device, program.mesh, r.rank, roles=roles(spec))
        for _, part in parts(r, schedule.actions[r.at]):
            clock.run(part)
        spent.append(clock.spent)
    most = max(spent, key=lambda c: sum(c.values()))
    shown = {w: most[w] for w in WHAT} | {"bubble": max(cost.step_seconds - sum(most.values()), 0.0)}
    peak = max(cost.ranks, key=lambda r: r.memory.peak)
    flops = cost.ranks[spent.index(most)].flops
    taken = float(cost.reserved), float(cost.outside)
    return Priced(batch, cost.step_seconds, dict(peak.memory.kinds), shown, *taken, counts, float(flops))


# --- what the allocator takes


def _communicators(run: DryRun) -> set[str]:
    return {r.axis for _, part in parts_of(run) for r in part.sent if r.bytes}


def reserved(library: Library, few: Sequence[DryRun], live: float, room: float) -> float:
    """Bytes that torch's allocator takes for so many live ones: what it takes beside those of few layers, with as much
    room as all others leave. room: bytes that there are for tensors.
    """
    if library.device.kind == "cpu" or live > room:
        return live
    beside = [0.0]
    for run in {id(run): run for run in few}.values():
        actions = tuple(a for a, _ in run.actions)
        high = float(memory(run, actions).peak)
        beside.append(allocated(run, actions, max(room - max(live - high, 0.0), high)) - high)
    return live + max(beside)
