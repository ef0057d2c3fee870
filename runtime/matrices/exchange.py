"""Moves parts of matrices to their owners, and back, by all_to_alls of exactly the elements that other ranks need.

Matrices go in buckets of one dtype and of some size, whose messages are all under way at once; what a rank has itself
is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.ir.matrices import Matrix
from shardc.runtime.matrices.routes import Piece, Routes
from shardc.runtime.mesh import Work

#: Bytes of matrices in a bucket, for each rank that has a part.
BUCKET = 25 << 20


@dataclass(frozen=True)
class _Way:
    """One bucket's pieces in one direction, by place."""

    sent: list[list[Piece]]
    received: list[list[Piece]]

    @property
    def counts(self) -> tuple[list[int], list[int]]:
        sent, received = ([sum(p.numel for p in each) for each in way] for way in (self.sent, self.received))
        return sent, received


class Exchange:
    """Of one rank. dtypes: of the parameters, by placeholder name."""

    def __init__(self, routes: Routes, mesh: Any, dtypes: Mapping[str, torch.dtype], limit: int = BUCKET) -> None:
        self._routes, self._mesh = routes, mesh
        self._buckets = list(_buckets(routes.matrices, dtypes, limit * len(routes.ranks)))
        self._there = [_without(_Way(*routes.to_owners(some)), routes.here) for some, _ in self._buckets]
        self._back = [_without(_Way(*routes.from_owners(some)), routes.here) for some, _ in self._buckets]
        self._own = [p for m in routes.matrices for p in self._kept(m)]

    def _kept(self, m: Matrix) -> Iterator[Piece]:
        """What this rank stores of a matrix that it owns."""
        if self._routes.owners[m.name] == self._routes.here:
            yield from self._routes.pieces(m, self._routes.here)

    @torch.no_grad()
    def to_owners(self, stored: Mapping[str, Tensor], wholes: Mapping[str, Tensor], direction: str) -> None:
        """stored: {parameter: this rank's part}; wholes: {matrix that it owns: a tensor to fill}."""
        for p in self._own:
            p.whole(wholes[p.matrix.name]).copy_(p.stored(stored[p.matrix.param]))
        self._move(
            self._there,
            lambda p: p.stored(stored[p.matrix.param]),
            lambda p: p.whole(wholes[p.matrix.name]),
            direction,
        )

    @torch.no_grad()
    def from_owners(self, wholes: Mapping[str, Tensor], stored: Mapping[str, Tensor], direction: str) -> None:
        """The way back: every rank's part of every parameter is filled."""
        for p in self._own:
            p.stored(stored[p.matrix.param]).copy_(p.whole(wholes[p.matrix.name]))
        self._move(
            self._back,
            lambda p: p.whole(wholes[p.matrix.name]),
            lambda p: p.stored(stored[p.matrix.param]),
            direction,
        )

    def _move(
        self, ways: Sequence[_Way], read: Callable[[Piece], Tensor], room: Callable[[Piece], Tensor], direction: str
    ) -> None:
        if len(self._routes.ranks) == 1:
            return
        begun: list[tuple[Work, Tensor, Tensor, _Way]] = []
        for i, (way, (_, dtype)) in enumerate(zip(ways, self._buckets, strict=True)):
            sent, received = way.counts
            flat = [read(p).reshape(-1) for each in way.sent for p in each]
            x = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=self._mesh.device)
            into = torch.empty(sum(received), dtype=dtype, device=self._mesh.device)
            options = {"direction": direction, "tag": f"matrices{i}"}
            work = self._mesh.start_all_to_all_rows(x, into, sent, received, self._routes.axes, **options)
            begun.append((work, x, into, way))
        for work, _, into, way in begun:  # what is sent is kept until then
            work.wait()
            pieces = [p for each in way.received for p in each]
            for p, values in zip(pieces, into.split_with_sizes([p.numel for p in pieces]), strict=True):
                target = room(p)
                target.copy_(values.view(target.shape))

    @property
    def read(self) -> Iterator[Piece]:
        """The pieces of what this rank stores that go to owners, itself too."""
        yield from self._own
        for way in self._there:
            for each in way.sent:
                yield from each

    @property
    def elements(self) -> tuple[int, int]:
        """Elements that this rank sends to owners, and as an owner to others, in a step."""
        there, back = (sum(sum(w.counts[0]) for w in ways) for ways in (self._there, self._back))
        return there, back


def _without(way: _Way, here: int) -> _Way:
    """Without what a rank would send itself."""
    sent, received = ([[] if i == here else each for i, each in enumerate(x)] for x in (way.sent, way.received))
    return _Way(sent, received)


def _buckets(
    matrices: Sequence[Matrix], dtypes: Mapping[str, torch.dtype], limit: int
) -> Iterator[tuple[list[Matrix], torch.dtype]]:
    """Matrices in a row, of one dtype and up to so many bytes (one at least)."""
    some: list[Matrix] = []
    nbytes = 0
    for m in matrices:
        size = m.numel * dtypes[m.param].itemsize
        if some and (nbytes + size > limit or dtypes[some[0].param] != dtypes[m.param]):
            yield some, dtypes[some[0].param]
            some, nbytes = [], 0
        some.append(m)
        nbytes += size
    if some:
        yield some, dtypes[some[0].param]
