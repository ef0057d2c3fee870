"""Send the messages of a move: rounds of bounded size, each one all_to_all over all processes of a transport.

    rank 0 to 1   aaaaabbbcc      in 2 rounds   aaaaa | bbbcc      The data of one rank for another is cut into as many
    rank 0 to 2   dddd                             dd | dd         parts as there are rounds

There are enough rounds that in each a rank sends, and receives, at most about a bucket (never more than two). So a move
needs that much memory besides the tensors that it reads and fills. All ranks take the same rounds in the same order, so
there is no deadlock. With `only_changes` a sender keeps a digest of each stretch that it sent, and sends those whose
digest differs, behind a byte for each stretch that says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
import xxhash
from torch import Tensor

from shardc.errors import ShardcError
from shardc.features.reshard.places import Key, Wanted
from shardc.features.reshard.routes import Routes, routes
from shardc.features.reshard.transports import Transport
from shardc.runtime.state.boxes import Box
from shardc.runtime.state.tensor_file import bytes_of

#: Approximate bytes that a rank sends and receives at once.
BUCKET = 32 << 20
#: Bytes of a stretch of which changes are known.
STRETCH = 64 << 10


@dataclass(frozen=True)
class _Stretch:
    """A part of a tensor, on its way from one rank to another."""

    wanted: Wanted
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.wanted.wire.itemsize


_Way = list[list[_Stretch]]  # by rank
_Round = tuple[_Way, _Way]  # (sent, received)


class Moves:
    """The moves of tensors of one rank; made once, and run any number of times. Making it is collective.

    wanted: the same on all ranks, in one order. bucket: bytes. only_changes: what is as in the last
    call is not sent again. .sent, .received: bytes of this rank, by rank; .moved: bytes that it sent in the last call.
    """

    def __init__(
        self, over: Transport, wanted: Sequence[Wanted], bucket: int = BUCKET, *, only_changes: bool = False
    ) -> None:
        self._over, world, rank = over, over.world, over.rank
        self._digests: dict[int, list[int]] | None = {} if only_changes else None  # by round
        self.moved = 0
        self._copied: list[tuple[Wanted, Box, Box]] = []
        # group elements by size, so that each dtype is aligned
        sizes = sorted({w.wire.itemsize for w in wanted}, reverse=True)
        ways: dict[int, _Round] = {size: ([[] for _ in range(world)], [[] for _ in range(world)]) for size in sizes}
        known: dict[Any, Routes] = {}  # moments have the places of their parameters
        for turn, w in enumerate(wanted):
            if w.places not in known:
                known[w.places] = routes(*w.places, world, rank, turn=turn)
            paths, size = known[w.places], w.wire.itemsize
            if paths.lacking:
                fault = f"{paths.lacking} of its elements, which rank {rank} needs, are on no rank"
                raise ShardcError(fault, where=w.name, fix="report this: it is a bug in shardc")
            own = zip(paths.sent.get(rank, ()), paths.received.get(rank, ()), strict=True)
            self._copied += ((w, read, written) for read, written in own)
            for by_rank, boxes in zip(ways[size], (paths.sent, paths.received), strict=True):
                for other, each in boxes.items():
                    if other != rank:
                        limit = min(max(bucket // world, 1), STRETCH if only_changes else bucket)
                        by_rank[other] += (_Stretch(w, part) for b in each for part in b.cut(size, limit))
        self.sent, self.received = (
            [sum(_nbytes([way[i][r]]) for way in ways.values()) for r in range(world)] for i in range(2)
        )
        most = [max(_nbytes(sent), _nbytes(received)) for sent, received in ways.values()]
        every = over.totals([n if r == rank else 0 for n in most for r in range(world)])
        self._rounds: list[_Round] = []
        for i, (sent, received) in enumerate(ways.values()):
            number = math.ceil(max(every[i * world : (i + 1) * world]) / bucket)
            self._rounds += zip(_parts(sent, number), _parts(received, number), strict=True)

    @property
    def rounds(self) -> int:
        return len(self._rounds)

    @torch.no_grad()
    def __call__(self, have: Mapping[Key, Tensor], need: Mapping[Key, Tensor]) -> None:
        """Move, between these local tensors. Collective."""
        for w, read, written in self._copied:
            written.of(need[w.need.key]).copy_(read.of(have[w.have.key]))
        self.moved = 0
        for number, (sent, received) in enumerate(self._rounds):
            x = torch.empty(_nbytes(sent), dtype=torch.uint8, device=self._over.device)
            for s, place in _places(sent, x):
                place.copy_(s.box.of(have[s.wanted.have.key]))
            if self._digests is not None:
                x, sent, received = self._changes(number, x, sent, received)
            into = self._exchanged(x, *([_nbytes([each]) for each in way] for way in (sent, received)))
            self.moved += len(x)
            for s, place in _places(received, into):
                s.box.of(need[s.wanted.need.key]).copy_(place)

    def _exchanged(self, x: Tensor, to_each: list[int], from_each: list[int]) -> Tensor:
        into = torch.empty(sum(from_each), dtype=torch.uint8, device=self._over.device)
        self._over.exchange(x, into, (to_each, from_each))
        return into

    def _changes(self, number: int, x: Tensor, sent: _Way, received: _Way) -> tuple[Tensor, _Way, _Way]:
        """Return the bytes and stretches of a round that differ from the last call, on both ends. Collective."""
        assert self._digests is not None
        pieces = [piece for _, piece in _pieces(sent, x)]
        digests = [xxhash.xxh3_64_intdigest(bytes_of(piece.cpu())) for piece in pieces]
        before = self._digests.get(number, [None] * len(digests))
        flags = [now != then for now, then in zip(digests, before, strict=True)]
        self._digests[number] = digests
        mine = torch.tensor(flags, dtype=torch.uint8, device=x.device)
        theirs = self._exchanged(mine, *([len(each) for each in way] for way in (sent, received)))
        changed = torch.cat([x[:0], *compress(pieces, flags)])
        return changed, _compressed(sent, flags), _compressed(received, theirs.tolist())


def _compressed(by_rank: _Way, flags: Sequence[int]) -> _Way:
    """Return the stretches with a flag that is set; flags: in order."""
    left = iter(flags)
    return [list(compress(each, [next(left) for _ in each])) for each in by_rank]


def _nbytes(by_rank: Sequence[Sequence[_Stretch]]) -> int:
    return sum(s.nbytes for each in by_rank for s in each)


def _parts(by_rank: Sequence[Sequence[_Stretch]], number: int) -> list[list[list[_Stretch]]]:
    """Cut what is sent or received by round and rank. Both ends of a pair cut it equally."""
    rounds: list[list[list[_Stretch]]] = [[[] for _ in by_rank] for _ in range(number)]
    for rank, stretches in enumerate(by_rank):
        total, start = sum(s.nbytes for s in stretches), 0
        for s in stretches:
            rounds[start * number // total][rank].append(s)
            start += s.nbytes
    return rounds


def _places(by_rank: Sequence[Sequence[_Stretch]], flat: Tensor) -> Iterator[tuple[_Stretch, Tensor]]:
    """Yield each with its place in a message of bytes, as a tensor of its dtype and shape."""
    return ((s, part.view(s.wanted.wire).view(s.box.shape)) for s, part in _pieces(by_rank, flat))


def _pieces(by_rank: Sequence[Sequence[_Stretch]], flat: Tensor) -> Iterator[tuple[_Stretch, Tensor]]:
    """Yield each with its bytes in a message."""
    start = 0
    for s in (s for each in by_rank for s in each):
        yield s, flat[start : start + s.nbytes]
        start += s.nbytes
