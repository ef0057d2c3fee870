"""Rewrite bags of embeddings as look-ups and sums, bilinear layers as einsum, unpooling as a scatter.

embedding_bag(w, ids, arange(0, 24, 3), mode="mean")    ->    sum(embedding(w, reshape(ids, [8, 3])), [1]) / 3
embedding_bag(w, ids, offsets, mode="sum")              ->    index_add(zeros, 0, bags, embedding(w, ids))
                                                              bags = searchsorted(offsets, arange(24), right=True) - 1
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import value_of
from shardc.ir.metadata import Value
from shardc.passes.canonical.rewrite import Args, Emit, Result, rewrite, shape

aten = torch.ops.aten


@rewrite("bilinear")
def bilinear(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite `bilinear(x, y, w, b)` as `einsum("...i,oij,...j->...o", x, w, y) + b`."""
    y = emit(aten.einsum.default, "...i,oij,...j->...o", [a.input1, a.weight, a.input2])
    return y if a.bias is None else emit(aten.add.Tensor, y, a.bias)


@rewrite("addbmm")
def addbmm(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite `addbmm(x, a, b)` as `x + einsum("bij,bjk->ik", a, b)`: the batch is summed away."""
    product = emit(aten.einsum.default, "bij,bjk->ik", [a.batch1, a.batch2])
    terms = [x if n == 1 else emit(aten.mul.Tensor, x, n) for x, n in ((a.self, a.beta), (product, a.alpha))]
    return emit(aten.add.Tensor, *terms)


@rewrite("embedding_bag")
def embedding_bag(emit: Emit, a: Args, out: Any) -> Result:
    """Rewrite bags of one size (the usual 2-d ids) as a look-up, then sum, mean or max over the bag."""
    offsets = emit.constant(a.offsets)
    n = value_of(a.indices).shape[0]
    bags = out[0].shape[0] if out[0] is not None else 0
    size = n // max(bags, 1)
    even = offsets is not None and n == bags * size and torch.equal(offsets[:bags], torch.arange(0, n, max(size, 1)))
    if not even or a.include_last_offset:
        return (_bags_by_offset(emit, a, n, bags), None, None, None)
    ids = emit.reshape(a.indices, (bags, size))
    padding = -1 if a.get("padding_idx") is None else a.padding_idx % value_of(a.weight).shape[0]
    rows = emit(aten.embedding.default, a.weight, ids, padding, a.scale_grad_by_freq)
    kept: fx.Node | None = None
    if padding >= 0:
        kept = emit(aten.unsqueeze.default, emit(aten.ne.Scalar, ids, padding), 2)
    if a.mode == 2:
        if kept is not None:
            rows = emit(aten.masked_fill.Scalar, rows, emit(aten.logical_not.default, kept), -torch.inf)
            any_row = emit(aten.any.dim, kept, 1)
            most = emit(aten.amax.default, rows, [1])
            return (emit(aten.masked_fill.Scalar, most, emit(aten.logical_not.default, any_row), 0.0), None, None, None)
        # max.dim, as in embedding_bag: one of several equal elements gets the gradient
        node = emit(aten.max.dim, rows, 1)
        return (emit.typed(node.meta["value"][0], operator.getitem, node, 0), None, None, None)
    if a.per_sample_weights is not None:
        rows = emit(aten.mul.Tensor, rows, emit.reshape(a.per_sample_weights, (bags, size, 1)))
    if kept is not None:
        rows = emit(aten.mul.Tensor, rows, emit.cast(kept, value_of(rows).dtype))
    total = emit(aten.sum.dim_IntList, rows, [1])
    if a.mode == 1:
        count: fx.Node | float = float(size)
        if kept is not None:
            count = emit(
                aten.clamp_min.default, emit.cast(emit(aten.sum.dim_IntList, kept, [1]), value_of(rows).dtype), 1
            )
        total = emit(aten.div.Tensor, total, count)
    return (total, None, None, None)


def _bags_by_offset(emit: Emit, a: Args, n: int, bags: int) -> fx.Node:
    """Rewrite bags whose starts are a tensor: a row goes to the last bag that begins at or before it."""
    weight, offsets = value_of(a.weight), a.offsets
    if a.include_last_offset:
        offsets = emit(aten.slice.Tensor, offsets, 0, 0, bags)
    padding = -1 if a.get("padding_idx") is None else a.padding_idx % weight.shape[0]
    entries = emit(aten.embedding.default, a.weight, a.indices, padding, a.scale_grad_by_freq)
    places = emit(aten.arange.default, n, dtype=value_of(offsets).dtype)
    bag = emit(aten.sub.Tensor, emit(aten.searchsorted.Tensor, offsets, places, right=True), 1)
    kept = (
        emit(aten.ne.Scalar, a.indices, padding)
        if padding >= 0
        else emit(aten.full.default, [n], True, dtype=torch.bool)
    )
    full = emit(aten.full.default, [bags], 0.0, dtype=weight.dtype)
    count = emit(aten.unsqueeze.default, emit(aten.index_add.default, full, 0, bag, emit.cast(kept, weight.dtype)), 1)
    rows = emit(aten.unsqueeze.default, kept, 1)
    if a.mode == 2:
        entries = emit(aten.masked_fill.Scalar, entries, emit(aten.logical_not.default, rows), -torch.inf)
        least = emit(aten.full.default, [bags, weight.shape[1]], -torch.inf, dtype=weight.dtype)
        where = emit.expand(emit(aten.unsqueeze.default, bag, 1), (n, weight.shape[1]))
        most = emit(aten.scatter_reduce.two, least, 0, where, entries, "amax")
        return emit(aten.masked_fill.Scalar, most, emit(aten.eq.Scalar, count, 0), 0.0)
    if a.per_sample_weights is not None:
        entries = emit(aten.mul.Tensor, entries, emit(aten.unsqueeze.default, a.per_sample_weights, 1))
    if padding >= 0:
        entries = emit(aten.mul.Tensor, entries, emit.cast(rows, weight.dtype))
    zeros = emit(aten.full.default, [bags, weight.shape[1]], 0.0, dtype=weight.dtype)
    total = emit(aten.index_add.default, zeros, 0, bag, entries)
    return total if a.mode == 0 else emit(aten.div.Tensor, total, emit(aten.clamp_min.default, count, 1))


@rewrite("max_unpool2d max_unpool3d")
def unpooled(emit: Emit, a: Args, out: Value) -> Result:
    """Scatter in each image and channel separately, so that they may be split: indices count per area."""
    x: fx.Node = a.self
    lead = shape(x)[: len(shape(x)) - len(a.output_size)]
    flat, area = math.prod(shape(x)[len(lead) :]), math.prod(out.shape[len(lead) :])
    zeros = emit(aten.full.default, [*lead, area], 0, dtype=out.dtype)
    places, numbers = (emit.reshape(y, (*lead, flat)) for y in (a.indices, x))
    return emit.reshape(emit(aten.scatter.src, zeros, len(lead), places, numbers), out.shape)
