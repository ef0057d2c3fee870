"""Blocks of memory that become larger with more layers, as a bucket of all gradients: found by two dry runs, of n units
of layers and of n + 1.

    two units      298 kB of gradients    block of 2 MiB
    three units    430 kB                 block of 2 MiB
    eight units    1.1 MB                 block of 20 MiB: an allocator takes so much at once for what is above 1 MiB

Of both runs the storages of one kind are compared that one part of a step makes. The longer run has some once more, of
sizes that the shorter one has too: a layer's own. Of the others, each is what it was, in order of size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from shardc.cost.recorded import HOST, DryRun
from shardc.machine.work import Part, Storage


def become(shorter: DryRun, longer: DryRun) -> dict[Storage, Storage]:
    """What storages of a run are in another one that holds more: as large, or larger."""
    found: dict[Storage, Storage] = {}
    there = _made(longer)
    for name, mine in _made(shorter).items():
        for s, x in _pairs(mine, there.get(name, [])):
            if x.nbytes >= s.nbytes:
                found.setdefault(s, x)
    return found


def _pairs(mine: Sequence[Storage], theirs: Sequence[Storage]) -> Iterator[tuple[Storage, Storage]]:
    sizes = Counter(s.nbytes for s in mine)
    seen = Counter[int]()
    others = []
    for x in theirs:
        seen[x.nbytes] += 1
        if seen[x.nbytes] <= sizes[x.nbytes] or x.nbytes not in sizes:
            others.append(x)
    if len(others) != len(mine):  # something else is there, too: what has its size is the same
        both = sizes & seen
        yield from zip(*(_by_size(each, lambda s: s.nbytes in both) for each in (mine, others)), strict=False)
        mine, others = ([s for s in each if s.nbytes not in both] for each in (mine, others))
    yield from zip(_by_size(mine), _by_size(others), strict=False)


def _by_size(some: Sequence[Storage], among: Callable[[Storage], bool] = lambda s: True) -> list[Storage]:
    return sorted(filter(among, some), key=lambda s: s.nbytes)


def growing(one: DryRun, two: DryRun) -> dict[Storage, tuple[int, Storage]]:
    """Storages of a run that grow: how many bytes one more unit of layers adds to each, and what it is then. With at
    most twice as many layers nothing is more than twice as large.
    """
    some = become(one, two).items()
    return {s: (x.nbytes - s.nbytes, x) for s, x in some if s.nbytes < x.nbytes <= 2 * s.nbytes}


def with_sizes(run: DryRun, sizes: Mapping[Storage, float]) -> DryRun:
    """A copy of a run, whose storages have other sizes."""
    copies: dict[Storage, Storage] = {}

    def copied(s: Storage) -> Storage:
        return copies.setdefault(s, Storage(round(sizes.get(s, s.nbytes)), s.kind))

    def part(p: Part) -> Part:
        return replace(p, changes=[(sign, copied(s)) for sign, s in p.changes])

    return _replaced(run, tuple(map(copied, run.resident)), part)


def without(run: DryRun, some: Collection[Storage]) -> DryRun:
    """A run that does not have some storages."""
    resident = tuple(s for s in run.resident if s not in some)
    return _replaced(run, resident, lambda p: replace(p, changes=[x for x in p.changes if x[1] not in some]))


def _replaced(run: DryRun, resident: tuple[Storage, ...], part: Callable[[Part], Part]) -> DryRun:
    return replace(
        run,
        resident=resident,
        before=part(run.before),
        actions=tuple((a, part(p)) for a, p in run.actions),
        after=part(run.after),
        update=part(run.update),
    )


def _made(run: DryRun) -> dict[object, list[Storage]]:
    """What is there before a step, and what its parts make, by part and kind."""
    found: dict[object, list[Storage]] = {}
    actions = (((a.kind, a.microbatch), p) for a, p in run.actions)
    parts = ("before", run.before), *actions, ("after", run.after), ("update", run.update)
    made = ((name, s) for name, part in parts for sign, s in part.changes if sign > 0)
    for name, s in (*(("", s) for s in run.resident), *made):
        if s.kind != HOST:
            found.setdefault((name, s.kind), []).append(s)
    return found
