"""Rewrite every dropout, also attention's, to draw from the counter generator."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import value_of
from shardc.ir.metadata import Value
from shardc.passes.canonical.rewrite import Args, Emit, Result, rewrite, shape

aten = torch.ops.aten
#: The negated limit of SELU for large negative numbers.
SELU = 1.7580993408473766


@rewrite("dropout native_dropout")
def dropout(emit: Emit, a: Args, out: Value | tuple[Value | None, ...]) -> Result:
    """Rewrite `dropout(x, p, True)` as `ops.dropout(x, p, rng, index)`; as x if p is 0 or in evaluation."""
    train = a.train is None or bool(a.train)
    y = emit.dropout(a.input, float(a.p) if train else 0.0)
    return y if isinstance(out, Value) else (y, None)


@rewrite("feature_dropout alpha_dropout feature_alpha_dropout")
def other_dropout(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite dropout of whole channels (Dropout2d), and alpha dropout as x * mask + shift.

    Alpha dropout (Klambauer et al. 2017) keeps mean and variance.
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
        return emit.dropout(x, p)
    scale = 1 / math.sqrt((SELU * SELU * p + 1) * (1 - p))
    kept = emit(aten.mul.Tensor, mask, (1 - p) * scale)  # `scale` where x is kept, 0 elsewhere
    shift = emit(aten.add.Tensor, emit(aten.mul.Tensor, kept, SELU), SELU * scale * (p - 1))
    return emit(aten.add.Tensor, emit(aten.mul.Tensor, x, kept), shift)


@rewrite("scaled_dot_product_attention")
def attention(emit: Emit, a: Args, out: Value) -> Result:
    """Keep torch's attention without dropout; else use shardc's, whose masks do not depend on the mesh.

    Fused kernels need one head size. If the values have another (multi-head latent attention), torch would fall back to
    products that keep all scores. So the smaller ones are padded with zeros, which change no score and no sum:

        before   attention(q[.., 192], k[.., 192], v[.., 128])
        after    attention(q, k, pad(v, 192))[.., :128]
    """
    q, k, v, mask = a.query, a.key, a.value, a.attn_mask
    p = float(a.dropout_p)
    if 0 < p < 1:
        return emit.attention(out, q, k, v, mask, p, bool(a.is_causal), a.scale, bool(a.enable_gqa))
    scale, features, size = a.scale, shape(v)[-1], max(shape(q)[-1], shape(v)[-1])
    if len(out.shape) == 4 and shape(q)[-1] != features:
        scale = 1 / math.sqrt(shape(q)[-1]) if scale is None else scale
        q, k, v = (_widened(emit, x, size) for x in (q, k, v))
    extra: dict[str, Any] = {
        n: x for n, x, default in (("scale", scale, None), ("enable_gqa", a.enable_gqa, False)) if x != default
    }
    positional = [mask, 0.0, a.is_causal] if a.is_causal else [mask] if mask is not None else []
    whole = emit(aten.scaled_dot_product_attention.default, q, k, v, *positional, **extra)
    if shape(v)[-1] != features:
        whole = emit(aten.slice.Tensor, whole, 3, 0, features)
    return emit.dropout(whole, p)


def _widened(emit: Emit, x: fx.Node, size: int) -> fx.Node:
    """Pad the last dim with zeros at its end to this size."""
    short = size - shape(x)[-1]
    return emit(aten.constant_pad_nd.default, x, [0, short], 0.0) if short else x
