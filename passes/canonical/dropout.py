"""Randomness: every dropout draws from the counter generator, attention with dropout is spelled out, the rest is
refused.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from shardc.ir.graph import value_of
from shardc.ir.program import Value
from shardc.passes.canonical.rewrite import Args, Emit, Result, rewrite, shape

aten = torch.ops.aten
#: What SELU tends to below zero, negated.
SELU = 1.7580993408473766


@rewrite("dropout", "native_dropout")
def dropout(emit: Emit, a: Args, out: Value | tuple[Value | None, ...]) -> Result:
    """`dropout(x, p, True)` -> `ops.dropout(x, p, rng, index)`; x itself when p is 0 or the module evaluates."""
    train = a.train is None or bool(a.train)
    y = emit.dropout(a.input, float(a.p) if train else 0.0)
    return y if isinstance(out, Value) else (y, None)


@rewrite("feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def other_dropout(emit: Emit, a: Args, out: Value) -> Result:
    """Dropout of whole channels (Dropout2d), and alpha dropout (Klambauer et al. 2017), which keeps mean and variance:
    x * mask + shift.
    """
    x, p = a.input, float(a.p)
    if not a.train or p == 0:
        return x  # type: ignore[no-any-return]
    size = shape(x)
    if "feature" in a.op_name:
        size = tuple(s if d < 2 else 1 for d, s in enumerate(size))
    mask = emit.dropout(emit(aten.full.default, list(size), 1.0, dtype=value_of(x).dtype), p)
    if "alpha" not in a.op_name:
        return emit(aten.mul.Tensor, x, mask)
    if p >= 1:
        return emit(aten.mul.Tensor, x, 0.0)
    scale = 1 / math.sqrt((SELU * SELU * p + 1) * (1 - p))
    kept = emit(aten.mul.Tensor, mask, (1 - p) * scale)  # `scale` where x is kept, 0 elsewhere
    shift = emit(aten.add.Tensor, emit(aten.mul.Tensor, kept, SELU), SELU * scale * (p - 1))
    return emit(aten.add.Tensor, emit(aten.mul.Tensor, x, kept), shift)


@rewrite("scaled_dot_product_attention")
def attention(emit: Emit, a: Args, out: Value) -> Result:
    """Without dropout it stays one op; with dropout: matmul, mask, softmax, dropout, matmul."""
    q, k, v, mask = a.query, a.key, a.value, a.attn_mask
    if a.dropout_p <= 0:
        extra = {n: a[n] for n, default in (("scale", None), ("enable_gqa", False)) if a[n] != default}
        positional = [mask, 0.0, a.is_causal] if a.is_causal else [mask] if mask is not None else []
        return emit(aten.scaled_dot_product_attention.default, q, k, v, *positional, **extra)
    if a.enable_gqa:
        k, v = (_repeat_heads(emit, x, shape(q)[-3]) for x in (k, v))
    scale = 1 / math.sqrt(shape(q)[-1]) if a.scale is None else a.scale
    ndim = len(shape(k))
    scores = emit(aten.matmul.default, emit(aten.mul.Tensor, q, scale), emit(aten.transpose.int, k, ndim - 2, ndim - 1))
    hidden: fx.Node | None = None
    if a.is_causal:
        ones = emit(aten.full.default, list(shape(scores)[-2:]), True, dtype=torch.bool)
        hidden = emit(aten.logical_not.default, emit(aten.tril.default, ones))
    elif mask is not None and value_of(mask).dtype == torch.bool:
        hidden = emit(aten.logical_not.default, mask)
    elif mask is not None:
        scores = emit(aten.add.Tensor, scores, mask)
    if hidden is not None:  # the least number, not -inf: a row that sees nothing must become zeros (below), not NaN
        scores = emit(aten.masked_fill.Scalar, scores, hidden, torch.finfo(value_of(scores).dtype).min)
    narrow = value_of(scores).dtype  # exponentials add up in float32, as the fused op adds them
    weights = emit(
        aten.softmax.int, emit.cast(scores, torch.promote_types(narrow, torch.float32)), len(shape(scores)) - 1
    )
    weights = emit.cast(weights, narrow)
    if hidden is not None:
        weights = emit(aten.masked_fill.Scalar, weights, hidden, 0.0)
    return emit(aten.matmul.default, emit.dropout(weights, float(a.dropout_p)), v)


def _repeat_heads(emit: Emit, x: fx.Node, heads: int) -> fx.Node:
    """f[.., kv, s, d] -> f[.., heads, s, d], each head repeated in place."""
    *lead, kv, s, d = shape(x)
    if kv == heads:
        return x
    wide = emit.expand(emit(aten.unsqueeze.default, x, len(lead) + 1), [*lead, kv, heads // kv, s, d])
    return emit.reshape(wide, [*lead, heads, s, d])
