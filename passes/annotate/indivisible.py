"""Weights that ranks do not divide, as errors: one for all weights that share a split, by the heads (or other pieces)
that
they share.

q.weight, q.bias, k.weight and 4 more: 4 heads of 16 do not divide by tp=3         make it 3 or 6 heads, or tp=2 or 4, ...
"""  # noqa: E501 (a table)

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from shardc.errors import Errors
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Param, Program
from shardc.passes import divisibility
from shardc.passes.annotate.padding import pieces_of
from shardc.passes.annotate.propagate_split import Follower, Region
from shardc.passes.divisibility import Odd

_NAMED = 3  # weights that an error names


@dataclass(frozen=True)
class _Group:
    """Weights that share a split. region: what they are split with; None if the split cannot be followed. where: the
    first one's place.
    """

    odd: Odd
    region: Region | None
    where: str
    params: list[Param] = field(default_factory=list)

    def tell(self, follower: Follower, mesh: Mesh, errors: Errors) -> None:
        o, names = self.odd, ", ".join(p.fqn for p in self.params[:_NAMED])
        if len(self.params) > _NAMED:
            names += f" and {len(self.params) - _NAMED} more"
        block = o.size // o.parts
        pieces = pieces_of(follower, self.region) if self.region is not None else 1
        if self.region is None or not 1 < pieces < block:
            shape = f" of shape {list(self.params[0].shape)}" if len(self.params) == 1 else ""
            errors.add(f"{names}{shape}: {o.what(mesh)}", where=self.where, fix=o.fix(mesh))
            return
        attends = any(node.target is torch.ops.aten.scaled_dot_product_attention.default for node in self.region.ops)
        noun = "heads" if attends else "pieces"
        before, n = (
            o.split // o.parts,
            math.prod(mesh.size(a) for a in o.axes),
        )  # ranks of the axes before the one at fault, and of all
        other = "" if pieces % before else f", or {divisibility.ranks(o.axes[-1], pieces // before, n // before)}"
        errors.add(
            f"{names}: {pieces} {noun} of {block // pieces} do not divide by {divisibility.by(o.axes, mesh)}",
            where=self.where,
            fix=f"make it {divisibility.sizes(pieces, n)} {noun}{other}, or set `uneven: pad`",
        )


def tell(program: Program, mesh: Mesh, found: Iterable[tuple[Param, Layout, str]], errors: Errors) -> None:
    """Add the errors. found: parameters, the layouts that they cannot have (`divide.odd`), and the spec's places that
    say so.
    """
    follower = Follower(program)
    groups: dict[object, _Group] = {}
    for p, layout, where in found:
        odd = divisibility.odd(layout, p.shape, mesh)
        assert odd is not None
        region = (
            follower.follow((follower.placeholders[p.name], 0), Shard(odd.dim, odd.parts))
            if odd.size % odd.parts == 0
            else None
        )
        region = region if isinstance(region, Region) else None
        shared = where if region is None else frozenset(n.name for n in region.params)
        groups.setdefault((shared, odd.axes), _Group(odd, region, where)).params.append(p)
    for group in groups.values():
        group.tell(follower, mesh, errors)
