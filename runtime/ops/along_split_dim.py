"""Compute cumulative sums and convolutions along a split dim; ranks exchange only a few rows.

A rank has one or several stretches of the dim (two in a zigzag; shardc.ir.placement). It writes one row of each into a
table of all stretches, in the order of the dim, which is summed over ranks. For a cumulative sum:

    x          [1 2 | 3 4 | 5 6 | 7 8]        4 ranks, or 2 in a zigzag
    totals      3     7     11    15          the table, on every rank
    before      0     3     10    21          added to each stretch's own sums

A convolution's rows are the edges beside a part. So what is sent grows with the number of ranks, not with the dim.
Backward is the transpose: gradients of a row are summed, and go to the rank that wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardc.ir.placement import Shard
from shardc.ir.shard_chunks import chunks
from shardc.runtime.ops.with_backward import with_backward

Mesh = Any
#: (axis, split) of each shard of a dim, split negative where it is mirrored.
Digits = Sequence[tuple[str, int]]


def count(digits: Digits, mesh: Any) -> int:
    """Return the number of stretches of a dim, over all ranks. mesh: of a runtime, or a layout."""
    return max(abs(split) * int(mesh.size(axis)) for axis, split in digits)


def _table(rows: Tensor, mesh: Mesh, digits: Digits, tag: str) -> tuple[Tensor, list[int]]:
    """Return ([all stretches, ...], the places of this rank's in it). rows: [this rank's stretches, ...]."""
    size = count(digits, mesh)
    stretches = torch.arange(size, device="cpu")
    for axis, split in sorted(digits, key=lambda d: -abs(d[1])):  # inner digits first, as in Layout.local
        stretches = chunks(stretches, Shard.of_signed(0, split), mesh.size(axis))[mesh.coordinate(axis)]
    places = stretches.tolist()
    axes = tuple(mesh.layout.merge([a for a in mesh.layout.names if a in dict(digits)]))

    def forward(rows: Tensor) -> tuple[Tensor, tuple[()]]:
        table = rows.new_zeros(size, *rows.shape[1:])
        for i, place in enumerate(places):
            table[place] = rows[i]
        return mesh.all_reduce(table, axes, tag=tag), ()

    def backward(needs: Any, g: Tensor) -> tuple[Tensor]:
        return (_at(mesh.all_reduce(g.contiguous(), axes, direction="backward", tag=tag), places),)

    table: Tensor = with_backward(forward, backward, rows)
    return table, places


def _at(table: Tensor, places: Sequence[int]) -> Tensor:
    """Return table[places]. A list as an index would be copied to the device, and waited for."""
    return torch.stack([table[i] for i in places])


def cumsum(
    x: Tensor, dim: int, mesh: Mesh, digits: Digits, *, dtype: torch.dtype | None = None, tag: str = ""
) -> Tensor:
    """Compute the cumulative sum over a split dim >= 0; x [.., n, ..] and the result are a rank's part."""
    stretches = count(digits, mesh) // math.prod(mesh.size(a) for a, _ in digits)
    sums = x.unflatten(dim, (stretches, -1)).cumsum(dim + 1, dtype=dtype)  # type: ignore[no-untyped-call]
    table, places = _table(sums.select(dim + 1, -1).movedim(dim, 0), mesh, digits, tag)
    before = torch.cat([torch.zeros_like(table[:1]), table[:-1].cumsum(0)])
    y: Tensor = sums + _at(before, places).movedim(0, dim).unsqueeze(dim + 1)
    return y.flatten(dim, dim + 1)


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    left: int,
    dilation: int = 1,
    groups: int = 1,
    mesh: Mesh = None,
    digits: Digits = (),
    *,
    tag: str = "",
) -> Tensor:
    """Compute a convolution f[b, c, t] -> f[b, o, t] of stride 1 with `left` zeros before x.

    After x are (k - 1) * dilation - left zeros. A causal one has left = (k - 1) * dilation. weight: f[o, c / groups,
    k].
    digits: of t, where x is a rank's part, of stretches no shorter than either edge.
    """
    right = (weight.shape[-1] - 1) * dilation - left
    if not digits:
        return F.conv1d(F.pad(x, (left, right)), weight, bias, dilation=dilation, groups=groups)
    stretches = count(digits, mesh) // math.prod(mesh.size(a) for a, _ in digits)
    parts = x.unflatten(-1, (stretches, -1)).movedim(-2, 0)  # type: ignore[no-untyped-call]  # [stretches, b, c, n]
    n = parts.shape[-1]
    table, places = _table(torch.cat([parts[..., :right], parts[..., n - left :]], -1), mesh, digits, tag)
    none = torch.zeros_like(table[:1])
    table = torch.cat([none, table, none])
    before, behind = _at(table, places)[..., right:], _at(table, [i + 2 for i in places])[..., :right]
    wide = torch.cat([before, parts, behind], -1).flatten(0, 1)
    y = F.conv1d(wide, weight, bias, dilation=dilation, groups=groups)
    by_stretch: Tensor = y.unflatten(0, (stretches, -1))  # type: ignore[no-untyped-call]
    return by_stretch.movedim(0, 2).flatten(2, 3)
