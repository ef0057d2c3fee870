"""Where each rank has a tensor under a program: boxes of the global tensor, as of a checkpoint (shardc.runtime.state.
boxes), but of any rank. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.runtime.state.boxes import Box, Numbers, Part, by_name
from shardc.runtime.zero.flat_partition import Stretches

_NOTHING = torch.empty(0)


class Place(Protocol):
    """Where ranks have a tensor. Equal places have equal boxes."""

    def boxes(self, rank: int) -> Sequence[Box]:
        """What a rank has of it; () if nothing."""
        ...


class Plan:
    """What each rank has under a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._stretches = Stretches(program)

    @cached_property
    def stored(self) -> dict[str, Param | Buffer]:
        """Parameters and buffers by placeholder name."""
        every: list[Param | Buffer] = [*self.program.params, *self.program.buffers]
        return {x.name: x for x in every}

    @cached_property
    def params(self) -> dict[str, Param]:
        """Parameters by the names that checkpoints have for them: of a stack the names of its members."""
        return {n: p for p in self.program.params for n in p.members or (p.fqn,)}

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """Buffers of the model by their first names."""
        return {b.fqn: b for b in self.program.buffers if b.fqn}

    def zero(self, p: Param) -> int:
        """The level of ZeRO of its bucket."""
        bucket = self.program.bucket(p)
        return bucket.zero if bucket is not None else 0

    def boxes(self, x: Param | Buffer, name: str, rank: int, *, cut: bool) -> Sequence[Box]:
        """What a rank has of a parameter or buffer (of a stack: of its member `name`). cut: of a parameter that ZeRO
        cuts, the stretch that is left to the rank."""
        mesh = self.program.mesh
        if not self.program.has(x, mesh.coords(rank)):
            return ()
        if isinstance(x, Buffer):
            return Part(_NOTHING, x.shape, x.layout).boxes(mesh, rank)
        run = self._stretches.of(x, rank) if cut else None
        return by_name(x, Part(_NOTHING, x.shape, x.layout, run))[name].boxes(mesh, rank)


@dataclass(frozen=True)
class Lying:
    """As a parameter or buffer of a program lies.

    stored: its placeholder; name: its own, or that of a member of the stack that it is. cut: as ZeRO cuts it. ranks:
    those that have it at all; None: all that have the parameter.
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

    def on(self, ranks: frozenset[int]) -> Lying:
        """The same on these ranks alone; itself, if no other has any of it."""
        others = set(range(self.plan.program.mesh.world)) - ranks
        return replace(self, ranks=ranks) if any(self.boxes(r) for r in others) else self


@dataclass(frozen=True)
class Whole:
    """Whole, on some ranks."""

    shape: Numbers
    ranks: frozenset[int]

    def boxes(self, rank: int) -> Sequence[Box]:
        if rank not in self.ranks or 0 in self.shape:
            return ()
        return (Box((0,) * len(self.shape), self.shape, tuple(slice(0, n) for n in self.shape)),)
