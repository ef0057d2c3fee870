"""Compute the peak memory of a rank's step, and the bytes that torch's allocator reserves for it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from shardc.cost.caching_allocator import Block, CachingAllocator
from shardc.cost.recorded import HOST, KINDS, RESIDENT, DryRun, parts
from shardc.ir.units import size
from shardc.machine.work import Part, Storage
from shardc.runtime.schedule import Action

#: The most points of a curve.
POINTS = 400


@dataclass(frozen=True)
class Point:
    """A moment of a step. part: the action; op: the op that allocates; live: bytes by kind."""

    part: str
    op: str
    live: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.live.values())


@dataclass(frozen=True)
class Memory:
    """Live tensor bytes of one rank in a step. kinds: at the peak, by kind; peak: their sum.

    part, op: where the peak is. resident: between two steps, without gradients. curve: over the step, at most `POINTS`
    moments, the highest of each stretch. host: the most bytes in the machine's memory or in files (`offload`), which
    the others do not count.
    """

    kinds: Mapping[str, int]
    part: str
    op: str
    resident: Mapping[str, int]
    curve: tuple[Point, ...] = field(repr=False, default=())
    host: int = 0

    def __repr__(self) -> str:
        kinds = ", ".join(f"{kind} {size(n)}" for kind, n in sorted(self.kinds.items(), key=lambda x: -x[1]))
        return f"<Memory: peak {size(self.peak)} at {self.part}, {self.op}: {kinds}>"

    @property
    def peak(self) -> int:
        """Live bytes at the peak."""
        return sum(self.kinds.values())

    def __getitem__(self, kind: str) -> int:
        """Return the bytes of a kind at the peak."""
        if kind not in KINDS:
            raise KeyError(kind)
        return self.kinds.get(kind, 0)


def memory(r: DryRun, actions: tuple[Action, ...]) -> Memory:
    live: Counter[str] = Counter()
    for storage in r.resident:
        live[storage.kind] += storage.nbytes
    resident = {k: n for k, n in live.items() if k in RESIDENT}
    outside = outside_most = live.pop(HOST, 0)
    total, best = sum(live.values()), -1
    peak = Point("", "", {})
    left = Counter[str]()  # what repeated microbatches leave until all have run
    for times, some in ((1, parts(r, actions)), (-1, r.ran)):
        for _, part in some:
            for sign, storage in part.changes:
                left[storage.kind] += times * sign * storage.nbytes
    steps = sum(len(p.changes) for _, p in parts(r, actions))
    stretch = max(steps // POINTS, 1)
    curve: list[Point] = []
    changes, high = 0, Point("", "", {})
    for action, part in parts(r, actions):
        name = str(action) if action is not None else part.name
        if part is r.after:  # storages that the repeated microbatches left until here
            outside -= left.pop(HOST, 0)
            for kind, n in left.items():
                live[kind] -= n
                total -= n
        for sign, storage in part.changes:
            if storage.kind == HOST:
                outside += sign * storage.nbytes
                outside_most = max(outside, outside_most)
                continue
            live[storage.kind] += sign * storage.nbytes
            total += sign * storage.nbytes
            if total > best:
                best, peak = total, Point(name, storage.op, dict(live))
            if sign > 0 and total > sum(high.live.values()):
                high = Point(name, storage.op, dict(live))
            changes += 1
            if changes % stretch == 0:
                curve.append(high if high.live else Point(name, storage.op, dict(live)))
                high = Point("", "", {})
    kinds = {k: peak.live[k] for k in KINDS if peak.live.get(k)}
    return Memory(kinds, peak.part, peak.op, resident, tuple(curve), outside_most)


def reserved(r: DryRun, actions: tuple[Action, ...], limit: float) -> int:
    """Return the most bytes that torch's allocator reserves on a GPU, in the second of two steps.

    Later steps repeat it. limit: bytes of the GPU; a result above it does not fit.
    """
    return reserve(r.resident, [(part, part is r.after) for _, part in parts(r, actions)], limit)


def reserve(resident: Iterable[Storage], step: Sequence[tuple[Part, bool]], limit: float) -> int:
    """Return the most bytes that torch's allocator reserves on a GPU for the parts of a step.

    The flag of a part: before it, storages that repeated actions allocated are freed. limit: as of `reserved`.
    """
    allocator = CachingAllocator(limit)
    blocks: dict[int, Block] = {}
    for sign, storage, number, _ in allocations(resident, step, 2):
        if sign > 0:
            blocks[number] = allocator.allocate(storage.nbytes)
        else:
            allocator.free(blocks.pop(number))
    return allocator.peak


def allocations(
    resident: Iterable[Storage], step: Sequence[tuple[Part, bool]], times: int = 1
) -> Iterator[tuple[int, Storage, int, str]]:
    """Yield (+1 allocated or -1 freed, storage, allocation number, part) of `times` steps, in order.

    Resident storages are allocated before the first step; those on the host are left out. step: as of `reserve`.
    """
    live: defaultdict[Storage, list[int]] = defaultdict(list)
    stays = dict.fromkeys((s for s in resident if s.kind != HOST), 1)
    numbers = count()

    def leave(storages: Mapping[Storage, int], at_least: int, part: str) -> Iterator[tuple[int, Storage, int, str]]:
        for storage, allocated in live.items():
            while len(allocated) > max(storages.get(storage, 0), at_least):
                yield -1, storage, allocated.pop(), part

    for _ in range(times):
        for storage in stays:
            if not live[storage]:
                live[storage].append(next(numbers))
                yield 1, storage, live[storage][-1], ""
        for part, lets_go in step:
            if lets_go:
                yield from leave({}, 1, part.name)
            for sign, storage in part.changes:
                if storage.kind == HOST:
                    continue
                if sign > 0:
                    live[storage].append(next(numbers))
                    yield 1, storage, live[storage][-1], part.name
                elif live[storage]:
                    yield -1, storage, live[storage].pop(0), part.name
        yield from leave(stays, 0, "")
