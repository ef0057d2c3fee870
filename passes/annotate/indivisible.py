"""Report sizes that an axis's ranks do not divide, with the cause and the sizes that would fit.

    8 is not divisible by dp=2 × microbatches=3
      fix: make it 6 or 12, or microbatches=2 or 4, or set `uneven: pad`
    q.weight, q.bias, k.weight and 4 more: 4 heads of 16 are not divisible by tp=3
      fix: make it 3 or 6 heads, or tp=2 or 4, or set `uneven: pad`

Weights that share a split are one error, by the heads (or other pieces) that they share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardc.errors import Errors
from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program
from shardc.ir.stored import Param
from shardc.ir.units import multiples
from shardc.passes.annotate.padding import pieces_of
from shardc.passes.annotate.propagate_split import Follower, SplitGroup
from shardc.rules import attention

#: How many of the weights that share a split an error names.
_NAMED = 3


def rank_counts(axis: str, size: int, n: int) -> str:
    """Return e.g. "tp=2 or 4": the nearest numbers of ranks that divide a size which n ranks do not."""
    numbers = divisors(size)
    low = max((k for k in numbers if k < n), default=1)
    high = next((k for k in numbers if n < k <= 4 * n), None)
    return f"{_as_written(axis)}={low}" + (f" or {high}" if high else "")


def divisors(size: int) -> list[int]:
    """Return the divisors of a size, in order. It is a tensor's size, so its square root is not large."""
    low = [k for k in range(1, math.isqrt(size) + 1) if size % k == 0]
    return [*low, *(size // k for k in reversed(low) if k * k != size)]


def _ranks(axes: Iterable[str], mesh: Mesh) -> str:
    """Return e.g. "dp=2 × microbatches=3": the ranks that do not divide a size."""
    return " × ".join(dict.fromkeys(f"{_as_written(a)}={mesh.size(a.partition('.')[0])}" for a in axes))


def _as_written(axis: str) -> str:
    """Return an axis as the spec writes it: without its digit, or "microbatches"."""
    return "microbatches" if axis == MICROBATCH else axis.partition(".")[0]


@dataclass(frozen=True)
class Indivisible:
    """A dim whose size the ranks of `axes` do not divide. axes: outermost first, the last one is at fault.

    parts: the dim has so many fused parts, each of which has to divide. step: sizes that are multiples of it divide.
    split: into how many parts the axes before the one at fault cut the dim.
    """

    dim: int
    size: int
    parts: int
    axes: tuple[str, ...]
    step: int
    split: int

    def fault(self, mesh: Mesh, size: str = "") -> str:
        """Return the text of an error. size: how to name the size; default: its number."""
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        return f"{size or self.size} is not divisible by {_ranks(self.axes, mesh)}{parts}"

    def fix(self, mesh: Mesh, size: str = "the size") -> str:
        """Return the fix: the nearest sizes, and the nearest numbers of ranks, that fit."""
        axis, other = self.axes[-1], ""
        if self.size % self.split == 0:
            other = f", or {rank_counts(axis, self.size // self.split, mesh.size(axis.partition('.')[0]))}"
        return f"make {size} {multiples(self.size, self.step)}{other}, or set `uneven: pad`"


def indivisible_dim(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> Indivisible | None:
    """Return the first dim of a shape that a layout's ranks do not divide; None if all divide.

    Dims with sections or padding do not count: Layout.problem checks them.
    """
    for dim in sorted({s.dim for _, s in layout.shards() if s.dim < len(shape) and not s.sections and not s.padding}):
        shards = sorted(layout.shards(dim), key=lambda item: item[1].split)
        for i, (axis, s) in enumerate(shards):
            if shape[dim] % (step := s.split * mesh.size(axis)):
                axes = tuple(a for a, _ in shards[: i + 1])
                split = next(t.split for a, t in shards if _as_written(a) == _as_written(axis))
                return Indivisible(dim, shape[dim], shards[0][1].split, axes, step, split)
    return None


def report(program: Program, mesh: Mesh, weights: Iterable[tuple[Param, Layout, str]], errors: Errors) -> None:
    """Add one error for all weights that share a split.

    weights: each with the layout that it cannot have, with an indivisible dim, and the place in the spec behind it.
    """
    follower = Follower(program)
    shared: dict[object, _SharedSplit] = {}
    for p, layout, where in weights:
        dim = indivisible_dim(layout, p.shape, mesh)
        assert dim is not None
        group = None
        if dim.size % dim.parts == 0:
            followed = follower.follow((follower.placeholders[p.name], 0), Shard(dim.dim, dim.parts))
            group = followed if isinstance(followed, SplitGroup) else None
        key = where if group is None else frozenset(n.name for n in group.params)
        shared.setdefault((key, dim.axes), _SharedSplit(dim, group, where)).params.append(p)
    for split in shared.values():
        split.report(follower, mesh, errors)


@dataclass(frozen=True)
class _SharedSplit:
    """Weights that share a split. dim, where: of the first one. group: of the split; None if not followed."""

    dim: Indivisible
    group: SplitGroup | None
    where: str
    params: list[Param] = field(default_factory=list)

    def report(self, follower: Follower, mesh: Mesh, errors: Errors) -> None:
        dim, names = self.dim, ", ".join(p.fqn for p in self.params[:_NAMED])
        if len(self.params) > _NAMED:
            names += f" and {len(self.params) - _NAMED} more"
        block = dim.size // dim.parts
        pieces = pieces_of(follower, self.group) if self.group is not None else 1
        if self.group is None or not 1 < pieces < block:
            shape = f" of shape {list(self.params[0].shape)}" if len(self.params) == 1 else ""
            errors.add(f"{names}{shape}: {dim.fault(mesh)}", where=self.where, fix=dim.fix(mesh))
            return
        attends = any(node.target in attention.OPS for node in self.group.ops)
        noun = "heads" if attends else "pieces"
        n = math.prod(mesh.size(a) for a in dim.axes)
        outer = dim.split // dim.parts  # ranks of the axes before the one at fault
        other = "" if pieces % outer else f", or {rank_counts(dim.axes[-1], pieces // outer, n // outer)}"
        fault = f"{names}: {pieces} {noun} of {block // pieces} are not divisible by {_ranks(dim.axes, mesh)}"
        errors.add(fault, where=self.where, fix=f"make it {multiples(pieces, n)} {noun}{other}, or set `uneven: pad`")
