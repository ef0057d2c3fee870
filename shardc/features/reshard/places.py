"""Find the boxes of a tensor that any rank has under a program, and the weights that move between two programs.

At ZeRO 1 and 2 a rank stores a stretch of a parameter, and has a copy of all of it, perhaps in another dtype to compute
in. The old copy is read if its dtype fits. The new copy is not moved: it is gathered from the stretches, as after an
update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from shardc.errors import Errors, ShardcError
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.runtime.state.boxes import Box, Numbers, boxes_of, kept
from shardc.runtime.state.fitting import check_tensors
from shardc.runtime.zero.flat_partition import FlatShards

#: The name of a local tensor of a rank: (form, name).
Key = tuple[str, str]


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


@dataclass(frozen=True)
class Listed:
    """A place as boxes by rank; other ranks have none."""

    by_rank: tuple[tuple[Box, ...], ...]

    def boxes(self, rank: int) -> Sequence[Box]:
        return self.by_rank[rank] if rank < len(self.by_rank) else ()


@dataclass(frozen=True)
class Kept:
    """A form in which ranks keep a tensor. key: of the local tensor."""

    key: Key
    dtype: torch.dtype
    place: Place


@dataclass(frozen=True)
class Wanted:
    """A tensor to move."""

    name: str
    have: Kept
    need: Kept

    @property
    def wire(self) -> torch.dtype:
        """The dtype in which it is sent: the narrower of the two."""
        return min(self.need.dtype, self.have.dtype, key=lambda d: d.itemsize)

    @property
    def places(self) -> tuple[Place, Place]:
        return self.have.place, self.need.place


def weights(old: Plan, new: Plan, *, all_buffers: bool) -> list[Wanted]:
    """Return the moves of parameters and common buffers.

    all_buffers: both need all buffers of a checkpoint. Raises ShardcError for programs of different models.
    """
    check(old, new, all_buffers=all_buffers)
    wanted = []
    for name, p in new.params.items():
        need = Kept(("own", p.name), p.dtype, InPlan(new, name, cut=True))
        wanted.append(Wanted(name, readable(old, name, p.dtype), need))
    both = [name for name in new.buffers if name in old.buffers]
    return [*wanted, *(Wanted(name, readable(old, name), readable(new, name)) for name in both)]


def readable(plan: Plan, name: str, dtype: torch.dtype | None = None) -> Kept:
    """Return the form of a buffer, or of a parameter that is read.

    A parameter is read whole, unless ZeRO 3 cut it, or the copy is neither in its own dtype nor in this one.
    """
    if (p := plan.params.get(name)) is None:
        b = plan.buffers[name]
        return Kept(("buffer", b.name), b.dtype, InPlan(plan, name))
    bucket = plan.program.bucket(p)
    zero = bucket.zero if bucket is not None else 0
    whole = (bucket.compute if bucket is not None and zero else None) or p.dtype
    cut = zero == 3 or whole not in (p.dtype, dtype)
    return Kept(("own" if cut else "whole", p.name), p.dtype if cut else whole, InPlan(plan, name, cut))


def check(old: Plan, new: Plan, *, all_buffers: bool) -> None:
    """Raise ShardcError for programs of different models, or numbers of ranks. all_buffers: of `weights`."""
    before, after = old.program.mesh, new.program.mesh
    if before.world != after.world:
        fault = f"the mesh {before} has {before.world} ranks, and {after} has {after.world}"
        fix = "use the same number of ranks for both; to continue on another number of ranks, save, and load there"
        raise ShardcError(fault, where="mesh", fix=fix)
    errors = Errors()
    have, want = (_shapes(plan, all_buffers) for plan in (old, new))
    check_tensors(errors, want, have, want, "the engine whose weights are to move")
    errors.raise_any()


def _shapes(plan: Plan, all_buffers: bool) -> dict[str, tuple[int, ...]]:
    shapes = {n: p.shapes[n] for n, p in plan.params.items()}
    return shapes | {b.fqn: b.shape for b in kept(plan.program) if all_buffers}
