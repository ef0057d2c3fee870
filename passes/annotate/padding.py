"""Pad sizes that an axis's ranks do not divide (`uneven: pad`, shardc.ir.placement.Shard.padding).

    before   tp=4, 6 heads of 16   q_proj: f32[96@tp, 64]       o_proj: f32[64, 96@tp]       1.5 heads a rank
    after                          q_proj: f32[96+32@tp, 64]    o_proj: f32[64, 96+32@tp]   2 a rank, the last none

A split that starts at one weight is followed to all that share it (propagate_split.py). The smallest number of pieces
that an op on the way makes of the dim, such as heads, must divide by the ranks. Every weight of the group is padded by
the same number of pieces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from shardc.ir.graph import placeholders
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program
from shardc.passes.annotate.propagate_split import Follower, SplitGroup


def padded(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """Return the layout with every dim padded by as few entries as needed."""
    for dim in {s.dim for _, s in layout.shards()}:
        outer, n = _digits(layout, dim, mesh)
        if dim < len(shape) and not outer.sections and shape[dim] % (outer.split // (2 if outer.mirrored else 1)) == 0:
            parts = 2 if outer.mirrored else 1  # a zigzag has one padding, after both stretches of all ranks
            blocks = outer.split // parts
            layout = _with(layout, dim, mesh, -(shape[dim] // blocks) % (n * parts), blocks)
    return layout


def pad_weights(program: Program, layouts: Mapping[str, Layout], mesh: Mesh) -> dict[str, Layout]:
    """Return the layouts with the padding that weights need; weights with a common split have the same."""
    follower = Follower(program)
    widened = dict(layouts)
    done: set[tuple[str, int]] = set()
    nodes = placeholders(program.graph)
    for p in program.params:
        for dim in sorted({s.dim for _, s in widened.get(p.name, Layout()).shards()}):
            if (p.name, dim) in done:
                continue
            outer, n = _digits(widened[p.name], dim, mesh)
            group = None if outer.sections else follower.follow((nodes[p.name], 0), Shard(dim, outer.split))
            if not isinstance(group, SplitGroup):
                continue
            same = {
                q.name: s
                for q, s in group.params.items()
                if q.name in widened and _is_split(widened[q.name], s, n, mesh)
            }
            pieces = pieces_of(follower, group)
            if pieces and pieces % n and len(same) == sum(q.name in widened for q in group.params):
                for name, s in same.items():
                    block = program.param(name).shape[s.dim] // s.split
                    if block % pieces == 0:
                        widened[name] = _with(widened[name], s.dim, mesh, -pieces % n * (block // pieces), s.split)
                        done.add((name, s.dim))
    shapes = {name: program.param(name).shape for name in widened}
    return {
        name: padded(layout, shapes[name], mesh) if layout.fits(shapes[name], mesh) else layout
        for name, layout in widened.items()
    }


def pieces_of(follower: Follower, group: SplitGroup) -> int:
    """Return the least number of pieces that an op of the group splits its dim into; 0 if none does."""
    counts = []
    for node, strategy in group.ops.items():
        if strategy.kind == "split":
            digit = strategy.factor.partition("/")[2]
            counts.append(follower.choices(node).signature.sizes[strategy.base] // int(digit or 1))
    return min(counts, default=0)


def _digits(layout: Layout, dim: int, mesh: Mesh) -> tuple[Shard, int]:
    """Return the outermost shard of a dim, and the number of ranks that split it."""
    shards = layout.shards(dim)
    outer = min((s for _, s in shards), key=lambda s: s.split, default=Shard(dim))
    return outer, math.prod(mesh.size(axis) for axis, _ in shards)


def _is_split(layout: Layout, s: Shard, n: int, mesh: Mesh) -> bool:
    """Return whether a dim is split as this shard is, by n ranks in all."""
    outer, ranks = _digits(layout, s.dim, mesh)
    return ranks == n and outer.split == s.split


def _with(layout: Layout, dim: int, mesh: Mesh, padding: int, blocks: int) -> Layout:
    if not padding:
        return layout
    return Layout.of(
        {
            a: replace(p, padding=padding, blocks=blocks) if isinstance(p, Shard) and p.dim == dim else p
            for a, p in layout.items
        },
        mesh,
    )
