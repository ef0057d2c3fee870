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

from torch import Tensor

from shardc.runtime.reshard.places import Place
from shardc.runtime.state.boxes import Box, cuts, without
from shardc.runtime.state.checkpoint_index import Numbers, overlap

H = TypeVar("H", bound=Hashable)
#: Offsets and shapes of a rank's boxes.
Form = tuple[tuple[Numbers, Numbers], ...]


@dataclass(frozen=True)
class Piece:
    """A box of the global tensor, and the box of a rank's local tensor that contains it."""

    offset: Numbers
    shape: Numbers
    box: Box

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, local: Tensor) -> Tensor:
        """Return its view of a local tensor."""
        inside = (slice(a - b, a - b + n) for a, b, n in zip(self.offset, self.box.offset, self.shape, strict=True))
        return self.box.of(local)[tuple(inside)]

    def cut(self, itemsize: int, limit: int) -> Iterator[Piece]:
        """Yield its parts of at most `limit` bytes, or of one element."""
        for start, shape in cuts(self.shape, itemsize, limit):
            yield Piece(tuple(a + b for a, b in zip(self.offset, start, strict=True)), shape, self.box)


@dataclass(frozen=True)
class Message:
    """The boxes that a rank sends to another, or copies itself. beside: from its second place.

    common: (number of the needed box, number of the source's box, offset, shape) of each common box.
    """

    source: int
    target: int
    common: list[tuple[int, int, Numbers, Numbers]]
    beside: bool = False

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for *_, shape in self.common)


@dataclass(frozen=True)
class Copy:
    """A copy within a rank. beside: as of Message."""

    read: Piece
    written: Piece
    beside: bool


@dataclass
class Routes:
    """The copies, sends and receives of one rank for a tensor. lacking: needed elements on no rank."""

    copied: list[Copy] = field(default_factory=list)
    sent: dict[int, list[Piece]] = field(default_factory=dict)
    received: dict[int, list[Piece]] = field(default_factory=dict)
    lacking: int = 0


def routes(have: Place, need: Place, world: int, rank: int, *, beside: Place | None = None, turn: int = 0) -> Routes:
    """Return one rank's routes. Arguments as of `messages`."""
    needed = need.boxes(rank)
    result = Routes(lacking=sum(math.prod(b.shape) for b in needed))
    for m in messages(have, need, world, beside=beside, turn=turn, rank=rank):
        if m.source == rank:
            place = beside if m.beside and beside is not None else have
            boxes = place.boxes(rank)
            read = [Piece(offset, shape, boxes[j]) for _, j, offset, shape in m.common]
        if m.target == rank:
            result.lacking -= m.elements
            written = [Piece(offset, shape, needed[i]) for i, _, offset, shape in m.common]
        if m.source == m.target:
            result.copied += (Copy(r, w, m.beside) for r, w in zip(read, written, strict=True))
        elif m.source == rank:
            result.sent.setdefault(m.target, []).extend(read)
        else:
            result.received.setdefault(m.source, []).extend(written)
    return result


def messages(
    have: Place, need: Place, world: int, *, beside: Place | None = None, turn: int = 0, rank: int | None = None
) -> Iterator[Message]:
    """Yield the messages of all ranks to all, or those from and to one rank.

    beside: a second place in which each rank has the tensor, only for its own use. turn: another number for each
    tensor, by which replicas take turns.
    """
    has, needs, extra = ([_form(p, r) for r in range(world)] for p in (have, need, beside))
    holders = _groups(has)
    for number, ((needed, *present), targets) in enumerate(_groups(zip(needs, has, extra, strict=True)).items()):
        if rank is not None and rank not in targets and not has[rank]:
            continue
        lacking = [(i, *box) for i, box in enumerate(needed)]
        for second, boxes in enumerate(present):
            common, lacking = _taken(lacking, boxes)
            yield from (Message(t, t, common, bool(second)) for t in targets if common and rank in (None, t))
        for boxes, sources in holders.items() if lacking else ():
            if rank is not None and rank not in targets and rank not in sources:
                continue
            common, _ = _taken(lacking, boxes)
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


def _form(place: Place | None, rank: int) -> Form:
    return tuple((b.offset, b.shape) for b in place.boxes(rank)) if place is not None else ()


def _groups(forms: Iterable[H]) -> dict[H, list[int]]:
    """Group ranks by their forms."""
    groups: dict[H, list[int]] = {}
    for r, form in enumerate(forms):
        groups.setdefault(form, []).append(r)
    return groups


_Lacking = list[tuple[int, Numbers, Numbers]]  # (number of the needed box, offset, shape)


def _taken(lacking: _Lacking, boxes: Form) -> tuple[list[tuple[int, int, Numbers, Numbers]], _Lacking]:
    """Return the part of `lacking` in boxes, (needed box, this box, offset, shape), and the rest."""
    taken: list[tuple[int, int, Numbers, Numbers]] = []
    for j, box in enumerate(boxes):
        left: _Lacking = []
        for i, offset, shape in lacking:
            common = overlap(offset, shape, *box)
            if common is None:
                left.append((i, offset, shape))
            else:
                taken.append((i, j, *common))
                left += ((i, *rest) for rest in without(offset, shape, *common))
        lacking = left
    return taken, lacking
