"""Sizes that ranks do not divide: one way to say by what they do not, and what would fit.

8 does not divide by dp=2 × microbatches=3        make it 6 or 12, or microbatches=2 or 4, or set `uneven: pad`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.placement import Layout


def named(axis: str) -> str:
    """An axis as the spec calls it: a digit by the axis it is one of, that of microbatches by its key."""
    return "microbatches" if axis == MICROBATCH else axis.partition(".")[0]


def by(axes: Iterable[str], mesh: Mesh) -> str:
    """ "dp=2 × microbatches=3": what a size does not divide by."""
    return " × ".join(dict.fromkeys(f"{named(a)}={mesh.size(a.partition('.')[0])}" for a in axes))


def sizes(size: int, step: int) -> str:
    """ "6 or 12": the nearest multiples of a step."""
    low = size // step * step
    return f"{low} or {low + step}" if low else str(step)


def ranks(axis: str, size: int, n: int) -> str:
    """ "tp=2 or 4": the nearest numbers of ranks of an axis that divide a size, which n do not."""
    low = max(k for k in range(1, max(n, 2)) if size % k == 0)
    high = next((k for k in range(n + 1, min(size, 4 * n) + 1) if size % k == 0), None)
    return f"{named(axis)}={low}" + (f" or {high}" if high else "")


@dataclass(frozen=True)
class Odd:
    """A dim of a size that does not divide by the ranks of `axes` (outermost first, the last one at fault), in each of
    `parts` fused parts.
    """

    dim: int
    size: int
    parts: int
    axes: tuple[str, ...]
    step: int  # a size that divides is a multiple of it
    split: int  # of the axis at fault: into so many parts others cut the dim before

    def what(self, mesh: Mesh, size: str = "") -> str:
        return f"{size or self.size} does not divide by {by(self.axes, mesh)}" + (
            f" in {self.parts} parts" if self.parts > 1 else ""
        )

    def fix(self, mesh: Mesh, pad: str = ", or set `uneven: pad`", size: str = "the size") -> str:
        axis = self.axes[-1]
        other = (
            ""
            if self.size % self.split
            else f", or {ranks(axis, self.size // self.split, mesh.size(axis.partition('.')[0]))}"
        )
        return f"make {size} {sizes(self.size, self.step)}{other}{pad}"


def odd(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> Odd | None:
    """The first dim that ranks do not divide; None if there is none. What is split by sections, or padded, is left to
    others.
    """
    for dim in sorted({s.dim for _, s in layout.shards() if s.dim < len(shape) and not s.sections and not s.padding}):
        shards = sorted(layout.shards(dim), key=lambda item: item[1].split)
        for i, (axis, s) in enumerate(shards):
            if shape[dim] % (step := s.split * mesh.size(axis)):
                first = next(t.split for a, t in shards if named(a) == named(axis))
                return Odd(dim, shape[dim], shards[0][1].split, tuple(a for a, _ in shards[: i + 1]), step, first)
    return None
