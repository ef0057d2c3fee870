"""Find which rank sends which part of which matrix to which: from stored parts to owners, and back.

Pure arithmetic: every rank finds its own sends and receives, and both ends list them in one order. Each element of a
matrix comes to its owner once, from the nearest replica; from the owner it goes to every rank that stores it. Padding
is in no part, so it is not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from shardc.features.matrices.program import Matrix, axes
from shardc.ir.program import Program
from shardc.ir.stored import Param
from shardc.runtime.state.boxes import Box, boxes_of, cut_axes, replicas
from shardc.runtime.zero.flat_partition import FlatShards


@dataclass(frozen=True)
class Piece:
    """A box of a matrix that a rank stores."""

    matrix: Matrix
    box: Box

    @property
    def numel(self) -> int:
        return self.box.numel

    def stored(self, local: Tensor) -> Tensor:
        """Return its view of the rank's stored part of the parameter."""
        return self.box.of(local)

    def whole(self, matrix: Tensor) -> Tensor:
        """Return its view of the owner's matrix."""
        return matrix.view(self.matrix.size)[self.box.within(self.matrix.offset)]


class Routes:
    """The routes of one rank, among the ranks that share its parameters: the mesh, or its pipeline stage.

    matrices: of this rank's parameters, in an order that all of them share; owners: {name: place in `ranks`}. ranks:
    the group over `axes`.
    """

    def __init__(self, program: Program, rank: int, matrices: Sequence[Matrix], owners: Mapping[str, int]) -> None:
        self.axes = axes(program)
        self._program, self._mesh, self._rank = program, program.mesh, rank
        self.ranks = self._mesh.group(rank, self.axes) if self.axes else (rank,)
        self.here = self.ranks.index(rank)
        self.matrices, self.owners = tuple(matrices), dict(owners)
        self._stretches = FlatShards(program)

    @cached_property
    def _params(self) -> dict[str, Param]:
        return {p.name: p for p in self._program.params}

    @cached_property
    def _coords(self) -> list[dict[str, int]]:
        return [self._mesh.coords(r) for r in self.ranks]

    def pieces(self, m: Matrix, place: int) -> Iterator[Piece]:
        """Yield the pieces of a matrix that the rank at a place stores."""
        p, rank = self._params[m.param], self.ranks[place]
        for box in boxes_of(p.shape, p.layout, self._stretches.of(p, rank), self._mesh, rank):
            if (inside := box.inside(m.offset, m.size)) is not None:
                yield Piece(m, inside)

    def sources(self, m: Matrix) -> list[int]:
        """Return the places of the ranks that send to a matrix's owner: the replicas in its row of the mesh."""
        p = self._params[m.param]
        same = [a for a in replicas(self._program, p.layout, cut_axes(self._program, p)) if a in self.axes]
        owner = self._coords[self.owners[m.name]]
        return [i for i, coords in enumerate(self._coords) if all(coords[a] == owner[a] for a in same)]

    def to_owners(self, some: Sequence[Matrix]) -> tuple[list[list[Piece]], list[list[Piece]]]:
        """Return (the pieces that this rank sends, that it receives), of some matrices, by place."""
        sent: list[list[Piece]] = [[] for _ in self.ranks]
        received: list[list[Piece]] = [[] for _ in self.ranks]
        for m in some:
            owner, sources = self.owners[m.name], self.sources(m)
            if self.here in sources:
                sent[owner] += self.pieces(m, self.here)
            if owner == self.here:
                for i in sources:
                    received[i] += self.pieces(m, i)
        return sent, received

    def from_owners(self, some: Sequence[Matrix]) -> tuple[list[list[Piece]], list[list[Piece]]]:
        """Return the same for the way back, to all ranks that store a part."""
        sent: list[list[Piece]] = [[] for _ in self.ranks]
        received: list[list[Piece]] = [[] for _ in self.ranks]
        for m in some:
            owner = self.owners[m.name]
            received[owner] += self.pieces(m, self.here)
            if owner == self.here:
                for i in range(len(self.ranks)):
                    sent[i] += self.pieces(m, i)
        return sent, received
