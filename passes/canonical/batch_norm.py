"""Rewrite BatchNorm as means and elementwise ops: a split batch has one device's exact statistics.

`batch_norm: local`: the batch is cut into chunks, over ranks and then over microbatches. Each has its own statistics

    x [B, C, ...]  ->  reshape [chunks, B / chunks, C, ...]  ->  mean, variance [chunks, C]

so that a rank or a microbatch needs no others. (Hoffer et al. 2017, "Train longer, generalize better": ghost batch
normalization.) Running statistics are what eager BatchNorm has after a rank's microbatches in turn, averaged over
ranks:

    new = (1 - momentum)^m old + sum over i < m of momentum (1 - momentum)^(m - 1 - i) mean over ranks of statistic i
"""

from __future__ import annotations

import math

import torch
from torch import fx

from shardc.ir.graph import value_of
from shardc.ir.metadata import Value
from shardc.passes.canonical.rewrite import Args, Emit, Result, rewrite, shape
from shardc.runtime import ops

aten = torch.ops.aten


#: All forms of batch norm that torch has.
BATCH_NORMS = (
    "batch_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "_batch_norm_no_update",
)


@rewrite(*BATCH_NORMS)
def batch_norm(emit: Emit, a: Args, out: Value | tuple[Value | None, ...]) -> Result:
    """Rewrite batch norm. In training, the batch's mean and biased variance normalise.

    The unbiased variance updates the running one. `batch_stat` chooses the running statistics when the program
    evaluates. Results: (y, mean, 1 / deviation, ..., new mean, new variance); the second and third have no gradient,
    and are None if each chunk has its own.
    """
    training = a.get("training", "with_update" in a.op_name)  # ops without the argument have it in their name
    x, running = a.input, (a.get("running_mean"), a.get("running_var"))
    if not training:
        y = _affine(emit, x, 1, running[0], running[1], a)
        return y if isinstance(out, Value) else (y, *[None] * (len(out) - 1))
    x, dim = _chunked(emit, x)
    dims = [d for d in range(len(shape(x))) if d != dim and (d or dim == 1)]
    n = math.prod(shape(x)[d] for d in dims)
    mean = emit(aten.mean.dim, x, dims)
    centred = emit(aten.sub.Tensor, x, _channel(emit, mean, x, dim))
    var = emit(aten.mean.dim, emit(aten.mul.Tensor, centred, centred), dims)
    saved: list[fx.Node | None] = [None, None]
    if dim == 1 and not isinstance(out, Value):
        saved = [emit.detach(mean), emit(aten.rsqrt.default, emit(aten.add.Tensor, emit.detach(var), a.eps))]
    if running[0] is None:
        y = _affine(emit, x, dim, mean, var, a)
        return y if isinstance(out, Value) else (y, *saved, *[None] * (len(out) - 3))
    y = _affine(emit, x, dim, _stat(emit, mean, running[0]), _stat(emit, var, running[1]), a)
    if isinstance(out, Value):
        return y
    unbiased = emit(aten.mul.Tensor, emit.detach(var), n / max(n - 1, 1))
    news = [_moved(emit, old, new, a.momentum) for old, new in zip(running, (emit.detach(mean), unbiased), strict=True)]
    empty = [emit(aten.full.default, list(v.shape), 0, dtype=v.dtype) for v in out[3:-2] if v is not None]
    return (y, *saved, *empty, *news)  # kernels' reserve for backward is empty on a CPU


def _chunked(emit: Emit, x: fx.Node) -> tuple[fx.Node, int]:
    """Return x with its rows in chunks, if each has its own statistics, and the dim of the channels."""
    chunks, (rows, *rest) = math.prod(emit.chunks), shape(x)
    if chunks == 1:
        return x, 1
    local = f"`batch_norm: local` takes statistics of {emit.chunks[0]} ranks and {emit.chunks[1]} microbatches"
    if rows % chunks:
        raise emit.refuse(
            f"{local}: {rows} rows cannot be cut into {chunks} equal parts",
            f"make the batch a multiple of {chunks}, or write batch_norm: sync",
        )
    if rows // chunks * math.prod(rest[1:]) == 1:
        raise emit.refuse(
            f"{local}: each part has one value per channel",
            "give every microbatch more rows, or write batch_norm: sync",
        )
    return emit.reshape(x, [chunks, rows // chunks, *rest]), 2


def _stat(emit: Emit, batch: fx.Node, running: fx.Node) -> fx.Node:
    return emit.typed(value_of(batch), ops.batch_stat, batch, emit.expand(running, shape(batch)), emit.rng)


def _moved(emit: Emit, old: fx.Node, new: fx.Node, momentum: float) -> fx.Node:
    """Return the running statistic `old`, moved towards the batch's f[C].

    With chunks f[chunks, C], it moves for one microbatch after the other.
    """
    new = emit.cast(new, value_of(old).dtype)
    ranks, microbatches = emit.chunks
    rest = 1 - momentum
    if ranks > 1:
        new = emit(aten.mean.dim, emit.reshape(new, [ranks, microbatches, *shape(old)]), [0])
    if microbatches == 1:
        new = emit.reshape(emit(aten.mul.Tensor, new, momentum), shape(old))
    else:
        later = emit(aten.arange.start_step, microbatches - 1, -1, -1, dtype=value_of(old).dtype)
        part = emit(aten.mul.Tensor, emit(aten.pow.Scalar, rest, later), momentum)
        new = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, new, emit.reshape(part, [microbatches, 1])), [0])
    return emit(aten.add.Tensor, emit(aten.mul.Tensor, old, rest**microbatches), new)


def _channel(emit: Emit, stat: fx.Node, x: fx.Node, dim: int) -> fx.Node:
    """Reshape f[C] to f[1, C, 1, ...], or f[chunks, C] to f[chunks, 1, C, 1, ...]. dim: of x's channels."""
    kept = (0, dim) if len(shape(stat)) == 2 else (dim,)
    return emit.reshape(stat, [s if d in kept else 1 for d, s in enumerate(shape(x))])


def _affine(emit: Emit, x: fx.Node, dim: int, mean: fx.Node, var: fx.Node, a: Args) -> fx.Node:
    centred = emit(aten.sub.Tensor, x, _channel(emit, mean, x, dim))
    scale = emit(aten.rsqrt.default, emit(aten.add.Tensor, var, a.eps))
    y = emit(aten.mul.Tensor, centred, _channel(emit, scale, x, dim))
    if a.weight is not None:
        y = emit(aten.mul.Tensor, y, _channel(emit, a.weight, x, dim))
    if a.bias is not None:
        y = emit(aten.add.Tensor, y, _channel(emit, a.bias, x, dim))
    return emit.cast(emit.reshape(y, shape(a.input)), value_of(a.input).dtype)
