"""Rewrite writes to the true places of a mask, in order, as multimodal models do with images.

    masked_scatter(x, m, y)    ->    where(m, index_select(rows of y, 0, cumsum(m) - 1), x)
    x[m] = y                   ->    the same

Only the mask (to number its true entries) and the written values need to be whole; x, and all that follows, stays
split.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from shardc.ir.metadata import Value
from shardc.passes.canonical.rewrite import Args, Emit, Result, rewrite, shape

aten = torch.ops.aten


@rewrite("masked_scatter")
def masked_scatter(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite masked_scatter; a mask that is expanded over x's last dims places whole rows."""
    mask: fx.Node = a.mask
    while mask.target is aten.expand.default and isinstance(mask.args[0], fx.Node):
        mask = mask.args[0]
    x = emit.expand(a.self, out.shape)
    aligned = (1,) * (len(out.shape) - len(shape(mask))) + shape(mask)
    k = max((d + 1 for d, s in enumerate(aligned) if s != 1), default=0)
    if math.prod(shape(a.source)) % math.prod(out.shape[k:]):
        k = len(aligned)  # values that are not whole rows
    mask = emit.expand(emit.reshape(mask, aligned), (*out.shape[:k], *aligned[k:]))
    return emit(aten.where.self, mask, in_order(emit, mask, a.source, out.shape), x)


def in_order(emit: Emit, mask: fx.Node, source: fx.Node, size: tuple[int, ...]) -> fx.Node:
    """Return `source`'s n-th row at the n-th true entry of `mask`, in x's size; other rows are arbitrary.

    mask: bool, of x's leading dims; its last ones are 1: they belong to a row. source: rows one after the other in any
    shape; at least as many as true entries.
    """
    k = max((d + 1 for d, s in enumerate(shape(mask)) if s != 1), default=0)
    row = size[k:]
    rows = emit.reshape(source, (math.prod(shape(source)) // math.prod(row), *row))
    which = emit(aten.cumsum.default, emit.reshape(mask, (math.prod(size[:k]),)), 0)
    which = emit(aten.clamp.default, emit(aten.sub.Tensor, which, 1), 0, shape(rows)[0] - 1)
    return emit.reshape(emit(aten.index_select.default, rows, 0, which), size)
