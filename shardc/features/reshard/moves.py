"""Send the messages of a move: rounds of bounded size, each one all_to_all over all ranks.

    rank 0 to 1   aaaaabbbcc      in 2 rounds   aaaaa | bbbcc      The data of one rank for another is cut into as many
    rank 0 to 2   dddd                             dd | dd         parts as there are rounds

There are enough rounds that in each a rank sends, and receives, at most about a bucket (never more than two). So a move
needs that much memory besides the tensors that it reads and fills. All ranks take the same rounds in the same order, so
there is no deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.features.reshard.places import Key, Wanted
from shardc.features.reshard.routes import Routes, routes
from shardc.runtime.state.boxes import Box

#: Approximate bytes that a rank sends and receives at once.
BUCKET = 32 << 20


@dataclass(frozen=True)
class _Stretch:
    """A part of a tensor, on its way from one rank to another."""

    wanted: Wanted
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.wanted.wire.itemsize


_Round = tuple[list[list[_Stretch]], list[list[_Stretch]]]  # (sent, received), by rank


class Moves:
    """The moves of tensors of one rank; made once, and run any number of times. Making it is collective.

    wanted: the same on all ranks, in one order. bucket: bytes. .sent, .received: bytes of this rank, by rank.
    """

    def __init__(self, mesh: Any, wanted: Sequence[Wanted], bucket: int = BUCKET) -> None:
        self._mesh, world, rank = mesh, mesh.layout.world, mesh.rank
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
                        limit = max(bucket // world, 1)
                        by_rank[other] += (_Stretch(w, part) for b in each for part in b.cut(size, limit))
        self.sent, self.received = (
            [sum(_nbytes([way[i][r]]) for way in ways.values()) for r in range(world)] for i in range(2)
        )
        most = [max(_nbytes(sent), _nbytes(received)) for sent, received in ways.values()]
        every = mesh.sum_on_host([n if r == rank else 0 for n in most for r in range(world)])
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
        for sent, received in self._rounds:
            counts, from_each = ([_nbytes([each]) for each in way] for way in (sent, received))
            x, into = (torch.empty(sum(n), dtype=torch.uint8, device=self._mesh.device) for n in (counts, from_each))
            for s, place in _places(sent, x):
                place.copy_(s.box.of(have[s.wanted.have.key]))
            work = self._mesh.start_all_to_all_rows(
                x, into, (counts, from_each), self._mesh.layout.names, direction="state", tag="reshard"
            )
            work.wait()
            for s, place in _places(received, into):
                s.box.of(need[s.wanted.need.key]).copy_(place)


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
    start = 0
    for s in (s for each in by_rank for s in each):
        stop = start + s.nbytes
        yield s, flat[start:stop].view(s.wanted.wire).view(s.box.shape)
        start = stop
