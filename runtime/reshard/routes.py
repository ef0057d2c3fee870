"""Who sends which box of a tensor to whom, where it lies in one way and is to lie in another. Pure arithmetic: every
rank finds its own sends and receives, and both ends of a message list the same boxes in the same order.

Two ranks have the same boxes of a tensor (they are replicas), or share no element. So whoever lacks an element gets it
from one replica: the nearest, and of equally near ones in turn."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from shardc.runtime.reshard.places import Place
from shardc.runtime.state.boxes import Box, Numbers, cuts, overlap, without

H = TypeVar("H", bound=Hashable)
#: Offsets and shapes of a rank's boxes.
Form = tuple[tuple[Numbers, Numbers], ...]


@dataclass(frozen=True)
class Piece:
    """A box of the global tensor, and the box of a rank's local tensor that it lies in."""

    offset: Numbers
    shape: Numbers
    box: Box

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, local: Tensor) -> Tensor:
        """A view of what a local tensor has there."""
        inside = (slice(a - b, a - b + n) for a, b, n in zip(self.offset, self.box.offset, self.shape, strict=True))
        return self.box.of(local)[tuple(inside)]

    def cut(self, itemsize: int, limit: int) -> Iterator[Piece]:
        """Pieces of at most so many bytes, or of one element, that it consists of."""
        for start, shape in cuts(self.shape, itemsize, limit):
            yield Piece(tuple(a + b for a, b in zip(self.offset, start, strict=True)), shape, self.box)


@dataclass(frozen=True)
class Message:
    """What a rank has for another one, or for itself: (number of the needed box, number of the one that has it, offset,
    shape) of each common box. beside: the source has it in the second place in which it has the tensor.
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
    """What a rank has itself. beside: as of Message."""

    read: Piece
    written: Piece
    beside: bool


@dataclass
class Routes:
    """What one rank copies, sends and receives of a tensor.

    sent, received: by rank. lacking: how many elements it needs that nobody has.
    """

    copied: list[Copy] = field(default_factory=list)
    sent: dict[int, list[Piece]] = field(default_factory=dict)
    received: dict[int, list[Piece]] = field(default_factory=dict)
    lacking: int = 0


def routes(have: Place, need: Place, world: int, rank: int, *, beside: Place | None = None, turn: int = 0) -> Routes:
    """Of one rank of so many. Arguments as of `messages`."""
    needed = need.boxes(rank)
    found = Routes(lacking=sum(math.prod(b.shape) for b in needed))
    for m in messages(have, need, world, beside=beside, turn=turn, rank=rank):
        if m.source == rank:
            place = beside if m.beside and beside is not None else have
            held = place.boxes(rank)
            read = [Piece(offset, shape, held[j]) for _, j, offset, shape in m.common]
        if m.target == rank:
            found.lacking -= m.elements
            written = [Piece(offset, shape, needed[i]) for i, _, offset, shape in m.common]
        if m.source == m.target:
            found.copied += (Copy(r, w, m.beside) for r, w in zip(read, written, strict=True))
        elif m.source == rank:
            found.sent.setdefault(m.target, []).extend(read)
        else:
            found.received.setdefault(m.source, []).extend(written)
    return found


def messages(
    have: Place, need: Place, world: int, *, beside: Place | None = None, turn: int = 0, rank: int | None = None
) -> Iterator[Message]:
    """From all ranks to all, or those from and to one of them.

    beside: where each rank has the tensor too, for itself alone. turn: another number for each tensor, by which
    replicas take turns.
    """
    has, needs, own = ([_form(p, r) for r in range(world)] for p in (have, need, beside))
    holders = _groups(has)
    for number, ((wanted, *held), targets) in enumerate(_groups(zip(needs, has, own, strict=True)).items()):
        if rank is not None and rank not in targets and not has[rank]:
            continue
        lacking = [(i, *box) for i, box in enumerate(wanted)]
        for second, boxes in enumerate(held):
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
    """Of the ranks that could send, one in the smallest block that the target is in, too. Blocks are of powers of two,
    as axes of meshes and devices of machines mostly are; of several sources there, the one whose turn it is."""
    shared = min((target ^ s).bit_length() for s in sources)
    near = [s for s in sources if (target ^ s).bit_length() == shared]
    return near[turn % len(near)]


def _form(place: Place | None, rank: int) -> Form:
    return tuple((b.offset, b.shape) for b in place.boxes(rank)) if place is not None else ()


def _groups(forms: Iterable[H]) -> dict[H, list[int]]:
    """Ranks by what they have."""
    found: dict[H, list[int]] = {}
    for r, form in enumerate(forms):
        found.setdefault(form, []).append(r)
    return found


_Lacking = list[tuple[int, Numbers, Numbers]]  # (number of the needed box, offset, shape)


def _taken(lacking: _Lacking, boxes: Form) -> tuple[list[tuple[int, int, Numbers, Numbers]], _Lacking]:
    """What boxes have of what is lacking, as (number of the needed box, number of this one, offset, shape), and what is
    lacking then."""
    found: list[tuple[int, int, Numbers, Numbers]] = []
    for j, box in enumerate(boxes):
        left: _Lacking = []
        for i, offset, shape in lacking:
            common = overlap(offset, shape, *box)
            if common is None:
                left.append((i, offset, shape))
            else:
                found.append((i, j, *common))
                left += ((i, *rest) for rest in without(offset, shape, *common))
        lacking = left
    return found, lacking
