"""Price a spec by dry runs: of its whole program, or of few layers to assemble a schedule from.

`Priced` holds the step time and its causes, the peak memory by kind, and the bytes that a device needs. The price is
for the spec's own mesh, with ZeRO's buckets and overlap as in the engine.
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

#: The cause of time in WHAT that is waiting for other stages.
_STAGES = WHAT.index("pp")
#: Parts of a step outside of microbatches.
ENDS = ("before", "REDUCE", "STEP", "after", "update")


@dataclass(frozen=True)
class Priced:
    """The price of one training step. batch: rows of the global batch.

    memory: bytes at the peak by kind, of the rank with the highest. reserved: bytes that torch's allocator reserves
    for these tensors, of the rank with the most. outside: bytes of a device that belong neither to tensors nor to the
    allocator (see shardc.cost.step.Cost). spent: seconds of the busiest rank, by cause (stage.WHAT) and "bubble".
    flops: of that rank. counts: layers of each stage of a pipeline.
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
        """Live bytes at the peak."""
        return sum(self.memory.values())

    @property
    def needs(self) -> float:
        """Bytes that a device needs: reserved and outside."""
        return self.reserved + self.outside

    @property
    def limit(self) -> str:
        """The largest cause of step time: compute, memory, launch, bubble, or the axis of collectives."""
        return max(self.spent, key=self.spent.__getitem__)


def price(library: Library, spec: Spec, batch: int) -> Priced:
    """Return the price of a spec for a global batch of so many rows. Raises ShardcError if compile does."""
    microbatches, p, layers = spec.batch.microbatches, spec.pipeline, library.layers
    if batch % (microbatches * spec.data_ranks):
        return _whole(library, spec, batch)  # compile raises the error
    pairs = spec.execution.overlap != "none"  # pairs of actions are priced from their own graphs
    if pairs or not library.runs.treats_layers_alike(spec):
        return _whole(library, spec, batch)
    sampled = min(microbatches, 3)  # the first, one for all between, the last
    reduced = {**spec.to_dict(), "mesh": dict(spec.mesh.axes)}
    reduced["batch"] = {**reduced.get("batch", {}), "microbatches": sampled}
    rows, role = batch // microbatches * sampled, roles(spec)
    summing = math.prod(n for axis, n in spec.mesh.axes if role[axis] in ("dp", "cp", "ep"))  # ranks
    bucket = spec.data.bucket_bytes(summing) if summing > 1 else 0.0
    if p is None or spec.mesh.size(p.axis) == 1:
        reduced.pop("pipeline", None)
        stage, only = library.alone(reduced, rows, bucket)
        return _composed(library, spec, batch, [stage], [only], schedules.alone(microbatches), ())
    maker = schedules.SCHEDULES.get(p.schedule)
    if layers is None or maker is None or maker.pairs or p.cut is not None:
        return _whole(library, spec, batch)
    stages = library.pipelined(reduced, rows, p.axis)
    count = p.stages or schedules.default_stages(p.schedule, spec.mesh.size(p.axis))
    counts = p.balance or balanced(beside_layers(stages), count, layers.number, stages.before)
    middle, two = stages.ranks["one"].weights.trained, stages.ranks["two"].weights.trained
    if library.number is None and several(two - middle, bucket):
        return _whole(library, spec, batch, counts)
    schedule = schedules.make(p.schedule, stages=len(counts), ranks=spec.mesh.size(p.axis), microbatches=microbatches)
    costs = [stages.at(i, len(counts), n) for i, n in enumerate(counts)]
    first, one, last = (stages.ranks[name].run for name in ("first", "one", "last"))
    few = [first, *[one] * (len(counts) - 2), last]
    return _composed(library, spec, batch, costs, few, schedule, counts)


def balanced(beside: tuple[float, float], count: int, layers: int, before: int) -> tuple[int, ...]:
    """Divide layers over `count` stages, so that the slowest stage is as fast as possible.

    beside: time of the first and last stage outside layers, in layers. before: layers that the first stage always has.
    """
    first, last = beside
    busy = [1.0] * count
    busy[0] += first
    busy[-1] += last
    more = spread(busy, layers - count - before)
    return tuple(1 + (before if i == 0 else 0) + n for i, n in enumerate(more))


def beside_layers(stages: Stages) -> tuple[float, float]:
    """Return the time of the first and the last stage outside layers, in units of a layer's time.

    A layer takes at least its computation: two may wait less for gathers than one, which cannot hide them.
    """

    def seconds(s: Stage, causes: slice = CAUSES) -> float:
        return float(sum(typical(s, kind)[causes].sum() for kind in computing(s)))

    work = slice(CAUSES.start, CAUSES.start + 3)
    one, two = stages.one, stages.two
    layer = max(seconds(two) - seconds(one), seconds(two, work) - seconds(one, work), 1e-12) / stages.period
    return (seconds(stages.first) - seconds(one)) / layer, (seconds(stages.last) - seconds(one)) / layer


def spread(busy: Sequence[float], layers: int) -> list[int]:
    """Return how many more layers each stage gets, so that the slowest stage is as fast as possible.

    busy: its time so far, in layers. Of equal stages the last comes first, as later stages keep fewer microbatches.

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
    """Assemble the price of a step from its stages. few: their dry runs with few layers."""
    by_rank = [{s: stages[s] for s in schedule.stages_of(rank)} for rank in range(schedule.ranks)]
    peaks = [_memory(mine, schedule, rank) for rank, mine in enumerate(by_rank)]
    ends = [
        _once_a_step([np.sum([part_of(s, k, "")[CAUSES] for k in ENDS], 0) for s in mine.values()]) for mine in by_rank
    ]
    fullest = max(range(len(peaks)), key=lambda r: peaks[r].sum())
    busy = [np.sum([_all(s, schedule.microbatches) for s in mine.values()], 0) for mine in by_rank]
    whole = [v[CAUSES] + end for v, end in zip(busy, ends, strict=True)]
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
    outside = library.device.outside_bytes(max(len(_communicators(run)) for run in few))
    taken = reserved(library, few, max(float(v.sum()) for v in peaks), library.device.memory - outside)
    return Priced(batch, step, kinds, spent, taken, outside, counts, float(busy[slow][FLOPS]))


def _once_a_step(ends: Sequence[Vector]) -> Vector:
    """Sum the once-a-step seconds of a rank's stages by cause; the rank waits for other stages only once."""
    spent: Vector = np.sum(ends, 0)
    spent[_STAGES] = max(float(e[_STAGES]) for e in ends)
    return spent


def _all(s: Stage, microbatches: int) -> Vector:
    """Sum the costs of all microbatches on a stage: the first, those between, and the last."""
    counts = {"first": 1, "middle": max(microbatches - 2, 0), "last": int(microbatches > 1)}
    return np.sum([n * part_of(s, kind, which) for kind in computing(s) for which, n in counts.items()], 0)  # type: ignore[no-any-return]


def costs(stages: Sequence[Stage], transfer: Mapping[tuple[int, int], float], schedule: Schedule) -> Costs:
    """Return the costs of a schedule's actions (middle, first, last microbatch), and when ranks begin.

    All ranks run what the last update began. A rank's first stage waits for it; its other stages find it done.
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
    """Return bytes by kind at the highest moment of a rank's step.

    A part may leave more than its own peak: with fewer layers, the peak was at another moment.
    """
    last = schedule.microbatches - 1
    in_order = [s["before", ""] for s in mine.values()]
    for a in schedules.computed(schedule.actions[rank]):
        if a.stage >= 0:
            m = a.microbatch
            which = "" if m < 0 else "first" if m == 0 else "last" if m == last else "middle"
            in_order.append(part_of(mine[a.stage], a.kind, which))
    in_order += [s[kind, ""] for kind in ("after", "update") for s in mine.values()]
    live: Vector = np.sum([s["resident", ""][NET] for s in mine.values()], 0)
    best = live
    for part in in_order:
        best = max(best, live + part[HIGH], live + part[NET], key=np.sum)
        live = live + part[NET]
    return np.maximum(best, 0)


def _whole(library: Library, spec: Spec, batch: int, counts: tuple[int, ...] = ()) -> Priced:
    """Compile a spec's whole program and price it by a dry run of each rank. counts: layers of stages."""
    if counts:
        p = {k: v for k, v in spec.to_dict()["pipeline"].items() if k not in ("stages", "cut")}
        spec = Spec.load({**spec.to_dict(), "mesh": dict(spec.mesh.axes), "pipeline": {**p, "balance": counts}})
    program, runs = library.runs.whole(spec, batch, library.sequence)
    schedule = schedules.of(program)
    cost = assemble(program, schedule, runs, library.device)
    spent: list[dict[str, float]] = []
    for r in runs:
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
    """Return the bytes that torch's allocator reserves for so many live bytes.

    Adds the overhead of runs with few layers, in the room that the other layers leave. room: bytes for tensors.
    """
    if library.device.kind == "cpu" or live > room:
        return live
    overhead = [0.0]
    for run in {id(run): run for run in few}.values():
        actions = tuple(a for a, _ in run.actions)
        high = float(memory(run, actions).peak)
        overhead.append(allocated(run, actions, max(room - max(live - high, 0.0), high)) - high)
    return live + max(overhead)
