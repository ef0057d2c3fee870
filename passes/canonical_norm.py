"""BatchNorm as means and elementwise ops: splitting the batch then is exactly the single device's statistics."""

from __future__ import annotations

import math

import torch
from torch import fx

from shardc.passes.canonical_emit import Args, Emit, Result, rewrite, shape, value
from shardc.program import Value
from shardc.runtime import ops

aten = torch.ops.aten


@rewrite(
    "batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "_batch_norm_with_update", "_batch_norm_with_update_functional",
    "_batch_norm_no_update",
)  # fmt: skip
def batch_norm(emit: Emit, a: Args, out: Value | tuple[Value | None, ...]) -> Result:
    """In training: mean and biased variance of the batch normalise; the unbiased variance goes into the running one.

    `batch_stat` chooses the running statistics when the program evaluates. Results: (y, -, -, new mean, new variance).
    """
    training = a.get("training", "with_update" in a.op_name)  # the names of those without the argument say it
    x, running = a.input, (a.get("running_mean"), a.get("running_var"))
    if not training:
        y = _affine(emit, x, running[0], running[1], a)
        return y if isinstance(out, Value) else (y, *[None] * (len(out) - 1))
    dims = [d for d in range(len(shape(x))) if d != 1]
    n = math.prod(shape(x)[d] for d in dims)
    mean = emit(aten.mean.dim, x, dims)
    centred = emit(aten.sub.Tensor, x, _channel(emit, mean, x))
    var = emit(aten.mean.dim, emit(aten.mul.Tensor, centred, centred), dims)
    if running[0] is None:
        y = _affine(emit, x, mean, var, a)
        return y if isinstance(out, Value) else (y, *[None] * (len(out) - 1))
    y = _affine(emit, x, _stat(emit, mean, running[0]), _stat(emit, var, running[1]), a)
    if isinstance(out, Value):
        return y
    if len(out) < 5:
        raise emit.refuse(f"{a.op} changes its running statistics unseen", "call torch.nn.functional.batch_norm")
    unbiased = emit(aten.mul.Tensor, emit.detach(var), n / max(n - 1, 1))
    news = [_moved(emit, old, new, a.momentum) for old, new in zip(running, (emit.detach(mean), unbiased), strict=True)]
    return (y, None, None, *news, *[None] * (len(out) - 5))


def _stat(emit: Emit, batch: fx.Node, running: fx.Node) -> fx.Node:
    return emit.typed(value(batch), ops.batch_stat, batch, running, emit.rng)


def _moved(emit: Emit, old: fx.Node, new: fx.Node, momentum: float) -> fx.Node:
    new = emit.cast(new, value(old).dtype)
    return emit(aten.add.Tensor, emit(aten.mul.Tensor, old, 1 - momentum), emit(aten.mul.Tensor, new, momentum))


def _channel(emit: Emit, stat: fx.Node, x: fx.Node) -> fx.Node:
    """f[C] -> f[1, C, 1, ...], to broadcast over `x`."""
    return emit.reshape(stat, [s if d == 1 else 1 for d, s in enumerate(shape(x))])


def _affine(emit: Emit, x: fx.Node, mean: fx.Node, var: fx.Node, a: Args) -> fx.Node:
    centred = emit(aten.sub.Tensor, x, _channel(emit, mean, x))
    scale = emit(aten.rsqrt.default, emit(aten.add.Tensor, var, a.eps))
    y = emit(aten.mul.Tensor, centred, _channel(emit, scale, x))
    if a.weight is not None:
        y = emit(aten.mul.Tensor, y, _channel(emit, a.weight, x))
    if a.bias is not None:
        y = emit(aten.add.Tensor, y, _channel(emit, a.bias, x))
    return emit.cast(y, value(x).dtype)
