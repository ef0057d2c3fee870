"""Who sends which box of a tensor to whom, where it lies in one way and is to lie in another. Pure arithmetic: every
rank finds its own sends and receives, and both ends of a message list the same boxes in the same order.

Two ranks have the same boxes of a tensor (they are replicas), or share no element. So whoever lacks an element gets it
from one replica: the nearest, and of equally near ones in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
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
class Copy:
    """What a rank has itself. beside: read from the second place in which it has the tensor."""

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
    """Of one rank of so many. beside: where each rank has the tensor too, for itself alone. turn: another number for
    each tensor, by which replicas take turns."""

    def form(place: Place | None, r: int) -> Form:
        return tuple((b.offset, b.shape) for b in place.boxes(r)) if place is not None else ()

    holders = _groups(world, lambda r: form(have, r))
    needers = _groups(world, lambda r: (form(need, r), form(have, r), form(beside, r)))
    found = Routes()
    for number, ((wanted, held, own), targets) in enumerate(needers.items()):
        lacking, here = [(i, *box) for i, box in enumerate(wanted)], rank in targets
        for place, boxes, second in ((have, held, False), (beside, own, True)):
            copied, lacking = _taken(lacking, boxes)
            for i, j, start, shape in copied if here else ():
                assert place is not None
                read, written = (Piece(start, shape, p.boxes(rank)[k]) for p, k in ((place, j), (need, i)))
                found.copied.append(Copy(read, written, second))
        found.lacking += sum(math.prod(shape) for _, _, shape in lacking) if here else 0
        for boxes, sources in holders.items():
            if not (here or rank in sources):
                continue
            common, _ = _taken(lacking, boxes)
            for n, target in enumerate(targets if common else ()):
                if rank != target and rank not in sources:
                    continue
                source = nearest(target, sources, n + number + turn)
                if rank == source:
                    mine = have.boxes(rank)
                    found.sent.setdefault(target, []).extend(Piece(o, s, mine[j]) for _, j, o, s in common)
                if rank == target:
                    mine = need.boxes(rank)
                    pieces = [Piece(o, s, mine[i]) for i, _, o, s in common]
                    found.received.setdefault(source, []).extend(pieces)
                    found.lacking -= sum(p.numel for p in pieces)
    return found


def nearest(target: int, sources: Sequence[int], turn: int) -> int:
    """Of the ranks that could send, one in the smallest block that the target is in, too. Blocks are of powers of two,
    as axes of meshes and devices of machines mostly are; of several sources there, the one whose turn it is."""
    shared = min((target ^ s).bit_length() for s in sources)
    near = [s for s in sources if (target ^ s).bit_length() == shared]
    return near[turn % len(near)]


def _groups(world: int, form: Callable[[int], H]) -> dict[H, list[int]]:
    """Ranks by what they have."""
    found: dict[H, list[int]] = {}
    for r in range(world):
        found.setdefault(form(r), []).append(r)
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
