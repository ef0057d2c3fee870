"""The highest moment of a part of a step with many layers, which in few layers may be another one.

    live bytes after each op    of 2 layers    4  [7] 3  4
                                of 3 layers    4  [7] 3  6      the fourth moment has 2 more with each layer
                                of 12          4   7  3 [24]    so it is the highest of many

A moment of one run is found again in the run with a unit of layers more: what both allocate and free, in order, is
aligned as the lines of two versions of a text are, with what the longer one has once more in between: a copy of what
lies beside it. Where it is found in pieces, the moments between them are in the middle of the added layer, and have a
part of one more; so moments between what is no copy are left out.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator
from difflib import SequenceMatcher

import numpy as np

from shardc.cost.recorded import KINDS, DryRun
from shardc.machine.work import Part, Storage
from shardc.plan.growing_blocks import become, growing
from shardc.plan.stage_vectors import BYTES, HIGH, Key, Stage, Vector, kind_of, parts_of

#: Bytes by kind at moments of a part, and how many more each unit of layers adds to them: both [moments, kinds].
Moments = tuple[Vector, Vector]


def moments(base: DryRun, one: DryRun, two: DryRun) -> dict[Key, Moments]:
    """Of each part of `base`, the moments that are found again in `one` and in `two`, which has a unit of layers more.
    `base` may be `one`, or has the same layers with others before or after them.
    """
    grow, same = growing(one, two), become(one, base)
    grown_there, grown_here = {x for _, x in grow.values()}, {same[s] for s in grow if s in same}
    ones, twos = parts_of(one), parts_of(two)
    made: dict[Key, Moments] = {}
    for key, part in parts_of(base).items():
        if key not in ones or key not in twos:
            continue
        here, less, more = _names(part, grown_here), _names(ones[key], grow), _names(twos[key], grown_there)
        of_less = {j: i for i, j in _aligned(here, less)}
        found = [(of_less[i], i, j) for i, j in between_copies(less, more) if i in of_less]
        if found:
            x, y, z = map(list, zip(*found, strict=True))
            made[key] = _live(part)[x], _live(twos[key])[z] - _live(ones[key])[y]
    return made


def raised(stage: Stage, found: dict[Key, Moments], units: float) -> Stage:
    """A stage with so many units of layers more than the run whose moments were found: where one of these is above the
    highest moment so far, it is the highest.
    """
    made = dict(stage)
    for key, (live, more) in found.items():
        if key in stage:
            then = live + units * more
            highest = then[then.sum(1).argmax()]
            if highest.sum() > stage[key][HIGH].sum():
                made[key] = stage[key].copy()
                made[key][HIGH] = highest
    return made


def _names(part: Part, grow: Collection[Storage]) -> list[object]:
    """What is allocated or freed at each moment, by kind and size; of what is larger with more layers by kind alone."""
    return [(sign, s.kind, s.still, None if s in grow else s.nbytes) for sign, s in part.changes]


def _aligned(a: list[object], b: list[object]) -> Iterator[tuple[int, int]]:
    """Indices of equal entries, both in order."""
    for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        yield from zip(range(block.a, block.a + block.size), range(block.b, block.b + block.size), strict=True)


#: A copy of what lies beside it has so much in common with it: the last layer may free something in another order.
_ALIKE = 0.9


def between_copies(less: list[object], more: list[object]) -> Iterator[tuple[int, int]]:
    """Indices of equal entries, in order, if all that `more` has besides, before them or behind, are copies of what
    lies beside them.
    """
    steps = SequenceMatcher(None, less, more, autojunk=False).get_opcodes()
    others = [k for k, (what, *_, a, b) in enumerate(steps) if what != "equal" and not _copied(what, more, a, b)]
    for k, (what, i, end, j, _) in enumerate(steps):
        if what == "equal" and not (others and others[0] < k < others[-1]):
            yield from zip(range(i, end), itertools.count(j), strict=False)


def _copied(what: str, names: list[object], a: int, b: int) -> bool:
    """Whether names[a:b], which were inserted, are a copy of as many before them or behind."""
    n = b - a
    beside = names[max(a - n, 0) : a], names[b : b + n]
    alike = (sum(map(operator.eq, names[a:b], x)) for x in beside if len(x) == n)
    return what == "insert" and max(alike, default=0) >= _ALIKE * n


def _live(part: Part) -> Vector:
    """Bytes by kind after each of its changes: [changes, kinds]."""
    changed = np.zeros((len(part.changes), len(BYTES)))
    for i, (sign, s) in enumerate(part.changes):
        if s.kind in KINDS:
            changed[i, kind_of(s)] = sign * s.nbytes
    return changed.cumsum(0)
