"""Randomness: every dropout, that of attention too, draws from the counter generator; the rest is refused."""

from __future__ import annotations

import math

import torch

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
    """Without dropout it stays torch's op; with dropout it is one of ours, whose masks do not depend on the mesh."""
    q, k, v, mask = a.query, a.key, a.value, a.attn_mask
    p = float(a.dropout_p)
    if 0 < p < 1:
        return emit.attention(out, q, k, v, mask, p, bool(a.is_causal), a.scale, bool(a.enable_gqa))
    extra = {n: a[n] for n, default in (("scale", None), ("enable_gqa", False)) if a[n] != default}
    positional = [mask, 0.0, a.is_causal] if a.is_causal else [mask] if mask is not None else []
    whole = emit(aten.scaled_dot_product_attention.default, q, k, v, *positional, **extra)
    return emit(aten.mul.Tensor, whole, 0.0) if p >= 1 else whole
