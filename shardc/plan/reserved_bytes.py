"""What torch's allocator reserves on a rank of many layers, from dry runs of few (shardc.cost.caching_allocator): its
rules run over the rank's own actions, on stages of few units of layers, and on stages of one unit more.

    reserved = live bytes at the peak + gaps        what a unit of layers adds to the gaps is the same for each

Gaps depend on how much is free above the live bytes: where CUDA has no more, segments that are free are given back. So
few layers get as much room as the blocks of all others leave.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardc.cost.caching_allocator import CachingAllocator
from shardc.cost.peak_memory import reserve
from shardc.cost.recorded import HOST, DryRun
from shardc.machine.device import Device
from shardc.machine.work import Part, Storage
from shardc.plan.growing_blocks import become, growing, with_sizes, without
from shardc.plan.stage_vectors import SHARED
from shardc.runtime import schedule as schedules
from shardc.runtime.schedule import SCHEDULES, Schedule


class Few(NamedTuple):
    """Dry runs that stand for those of a pipeline's stages, or of the whole model as one. base: of each stage, with few
    of its layers; units: of layers that each has beside these; one, two: a stage of n units, and of n + 1. bucket:
    bytes of gradients that are sent at once.
    """

    base: Sequence[DryRun]
    units: Sequence[float]
    one: DryRun
    two: DryRun
    bucket: float = math.inf


def outside(device: Device, few: Few) -> float:
    """Bytes that are no tensor's and not the allocator's. See shardc.cost.step.Cost.outside."""
    return device.outside_bytes(max(len(_communicators(run)) for run in few.base))


def reserved(device: Device, few: Few, schedule: Schedule, live: Sequence[float], room: float) -> float:
    """Bytes, of the rank that has most. live: at most, of each rank. room: bytes that there are for tensors.

    Gaps of ranks differ less than their live bytes: of those in the middle of a pipeline the fullest counts.
    """
    if device.kind == "cpu" or max(live) > room:
        return max(live)
    ends = 0, schedule.ranks - 1
    middle = max(range(schedule.ranks), key=lambda r: (r not in ends, live[r]))
    short, grows = _shortened(schedule), growing(few.one, few.two)
    likely = [r for r in {*ends, middle} if live[r] > _LIKELY * max(live)]
    return max(max(_reserved(few, grows, short, r, room), live[r]) for r in likely)


#: What has less than this share of the highest live bytes reserves less.
_LIKELY = 0.8


#: See growing_blocks.growing.
Grows = Mapping[Storage, tuple[int, Storage]]


def _reserved(few: Few, grows: Grows, schedule: Schedule, rank: int, room: float) -> float:
    """Bytes, of a rank. grows: storages of `one` that grow. room: bytes that there are for tensors."""
    mine = schedule.stages_of(rank)
    larger = {s: _with_units(few, grows, s) for s in mine}
    base = {s: run for s, (run, _) in larger.items()}
    high, _ = _levels(_own(base), schedule, rank)
    others = 0.0
    if more := sum(few.units[s] for s in mine):

        def stages(run: DryRun) -> dict[int, DryRun]:
            return _own(dict.fromkeys(mine, run))

        each = [_levels(stages(run), schedule, rank)[1] for run in (few.one, few.two)]
        steepest = max(range(len(each[0])), key=lambda i: each[1][i] - each[0][i])
        alone = without(few.one, grows), without(few.two, {x for _, x in grows.values()})
        held = [Counter(s.nbytes for s in _held(stages(run), schedule, rank, steepest)) for run in alone]
        new, gone = (_in_blocks(list(some.elements())) for some in (held[1] - held[0], held[0] - held[1]))
        others = more * (new - gone) / len(mine)
        if any(beside for _, beside in larger.values()):
            there = {*_held(stages(few.one), schedule, rank, steepest)}
            others += sum(n for _, beside in larger.values() for s, n in beside.items() if s in there)
    return _of_allocator(base, schedule, rank, max(room - others, high)) + others


def _with_units(few: Few, grows: Grows, stage: int) -> tuple[DryRun, dict[Storage, float]]:
    """The dry run of a stage with few units of layers, but with the blocks that grow with these as large as with all of
    its own; and, of the storages of `one`, the bytes of these that are in other blocks, as no bucket is so large.
    """
    run, units = few.base[stage], few.units[stage]
    if not units or not grows:
        return run, {}
    if run is few.two:
        own = {s: x for s, (_, x) in grows.items()}
    else:
        of_run = become(few.one, run) if run is not few.one else {s: s for s in grows}
        own = {s: of_run[s] for s in grows if s in of_run}
    with_all = {s: x.nbytes + units * grows[s][0] for s, x in own.items()}
    share = min(few.bucket / max(with_all.values(), default=1.0), 1.0)
    sizes = {s: max(n * share, own[s].nbytes) for s, n in with_all.items()}
    elsewhere = {s: with_all[s] - n for s, n in sizes.items() if n < with_all[s]}
    return with_sizes(run, {x: sizes[s] for s, x in own.items()}), elsewhere


def _shortened(schedule: Schedule) -> Schedule:
    """The same with fewer microbatches, of which a rank keeps as many at once: the rest is repetition."""
    ranks, most, per_rank = schedule.ranks, schedule.microbatches, schedule.stages // schedule.ranks
    if ranks == 1:
        return schedules.alone(min(most, 4))
    kept = SCHEDULES[schedule.name].kept
    for n in range(2 * ranks, most, ranks):
        if all(kept(ranks, per_rank, n, first) == kept(ranks, per_rank, most, first) for first in (True, False)):
            return schedules.make(schedule.name, stages=schedule.stages, ranks=ranks, microbatches=n)
    return schedule


def _of_allocator(runs: Mapping[int, DryRun], schedule: Schedule, rank: int, limit: float) -> int:
    """Bytes that are reserved on a rank with these stages."""
    own = _own(runs)
    return reserve([s for run in own.values() for s in run.resident], list(_step(own, schedule, rank)), limit)


def _levels(runs: Mapping[int, DryRun], schedule: Schedule, rank: int) -> tuple[int, list[int]]:
    """Live bytes at most, and before and after each part."""
    there = Counter(s for run in runs.values() for s in run.resident if s.kind != HOST)
    live = most = sum(s.nbytes for s in there.elements())
    levels = [live]
    for part, _ in _step(runs, schedule, rank):
        for sign, storage in part.changes:
            if storage.kind != HOST and there[storage] + sign >= 0:
                there[storage] += sign
                live += sign * storage.nbytes
                most = max(most, live)
        levels.append(live)
    return most, levels


def _held(runs: Mapping[int, DryRun], schedule: Schedule, rank: int, parts: int) -> Iterator[Storage]:
    """The storages that are live after so many parts."""
    live = Counter(s for run in runs.values() for s in run.resident if s.kind != HOST)
    for part, _ in itertools.islice(_step(runs, schedule, rank), parts):
        for sign, storage in part.changes:
            live[storage] = max(live[storage] + sign * (storage.kind != HOST), 0)
    yield from live.elements()


#: Of how many units the blocks are counted: what a segment has left goes to the next.
_SEVERAL = 8


def _in_blocks(sizes: Sequence[int]) -> float:
    """Bytes that an allocator takes for storages of these sizes, of which there are many."""
    allocator, reserved = CachingAllocator(), []
    for _ in range(2):
        for n in (n for _ in range(_SEVERAL) for n in sizes):
            allocator.allocate(n)
        reserved.append(allocator.reserved)
    return (reserved[1] - reserved[0]) / _SEVERAL


def _own(runs: Mapping[int, DryRun]) -> dict[int, DryRun]:
    """The same, but no two stages have a storage in common: one dry run may stand for several."""
    seen: set[int] = set()
    own: dict[int, DryRun] = {}
    for stage, run in runs.items():
        own[stage] = with_sizes(run, {}) if id(run) in seen else run
        seen.add(id(run))
    return own


def _step(runs: Mapping[int, DryRun], schedule: Schedule, rank: int) -> Iterator[tuple[Part, bool]]:
    """The parts of a step, as shardc.cost.peak_memory.reserve takes them."""
    parts = {stage: _parts(run) for stage, run in runs.items()}
    last = schedule.microbatches - 1
    yield from ((run.before, False) for run in runs.values())
    for a in schedules.computed(schedule.actions[rank]):
        if a.stage < 0:
            continue
        which = "first" if a.microbatch == 0 else "last" if a.microbatch == last else "middle"
        yield from ((part, False) for part in _same(parts[a.stage], a.kind, which if a.microbatch >= 0 else ""))
    yield from ((run.after, i == 0) for i, run in enumerate(runs.values()))
    yield from ((run.update, False) for run in runs.values())


def _same(parts: Mapping[tuple[str, str], Part], kind: str, which: str) -> Iterator[Part]:
    """An action, or the same of the most similar microbatch, of a backward that is divided or not. As
    shardc.plan.stage_vectors.part_of.
    """
    there = {k for k, _ in parts}
    if kind not in there and kind in "BI":
        for other in ("I", "W") if kind == "B" else ("B",):
            yield from _same(parts, other, which) if other in there else ()
        return
    for w in (which, "middle", "last", "first"):
        if (part := parts.get((kind, w))) is not None:
            yield part
            return


def _parts(run: DryRun) -> dict[tuple[str, str], Part]:
    """The parts of microbatches. One that stands for many leaves nothing, as in shardc.plan.stage_vectors.stage."""
    numbers = sorted({a.microbatch for a, _ in run.actions if a.microbatch >= 0})
    ends = {**({numbers[-1]: "last"} if numbers else {}), **({numbers[0]: "first"} if numbers else {}), -1: ""}
    found: dict[tuple[str, str], Part] = {}
    for a, part in run.actions:
        found.setdefault((a.kind, ends.get(a.microbatch, "middle")), part)
    for which, stays in (("first", SHARED), ("middle", ())) if len(numbers) > 1 else ():
        end = next((key for kind in "WB" if (key := (kind, which)) in found), None)
        if end is not None:
            left = Counter[Storage]()
            for sign, storage in (x for (_, w), part in found.items() if w == which for x in part.changes):
                left[storage] += sign
            freed = [(-1, s) for s, n in left.items() if n > 0 and s.kind not in stays]
            found[end] = replace(found[end], changes=[*found[end].changes, *freed])
    return found


def _communicators(run: DryRun) -> set[str]:
    parts = (run.before, *(part for _, part in run.actions), run.after, run.update)
    return {r.axis for part in parts for r in part.sent if r.bytes}
