"""Define claims: what the proof knows about a value in a rank's text."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import fx

from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.metadata import Value
from shardc.ir.placement import PARTIAL_GRAD, REPLICATE, Layout, Partial, PartialGrad, Placement, Replicate, Shard
from shardc.ir.program import Program
from shardc.ir.stored import Input
from shardc.rules.core.strategy import needs_sum_grad

#: Names of placements in error messages.
NAMES: dict[type, str] = {
    Replicate: "whole",
    Shard: "split",
    Partial: "a sum still to be done",
    PartialGrad: "whole with a gradient in summands",
}


@dataclass(frozen=True)
class Claim:
    """A local value is this part of a value that one device computes.

    of: the value's node in the model's graph. layout: which part, on every axis of `mesh_of`. fills: (dim, number) of
    dims whose padding is known to hold that number.
    """

    of: fx.Node
    layout: Layout
    fills: frozenset[tuple[int, float]] = frozenset()


def mesh_of(program: Program) -> Mesh:
    """Return the axes of claims: the program's without the pipeline's, then microbatches (innermost).

    Microbatches act like the ranks of an axis: each has other rows, and their results are added up.
    """
    axes = [(a, n) for a, n in program.mesh.axes if a != program.axis]
    return Mesh((*axes, (MICROBATCH, program.microbatches)) if program.microbatches > 1 else tuple(axes))


def normal(layout: Layout, value: Value) -> Layout:
    """Return the layout without "replicated with partial gradient" if no gradient flows there."""
    return Layout(tuple((a, p) for a, p in layout.items if on_axis(p, value) != REPLICATE))


def on_axis(placement: Placement, value: Value) -> Placement:
    """Return the placement on one axis as `normal` does for a layout."""
    return REPLICATE if placement == PARTIAL_GRAD and not needs_sum_grad(value) else placement


def of_input(x: Input, mesh: Mesh) -> Layout:
    """Return the layout of an input, with the split into microbatches."""
    if x.microbatch is None or MICROBATCH not in mesh.names:
        return x.layout
    s = x.microbatch
    outer = math.prod(mesh.size(axis) for axis, _ in x.layout.shards(s.dim))
    return Layout((*x.layout.items, (MICROBATCH, replace(s, split=s.split * outer))))


def of_one_microbatch(layout: Layout, mesh: Mesh, *, padded: bool = False) -> Layout:
    """Return the layout of a microbatch's value as texts show it. padded: with all microbatches' padding."""
    s = layout[MICROBATCH]
    rest = tuple((a, p) for a, p in layout.items if a != MICROBATCH)
    if not isinstance(s, Shard):
        return Layout(rest)
    m = mesh.size(MICROBATCH)

    def inner(p: Placement) -> Placement:
        if not isinstance(p, Shard) or p.dim != s.dim:
            return p
        split = p.split // m if p.split > s.split else p.split
        return replace(p, split=split, padding=p.padding if padded else 0, blocks=1)

    return Layout(tuple((a, inner(p)) for a, p in rest))
