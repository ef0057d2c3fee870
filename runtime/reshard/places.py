"""Find the boxes of a tensor that any rank has under a program (as shardc.runtime.state.boxes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.runtime.state.boxes import Box, Part, by_name
from shardc.runtime.state.checkpoint_index import Numbers
from shardc.runtime.zero.flat_partition import FlatShards

_NOTHING = torch.empty(0)


class Place(Protocol):
    """The place of a tensor on ranks. Equal places have equal boxes."""

    def boxes(self, rank: int) -> Sequence[Box]:
        """Return a rank's boxes of it; () if it has none."""
        ...


class Plan:
    """The tensors of each rank under a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._stretches = FlatShards(program)

    @cached_property
    def stored(self) -> dict[str, Param | Buffer]:
        """Parameters and buffers by placeholder name."""
        return {x.name: x for x in self.program.params_and_buffers}

    @cached_property
    def params(self) -> dict[str, Param]:
        """Parameters by their names in checkpoints; for a stack, the names of its members."""
        return {n: p for p in self.program.params for n in p.members or (p.fqn,)}

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """Buffers of the model by their first names."""
        return {b.fqn: b for b in self.program.buffers if b.fqn}

    def zero(self, p: Param) -> int:
        """Return the ZeRO level of its bucket."""
        bucket = self.program.bucket(p)
        return bucket.zero if bucket is not None else 0

    def boxes(self, x: Param | Buffer, name: str, rank: int, *, cut: bool) -> Sequence[Box]:
        """Return a rank's boxes of x; of a stack, of its member `name`. cut: only ZeRO's stretch for the rank."""
        mesh = self.program.mesh
        if not self.program.has(x, mesh.coords(rank)):
            return ()
        if isinstance(x, Buffer):
            return Part(_NOTHING, x.shape, x.layout).boxes(mesh, rank)
        run = self._stretches.of(x, rank) if cut else None
        return by_name(x, Part(_NOTHING, x.shape, x.layout, run))[name].boxes(mesh, rank)


@dataclass(frozen=True)
class InPlan:
    """The place of a parameter or buffer `name` of a program. stored: its placeholder, perhaps a stack's.

    cut: as ZeRO cuts it. ranks: those that have it at all; None: all that have the parameter.
    """

    plan: Plan
    stored: str
    name: str
    cut: bool = False
    ranks: frozenset[int] | None = None

    def boxes(self, rank: int) -> Sequence[Box]:
        if self.ranks is not None and rank not in self.ranks:
            return ()
        return self.plan.boxes(self.plan.stored[self.stored], self.name, rank, cut=self.cut)

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
        if rank not in self.ranks or 0 in self.shape:
            return ()
        return (Box((0,) * len(self.shape), self.shape, tuple(slice(0, n) for n in self.shape)),)
