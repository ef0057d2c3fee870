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


def padded(layout: Layout, shape: tuple[int, ...], mesh: Mesh, multiple: int = 1) -> Layout:
    """Return the layout with every dim padded by as few entries as needed. multiple: of which each rank's part is."""
    for dim in {s.dim for _, s in layout.shards()}:
        outer, n = _outer_shard(layout, dim, mesh)
        stretches = 2 if outer.mirrored else 1  # of each rank in a zigzag, which is padded once, after all stretches
        blocks = outer.split // stretches
        if dim < len(shape) and not outer.sections and shape[dim] % blocks == 0:
            layout = _with_padding(layout, dim, mesh, -(shape[dim] // blocks) % (n * stretches * multiple), blocks)
    return layout


def pad_weights(program: Program, layouts: Mapping[str, Layout], mesh: Mesh) -> dict[str, Layout]:
    """Return the layouts with the padding that weights need. Weights with a common split get equal padding."""
    follower = Follower(program)
    result = dict(layouts)
    done: set[tuple[str, int]] = set()
    nodes = placeholders(program.graph)
    for p in program.params:
        for dim in sorted({s.dim for _, s in result.get(p.name, Layout()).shards()}):
            if (p.name, dim) in done:
                continue
            outer, n = _outer_shard(result[p.name], dim, mesh)
            group = None if outer.sections else follower.follow((nodes[p.name], 0), Shard(dim, outer.split))
            if not isinstance(group, SplitGroup):
                continue
            laid_out = {q.name: s for q, s in group.params.items() if q.name in result}
            agree = all(_is_split(result[name], s, n, mesh) for name, s in laid_out.items())
            pieces = pieces_of(follower, group)
            if pieces and pieces % n and agree:
                for name, s in laid_out.items():
                    block = program.param(name).shape[s.dim] // s.split
                    if block % pieces == 0:
                        padding = -pieces % n * (block // pieces)
                        result[name] = _with_padding(result[name], s.dim, mesh, padding, s.split)
                        done.add((name, s.dim))
    shapes = {name: program.param(name).shape for name in result}
    return {
        name: padded(layout, shapes[name], mesh) if layout.problem(shapes[name], mesh) else layout
        for name, layout in result.items()
    }


def pieces_of(follower: Follower, group: SplitGroup) -> int:
    """Return the least number of pieces that an op of the group splits its dim into; 0 if none does."""
    counts = []
    for node, strategy in group.ops.items():
        if strategy.kind == "split":
            digit = strategy.factor.partition("/")[2]
            counts.append(follower.choices(node).signature.sizes[strategy.base] // int(digit or 1))
    return min(counts, default=0)


def _outer_shard(layout: Layout, dim: int, mesh: Mesh) -> tuple[Shard, int]:
    """Return the shard of a dim's outermost axis, and the number of ranks of all axes that split the dim."""
    shards = layout.shards(dim)
    outer = min((s for _, s in shards), key=lambda s: s.split, default=Shard(dim))
    return outer, math.prod(mesh.size(axis) for axis, _ in shards)


def _is_split(layout: Layout, s: Shard, n: int, mesh: Mesh) -> bool:
    """Return whether a dim is split as this shard is, by n ranks in all."""
    outer, ranks = _outer_shard(layout, s.dim, mesh)
    return ranks == n and outer.split == s.split


def _with_padding(layout: Layout, dim: int, mesh: Mesh, padding: int, blocks: int) -> Layout:
    """Return the layout with this padding (`Shard.padding`) on every shard of a dim."""
    if not padding:
        return layout
    return Layout.of(
        {
            a: replace(p, padding=padding, blocks=blocks) if isinstance(p, Shard) and p.dim == dim else p
            for a, p in layout.items
        },
        mesh,
    )
