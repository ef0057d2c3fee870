"""Find which rank sends which box of a tensor to which, between two places. Pure arithmetic.

Every rank finds its own sends and receives, and both ends of a message list the same boxes in the same order. Two ranks
have the same boxes of a tensor (they are replicas), or share no element. So a rank gets a missing element from one
replica: the nearest, and of equally near ones in turn.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from shardc.features.reshard.places import Place
from shardc.runtime.state.boxes import Box, Numbers, overlap, without

H = TypeVar("H", bound=Hashable)
#: Offsets and shapes of boxes.
Form = tuple[tuple[Numbers, Numbers], ...]


@dataclass(frozen=True)
class Message:
    """The boxes that a rank sends to another, or copies itself. Each is in one box of either end."""

    source: int
    target: int
    boxes: Form

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.boxes)


@dataclass
class Routes:
    """What one rank sends and receives of a tensor, by rank; what it sends to itself is copied.

    lacking: needed elements on no rank.
    """

    sent: dict[int, list[Box]] = field(default_factory=dict)
    received: dict[int, list[Box]] = field(default_factory=dict)
    lacking: int = 0


def routes(have: Place, need: Place, world: int, rank: int, *, turn: int = 0) -> Routes:
    """Return one rank's routes. Arguments as of `messages`."""
    held, needed = have.boxes(rank), need.boxes(rank)
    result = Routes(lacking=sum(b.numel for b in needed))
    for m in messages(have, need, world, turn=turn, rank=rank):
        if m.source == rank:
            result.sent.setdefault(m.target, []).extend(_parts(held, m.boxes))
        if m.target == rank:
            result.received.setdefault(m.source, []).extend(_parts(needed, m.boxes))
            result.lacking -= m.elements
    return result


def _parts(boxes: Sequence[Box], of: Form) -> Iterator[Box]:
    """Yield the parts of these boxes that a message is of."""
    for offset, shape in of:
        yield next(part for b in boxes if (part := b.inside(offset, shape)) is not None)


def messages(have: Place, need: Place, world: int, *, turn: int = 0, rank: int | None = None) -> Iterator[Message]:
    """Yield the messages of all ranks to all, or those from and to one rank.

    turn: another number for each tensor, by which replicas take turns.
    """
    has, needs = ([tuple((b.offset, b.shape) for b in p.boxes(r)) for r in range(world)] for p in (have, need))
    holders = _groups(has)
    for number, ((needed, present), targets) in enumerate(_groups(zip(needs, has, strict=True)).items()):
        if rank is not None and rank not in targets and not has[rank]:
            continue
        common, lacking = divided(needed, present)
        yield from (Message(t, t, common) for t in targets if common and rank in (None, t))
        for boxes, sources in holders.items() if lacking else ():
            if rank is not None and rank not in targets and rank not in sources:
                continue
            common, _ = divided(lacking, boxes)
            for n, target in enumerate(targets if common else ()):
                if rank in (None, target, *sources):
                    source = nearest_source(target, sources, n + number + turn)
                    if rank in (None, source, target):
                        yield Message(source, target, common)


def nearest_source(target: int, sources: Sequence[int], turn: int) -> int:
    """Return a source in the smallest aligned block of 2^n ranks with the target; several take turns."""
    shared = min((target ^ s).bit_length() for s in sources)
    near = [s for s in sources if (target ^ s).bit_length() == shared]
    return near[turn % len(near)]


def _groups(forms: Iterable[H]) -> dict[H, list[int]]:
    """Group ranks by their forms."""
    groups: dict[H, list[int]] = {}
    for r, form in enumerate(forms):
        groups.setdefault(form, []).append(r)
    return groups


def divided(needed: Form, boxes: Iterable[tuple[Numbers, Numbers]]) -> tuple[Form, Form]:
    """Divide what is needed into what is in these boxes, and the rest."""
    common: list[tuple[Numbers, Numbers]] = []
    rest = list(needed)
    for box in boxes:
        left = []
        for each in rest:
            if (part := overlap(*each, *box)) is None:
                left.append(each)
            else:
                common.append(part)
                left += without(*each, *part)
        rest = left
    return tuple(common), tuple(rest)
