"""Find the boxes of a tensor that any rank has under a program (as shardc.runtime.state.boxes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.runtime.state.boxes import Box, Numbers, boxes_of
from shardc.runtime.zero.flat_partition import FlatShards


class Place(Protocol):
    """The place of a tensor on ranks. Equal places have equal boxes."""

    def boxes(self, rank: int) -> Sequence[Box]:
        """Return a rank's boxes of it; () if it has none."""
        ...


class Plan:
    """The tensors of each rank under a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.shards = FlatShards(program)

    @cached_property
    def params(self) -> dict[str, Param]:
        """Parameters by their names in checkpoints; for a stack, the names of its members."""
        return {n: p for p in self.program.params for n in p.members or (p.fqn,)}

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """Buffers of the model by their first names."""
        return {b.fqn: b for b in self.program.buffers if b.fqn}


@dataclass(frozen=True)
class InPlan:
    """The place of a parameter or buffer of a program.

    cut: as ZeRO cuts it. ranks: those that have it at all; None: all that have the parameter.
    """

    plan: Plan
    name: str
    cut: bool = False
    ranks: frozenset[int] | None = None

    def boxes(self, rank: int) -> Sequence[Box]:
        program, p = self.plan.program, self.plan.params.get(self.name)
        x = p or self.plan.buffers[self.name]
        if (self.ranks is not None and rank not in self.ranks) or not program.has(x, program.mesh.coords(rank)):
            return ()
        shard = self.plan.shards.of(p, rank) if self.cut and p is not None else None
        member = x.members.index(self.name) if x.members else None
        return boxes_of(x.shape, x.layout, shard, program.mesh, rank, member)

    def on(self, ranks: frozenset[int]) -> InPlan:
        """Return the same place on these ranks only; itself, if no other rank has any of it."""
        others = set(range(self.plan.program.mesh.world)) - ranks
        return replace(self, ranks=ranks) if any(self.boxes(r) for r in others) else self


@dataclass(frozen=True)
class Whole:
    """A whole tensor, on some ranks."""

    shape: Numbers
    ranks: frozenset[int]

    def boxes(self, rank: int) -> Sequence[Box]:
        return (Box.alone((0,) * len(self.shape), self.shape),) if rank in self.ranks and 0 not in self.shape else ()
