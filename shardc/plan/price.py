"""Price a spec by dry runs: of few layers to assemble a schedule from, or of its whole program.

`Priced` holds the step time and its causes, the peak memory by kind, and the bytes that a device needs. The price is
for the spec's own mesh, with ZeRO's buckets and overlap as in the engine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise

import numpy as np

from shardc.cost.peak_memory import allocations, reserve
from shardc.cost.recorded import DryRun, parts
from shardc.cost.step import assemble, costs, transfers
from shardc.layer_names import layer_of
from shardc.machine.work import Storage
from shardc.plan.runs import Library, Stages
from shardc.plan.stage import BYTES, CAUSES, FLOPS, HIGH, LATE, NET, WHAT, Meter, Stage, Vector, named, parts_of, roles
from shardc.runtime import schedule as schedules
from shardc.runtime.schedule import SCHEDULES, Schedule
from shardc.spec import Spec

#: The cause of time in WHAT that is waiting for other stages.
_STAGES = WHAT.index("pp")
#: Parts of a step outside of microbatches.
ENDS = ("before", "REDUCE", "STEP", "after", "update")


@dataclass(frozen=True)
class Priced:
    """The price of one training step. batch: rows of the global batch.

    memory: bytes at the peak by kind, of the rank with the highest. reserved: bytes that torch's allocator reserves for
    these tensors, of the rank with the most. outside: bytes of a device that do not belong to the allocator (see
    shardc.cost.step.Cost). usable: bytes of a device that a step may use.
    spent: seconds of the busiest rank, by cause (stage.WHAT) and "bubble"; flops: of that rank. counts: layers of each
    stage of a pipeline.
    """

    batch: int
    step_seconds: float
    memory: Mapping[str, float]
    spent: Mapping[str, float]
    reserved: float
    outside: float
    usable: float
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
    def fits(self) -> bool:
        """Whether the needed bytes fit in the memory that a step may use."""
        return self.needs <= self.usable

    @property
    def limit(self) -> str:
        """The largest cause of step time: compute, memory, launch, bubble, or the axis of collectives."""
        return max(self.spent, key=lambda k: self.spent[k])


def price(library: Library, spec: Spec, batch: int, *, whole_layers: bool = False) -> Priced:
    """Return the price of a spec for a global batch of so many rows. Raises ShardcError if compile does.

    whole_layers: divide layers over the stages of an open pipeline (`balanced`), as plans write them into their specs.
    Otherwise it is cut as compile cuts it, also inside of layers (shardc.passes.pipeline.cuts.even).
    """
    layers, each, p = library.layers, spec.batch.microbatches, spec.pipeline
    p = p if p is not None and spec.mesh.size(p.axis) > 1 else None
    known = p is None or (layers is not None and p.schedule in SCHEDULES and not SCHEDULES[p.schedule].pairs)
    known = known and (p is None or whole_layers or p.balance is not None or p.cut is not None)
    even = batch % (each * spec.data_ranks) == 0  # else compile raises the error
    if not (known and even and spec.execution.overlap == "none" and library.runs.treats_layers_alike(spec)):
        return _whole(library, spec, batch)  # a pair of microbatches is priced from its own program
    some = min(each, 3)  # the first, a typical one, the last
    less = {**spec.to_dict(), "mesh": dict(spec.mesh.axes)}
    less["batch"] = {**less.get("batch", {}), "microbatches": some}
    rows, of = batch // each * some, roles(spec)
    summing = math.prod(n for axis, n in spec.mesh.axes if of[axis] in ("dp", "cp", "ep"))  # ranks that sum gradients
    bucket = spec.data.bucket_bytes(summing) if summing > 1 else 0.0  # of gradients, in one sum
    if p is None:
        less.pop("pipeline", None)
    few = partial(library.alone, less, rows) if p is None else partial(library.pipelined, less, rows, p.axis)
    stages, number = few(), layers.number if layers is not None else 1
    counts = (number,) if p is None else counted(spec, stages, number)
    times = library.periods(bucket, stages.trained, max(counts) / stages.period)
    if not times:
        return _whole(library, spec, batch, () if p is None else counts)
    stages = few(times=times) if times > 1 else stages
    name, ranks = ("1f1b", 1) if p is None else (p.schedule, spec.mesh.size(p.axis))
    schedule = schedules.make(name, stages=len(counts), ranks=ranks, microbatches=each)
    costs, runs = [stages.at(i, len(counts), n) for i, n in enumerate(counts)], stages.runs(len(counts))
    return _composed(library, spec, batch, costs, runs, schedule, () if p is None else counts)


def counted(spec: Spec, stages: Stages, layers: int) -> tuple[int, ...]:
    """Return the number of layers of each stage."""
    p = spec.pipeline
    assert p is not None
    if p.balance is not None:
        return p.balance
    if p.cut is not None and all(layer_of(name) for name in p.cut):
        starts = [0, *(int(layer_of(name)[1]) for name in p.cut), layers]  # type: ignore[index]
        return tuple(b - a for a, b in pairwise(starts))
    count = p.stages or schedules.default_stages(p.schedule, spec.mesh.size(p.axis))
    return balanced(beside_layers(stages), count, layers, stages.before)


def balanced(beside: tuple[float, float], count: int, layers: int, before: int = 0) -> tuple[int, ...]:
    """Divide layers over `count` stages, so that the slowest stage is as fast as possible.

    beside: time of the first and last stage outside layers, in layers. before: layers that the first stage always has.
    Of equal stages the last gets one more first, as later stages keep fewer microbatches.

    >>> balanced((0.5, 0.0), 3, 6)
    (1, 3, 2)
    """
    counts, busy = [1 + before] + [1] * (count - 1), [1.0] * count
    busy[0] += beside[0]
    busy[-1] += beside[1]
    soonest = [(round(seconds, 6), -i) for i, seconds in enumerate(busy)]
    heapq.heapify(soonest)
    for _ in range(layers - count - before):
        i = -soonest[0][1]
        counts[i] += 1
        busy[i] += 1
        heapq.heapreplace(soonest, (round(busy[i], 6), -i))
    return tuple(counts)


def beside_layers(stages: Stages) -> tuple[float, float]:
    """Return the time of the first and the last stage outside layers, in units of a layer's time.

    A layer takes at least its computation: two may wait less for gathers than one, which cannot hide them.
    """

    def seconds(s: Stage, causes: slice = CAUSES) -> float:
        return float(sum(s.typical(kind)[causes].sum() for kind in s.computing))

    here = slice(CAUSES.start, CAUSES.start + 3)
    first, one, two, last = stages.stages.values()
    more = max(seconds(two) - seconds(one), seconds(two, here) - seconds(one, here), 1e-12) / stages.period
    return (seconds(first) - seconds(one)) / more, (seconds(last) - seconds(one)) / more


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
    own = [{s: stages[s] for s in schedule.stages_of(rank)} for rank in range(schedule.ranks)]
    peaks = [_memory(mine, schedule, rank) for rank, mine in enumerate(own)]
    ends = [_once_a_step(mine.values()) for mine in own]
    fullest = max(range(len(peaks)), key=lambda r: peaks[r].sum())
    each = [np.sum([_all(s, schedule.microbatches) for s in mine.values()], 0) for mine in own]
    whole = [v[CAUSES] + end for v, end in zip(each, ends, strict=True)]
    slow = max(range(schedule.ranks), key=lambda r: float(whole[r].sum()))
    step = float(whole[0].sum())
    if spec.pipeline is not None and schedule.ranks > 1:
        moved = {(s, s + 1): stages[s].sent for s in range(schedule.stages - 1)}
        transfer = transfers(library.device, spec.mesh, spec.pipeline.axis, schedule, moved)
        of_action, begin = _actions(stages, schedule)
        timeline = schedules.timeline(schedule, costs(of_action, schedule, transfer, begin))
        step = timeline.end + max(float(e.sum()) for e in ends)
    spent = dict(zip(WHAT, map(float, whole[slow]), strict=True))
    spent["bubble"] = max(step - sum(spent.values()), 0.0)
    by = dict(zip(BYTES, map(float, peaks[fullest]), strict=True))
    by["temporaries"] += by.pop("still")
    kinds = {k: n for k, n in by.items() if n > 0}
    sent = [{r.axis for _, part in run.ran for r in part.sent if r.bytes} for run in few]
    beside = library.device.outside_bytes(max(map(len, sent)))
    live = [float(v.sum()) for v in peaks]
    taken = reserved(library, few, schedule, live, library.device.memory - beside)
    return Priced(batch, step, kinds, spent, taken, beside, library.usable, counts, float(each[slow][FLOPS]))


def _once_a_step(stages: Iterable[Stage]) -> Vector:
    """Return seconds by cause of a rank's once-a-step work.

    A rank waits only once for other stages, however many stages it has: they pass on one loss.
    """
    each = np.array([np.sum([s.part(k, "")[CAUSES] for k in ENDS], 0) for s in stages])
    spent: Vector = each.sum(0)
    spent[_STAGES] = each[:, _STAGES].max()
    return spent


def _all(s: Stage, microbatches: int) -> Vector:
    """Sum the costs of all microbatches on a stage: the first, those between, and the last."""
    some = {"first": 1, "middle": max(microbatches - 2, 0), "last": int(microbatches > 1)}
    return np.sum([n * s.part(kind, which) for kind in s.computing for which, n in some.items()], 0)  # type: ignore[no-any-return]


def _actions(stages: Sequence[Stage], schedule: Schedule) -> tuple[dict[tuple[str, int, int], float], list[float]]:
    """Return seconds of the actions as `costs` takes them, and when ranks begin.

    All ranks run what the last update began. A rank's first stage waits for it; its other stages find it done.
    """
    of_action, begin = dict[tuple[str, int, int], float](), [0.0] * schedule.ranks
    for i, s in enumerate(stages):
        for kind in {*s.computing, "B"}:
            for which, m in (("middle", 1), ("last", schedule.microbatches - 1), ("first", 0)):
                of_action[kind, i, m] = float(s.part(kind, which)[CAUSES].sum())
        late, rank = max(float(s.part("F", "first")[LATE]), 0.0), schedule.placement[i]
        of_action["F", i, 0] -= late
        begin[rank] = begin[rank] or late
    return of_action, begin


def _memory(mine: Mapping[int, Stage], schedule: Schedule, rank: int) -> Vector:
    """Return bytes by kind at the highest moment of a rank's step.

    A part may leave more than its own peak: with fewer layers, the peak was at another moment.
    """
    each = [s["before", ""] for s in mine.values()]
    each += [mine[a.stage].part(a.kind, which) for a, which in named(schedule.actions[rank]) if a.stage >= 0]
    each += [s[kind, ""] for kind in ("after", "update") for s in mine.values()]
    live: Vector = np.sum([s["resident", ""][NET] for s in mine.values()], 0)
    best = live
    for part in each:
        best = max(best, live + part[HIGH], live + part[NET], key=np.sum)
        live = live + part[NET]
    return np.maximum(best, 0)


def _whole(library: Library, spec: Spec, batch: int, counts: tuple[int, ...] = ()) -> Priced:
    """Price a spec by dry runs of its whole program. counts: layers of stages that it leaves open."""
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
    kinds, taken = dict(peak.memory.kinds), (float(cost.reserved), float(cost.outside), library.usable)
    return Priced(batch, cost.step_seconds, kinds, shown, *taken, counts, float(flops))


# --- the allocator's memory


#: Ranks with less than this share of the highest live bytes reserve less than the fullest rank.
_LIKELY = 0.8


def reserved(library: Library, few: Sequence[DryRun], schedule: Schedule, live: Sequence[float], room: float) -> float:
    """Return the bytes that torch's allocator reserves, of the rank with the most.

    The allocator's rules run over the rank's own actions on stages of few layers, in the room that the live bytes of
    the other layers leave. On a CPU, or if live bytes exceed the room, it is the most live bytes.
    live: peak of each rank. room: bytes for tensors.
    """
    if library.device.kind == "cpu" or max(live) > room:
        return max(live)
    ends = 0, schedule.ranks - 1
    middle = max(range(schedule.ranks), key=lambda r: (r not in ends, live[r]))
    short = _shortened(schedule)
    likely = sorted(r for r in {*ends, middle} if live[r] > _LIKELY * max(live))
    return max(max(_reserved(few, short, r, live[r], room), live[r]) for r in likely)


def _reserved(few: Sequence[DryRun], schedule: Schedule, rank: int, live: float, room: float) -> float:
    stages, resident = {s: parts_of(few[s]) for s in schedule.stages_of(rank)}, list[Storage]()
    for s, each in stages.items():
        own = cache(lambda x: Storage(x.nbytes, x.kind))  # two stages may have the same run
        resident += map(own, few[s].resident)
        for key, part in each.items():
            each[key] = replace(part, changes=[(sign, own(x)) for sign, x in part.changes])
    step = [(each["before", ""], False) for each in stages.values()]
    for a, which in named(schedule.actions[rank]):
        step += [(part, False) for part in stages[a.stage].similar(a.kind, which)] if a.stage >= 0 else []
    step += [(each["after", ""], i == 0) for i, each in enumerate(stages.values())]
    step += [(each["update", ""], False) for each in stages.values()]
    high = max(accumulate(sign * s.nbytes for sign, s, *_ in allocations(resident, step)))
    others = max(live - high, 0.0)
    return reserve(resident, step, max(room - others, high)) + others


def _shortened(schedule: Schedule) -> Schedule:
    """Return the schedule with fewer microbatches, but as many that a rank keeps: the rest is repetition."""
    ranks, most, per_rank = schedule.ranks, schedule.microbatches, schedule.stages // schedule.ranks
    if ranks == 1:
        return schedules.alone(min(most, 4))
    kept = SCHEDULES[schedule.name].kept
    for n in range(2 * ranks, most, ranks):
        if all(kept(ranks, per_rank, n, first) == kept(ranks, per_rank, most, first) for first in (True, False)):
            return schedules.make(schedule.name, stages=schedule.stages, ranks=ranks, microbatches=n)
    return schedule
