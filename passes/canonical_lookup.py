"""Bags of embeddings as look-ups and sums; bilinear layers as einsum, whose equation is the rule.

    embedding_bag(w, ids, arange(0, 24, 3), mode="mean")    ->    sum(embedding(w, reshape(ids, [8, 3])), [1]) / 3
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardc.passes.canonical_emit import Args, Emit, Result, rewrite, value
from shardc.program import Value

aten = torch.ops.aten


@rewrite("bilinear")
def bilinear(emit: Emit, a: Args, out: Value) -> Result:
    """`bilinear(x, y, w, b)` -> `einsum("...i,oij,...j->...o", x, w, y) + b`."""
    y = emit(aten.einsum.default, "...i,oij,...j->...o", [a.input1, a.weight, a.input2])
    return y if a.bias is None else emit(aten.add.Tensor, y, a.bias)


@rewrite("addbmm")
def addbmm(emit: Emit, a: Args, out: Value) -> Result:
    """`addbmm(x, a, b)` -> `x + einsum("bij,bjk->ik", a, b)`: the batch is summed away."""
    product = emit(aten.einsum.default, "bij,bjk->ik", [a.batch1, a.batch2])
    terms = [x if n == 1 else emit(aten.mul.Tensor, x, n) for x, n in ((a.self, a.beta), (product, a.alpha))]
    return emit(aten.add.Tensor, *terms)


@rewrite("embedding_bag")
def embedding_bag(emit: Emit, a: Args, out: Any) -> Result:
    """Bags of one size (the usual 2-d ids): look-up, then sum, mean or max over the bag. Other bags depend on data."""
    offsets = emit.constant(a.offsets)
    n = value(a.indices).shape[0]
    bags = out[0].shape[0] if out[0] is not None else 0
    size = n // max(bags, 1)
    even = offsets is not None and n == bags * size and torch.equal(offsets[:bags], torch.arange(0, n, max(size, 1)))
    if not even or a.include_last_offset:
        raise emit.refuse("embedding_bag with bags of different sizes: where they lie depends on data", "give 2-d ids, padded with padding_idx")
    ids = emit.reshape(a.indices, (bags, size))
    padding = -1 if a.get("padding_idx") is None else a.padding_idx % value(a.weight).shape[0]
    found = emit(aten.embedding.default, a.weight, ids, padding, a.scale_grad_by_freq, a.sparse)
    kept: fx.Node | None = None
    if padding >= 0:
        kept = emit(aten.unsqueeze.default, emit(aten.ne.Scalar, ids, padding), 2)
    if a.mode == 2:
        if kept is not None:
            found = emit(aten.masked_fill.Scalar, found, emit(aten.logical_not.default, kept), -torch.inf)
            some = emit(aten.any.dim, kept, 1)
            most = emit(aten.amax.default, found, [1])
            return (emit(aten.masked_fill.Scalar, most, emit(aten.logical_not.default, some), 0.0), None, None, None)
        # max.dim, as embedding_bag does: one of several equal elements gets the gradient
        node = emit(aten.max.dim, found, 1)
        return (emit.typed(node.meta["value"][0], operator.getitem, node, 0), None, None, None)
    if a.per_sample_weights is not None:
        found = emit(aten.mul.Tensor, found, emit.reshape(a.per_sample_weights, (bags, size, 1)))
    if kept is not None:
        found = emit(aten.mul.Tensor, found, emit.cast(kept, value(found).dtype))
    total = emit(aten.sum.dim_IntList, found, [1])
    if a.mode == 1:
        count: fx.Node | float = float(size)
        if kept is not None:
            count = emit(aten.clamp_min.default, emit.cast(emit(aten.sum.dim_IntList, kept, [1]), value(found).dtype), 1)
        total = emit(aten.div.Tensor, total, count)
    return (total, None, None, None)
