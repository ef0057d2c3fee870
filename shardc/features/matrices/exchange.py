"""Move parts of matrices to their owners, and back, by all_to_alls of exactly the needed elements.

Buckets of matrices have one dtype. All messages run at once. Parts that a rank has itself are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.features.matrices.program import Matrix
from shardc.features.matrices.routes import Piece, Routes
from shardc.runtime.mesh import Work

#: Bytes of matrices in a bucket, for each rank with a part.
BUCKET = 25 << 20


@dataclass(frozen=True)
class _BucketPieces:
    """The pieces of one bucket in one direction, by place."""

    sent: list[list[Piece]]
    received: list[list[Piece]]

    @property
    def counts(self) -> tuple[list[int], list[int]]:
        sent, received = ([sum(p.numel for p in pieces) for pieces in way] for way in (self.sent, self.received))
        return sent, received


@dataclass(frozen=True)
class _Flight:
    """The running messages of one bucket. sent: is kept until they have arrived."""

    way: _BucketPieces
    work: Work
    sent: Tensor
    into: Tensor


class Exchange:
    """The exchange of one rank. dtypes: of the parameters, by placeholder name."""

    def __init__(self, routes: Routes, mesh: Any, dtypes: Mapping[str, torch.dtype], limit: int | None = None) -> None:
        self._routes, self._mesh = routes, mesh
        #: Matrices and dtype of each; then the pieces of each to owners, and from them.
        self._buckets = list(_buckets(routes.matrices, dtypes, (limit or BUCKET) * len(routes.ranks)))
        self._there = [_without_own(_BucketPieces(*routes.to_owners(some)), routes.here) for some, _ in self._buckets]
        self._back = [_without_own(_BucketPieces(*routes.from_owners(some)), routes.here) for some, _ in self._buckets]
        self._own = [p for m in routes.matrices for p in self._stored_pieces(m)]

    def _stored_pieces(self, m: Matrix) -> Iterator[Piece]:
        """Yield the pieces that this rank stores of a matrix that it owns."""
        if self._routes.owners[m.name] == self._routes.here:
            yield from self._routes.pieces(m, self._routes.here)

    def to_owners(self, stored: Mapping[str, Tensor], wholes: Mapping[str, Tensor], direction: str) -> None:
        """Send stored {parameter: this rank's part}, and fill wholes {matrix that it owns: a tensor}."""
        Sending(self, direction).finish(stored, wholes)

    @torch.no_grad()
    def from_owners(self, wholes: Mapping[str, Tensor], stored: Mapping[str, Tensor], direction: str) -> None:
        """Send the owners' values back: every rank's part of every parameter is filled."""
        for p in self._own:
            p.stored(stored[p.matrix.param]).copy_(p.whole(wholes[p.matrix.name]))
        ways = range(len(self._back) if len(self._routes.ranks) > 1 else 0)
        begun = [self._start(i, self._back[i], lambda p: p.whole(wholes[p.matrix.name]), direction) for i in ways]
        self._land(begun, lambda p: p.stored(stored[p.matrix.param]))

    def _start(self, i: int, way: _BucketPieces, read: Callable[[Piece], Tensor], direction: str) -> _Flight:
        """Start the messages of a bucket in one direction."""
        dtype, device = self._buckets[i][1], self._mesh.device
        flat = [read(p).reshape(-1).to(device) for pieces in way.sent for p in pieces]
        x = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        into = torch.empty(sum(way.counts[1]), dtype=dtype, device=device)
        options = {"direction": direction, "tag": f"matrices{i}"}
        work = self._mesh.start_all_to_all_rows(x, into, way.counts, self._routes.axes, **options)
        return _Flight(way, work, x, into)

    def _land(self, begun: Sequence[_Flight], room: Callable[[Piece], Tensor]) -> None:
        for flight in begun:
            flight.work.wait()
            pieces = [p for each in flight.way.received for p in each]
            for p, values in zip(pieces, flight.into.split_with_sizes([p.numel for p in pieces]), strict=True):
                target = room(p)
                target.copy_(values.view(target.shape))

    @property
    def read(self) -> Iterator[Piece]:
        """The pieces that this rank sends to owners, also to itself."""
        yield from self._own
        for way in self._there:
            for each in way.sent:
                yield from each


class Sending:
    """A transfer to the owners, bucket by bucket: `begin` as values come, `finish` with all of them."""

    def __init__(self, exchange: Exchange, direction: str) -> None:
        self._exchange, self._direction = exchange, direction
        self._there: dict[str, Tensor] = {}
        self._flights: list[_Flight] = []

    @torch.no_grad()
    def begin(self, stored: Mapping[str, Tensor]) -> None:
        """Start the buckets that these values, {parameter: part}, complete, in order. Collective."""
        self._there |= stored
        x = self._exchange
        while len(x._routes.ranks) > 1 and len(self._flights) < len(x._buckets):
            i = len(self._flights)
            if any(m.param not in self._there for m in x._buckets[i][0]):
                return
            self._flights.append(x._start(i, x._there[i], self._read, self._direction))

    @torch.no_grad()
    def finish(self, stored: Mapping[str, Tensor], wholes: Mapping[str, Tensor]) -> None:
        """Send the rest. stored: all values; wholes: {matrix that this rank owns: a tensor to fill}."""
        self.begin(stored)
        x = self._exchange
        for p in x._own:
            p.whole(wholes[p.matrix.name]).copy_(self._read(p))
        begun, self._flights = self._flights, []
        x._land(begun, lambda p: p.whole(wholes[p.matrix.name]))
        self._there = {}

    def drop(self) -> None:
        """Wait for the messages of a step that failed halfway."""
        for flight in self._flights:
            flight.work.wait()
        self._flights, self._there = [], {}

    def _read(self, p: Piece) -> Tensor:
        return p.stored(self._there[p.matrix.param])


def _without_own(way: _BucketPieces, here: int) -> _BucketPieces:
    """Remove what a rank would send itself."""
    sent, received = ([[] if i == here else pieces for i, pieces in enumerate(x)] for x in (way.sent, way.received))
    return _BucketPieces(sent, received)


def _buckets(
    matrices: Sequence[Matrix], dtypes: Mapping[str, torch.dtype], limit: int
) -> Iterator[tuple[list[Matrix], torch.dtype]]:
    """Yield consecutive matrices of one dtype, with at most this many bytes (at least one matrix)."""
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
