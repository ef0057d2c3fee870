"""Weights that ranks do not divide, as errors: one for all weights that share a split, by the heads (or other pieces) that they share.

    q.weight, q.bias, k.weight and 4 more: 4 heads of 16 do not divide by tp=3         make it 3 or 6 heads, or tp=2 or 4, ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from shardc import divide
from shardc.divide import Odd
from shardc.errors import Errors
from shardc.mesh import Mesh
from shardc.passes.follow import Follower, Region
from shardc.passes.uneven import pieces_of
from shardc.placement import Layout, Shard
from shardc.program import Param, Program

_NAMED = 3  # weights that an error names


def tell(program: Program, mesh: Mesh, found: Iterable[tuple[Param, Layout, str]], errors: Errors) -> None:
    """Add the errors. found: parameters, the layouts that they cannot have (`divide.odd`), and the spec's places that say so."""
    follower = Follower(program)
    groups: dict[Any, tuple[Odd, Region | None, str, list[Param]]] = {}
    for p, layout, where in found:
        o = divide.odd(layout, p.shape, mesh)
        assert o is not None
        region = follower.follow((follower.placeholders[p.name], 0), Shard(o.dim, o.parts)) if o.size % o.parts == 0 else None
        shared = frozenset(n.name for n in region.params) if isinstance(region, Region) else where
        made = groups.setdefault((shared, o.axes), (o, region if isinstance(region, Region) else None, where, []))
        made[3].append(p)
    for o, region, where, params in groups.values():
        names = ", ".join(p.fqn for p in params[:_NAMED]) + (f" and {len(params) - _NAMED} more" if len(params) > _NAMED else "")
        pieces = pieces_of(follower, region) if region is not None else 1
        if region is None or not 1 < pieces < o.size // o.parts:
            shape = f" of shape {list(params[0].shape)}" if len(params) == 1 else ""
            errors.add(f"{names}{shape}: {o.what(mesh)}", where=where, fix=o.fix(mesh))
            continue
        attends = any(node.target is torch.ops.aten.scaled_dot_product_attention.default for node in region.ops)
        noun = "heads" if attends else "pieces"
        before, n = o.split // o.parts, math.prod(mesh.size(a) for a in o.axes)
        errors.add(
            f"{names}: {pieces} {noun} of {o.size // o.parts // pieces} do not divide by {divide.by(o.axes, mesh)}", where=where,
            fix=f"make it {divide.sizes(pieces, n)} {noun}, or {divide.ranks(o.axes[-1], pieces // before, n // before)}, or set `uneven: pad`",
        )  # fmt: skip
