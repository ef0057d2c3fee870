"""Rules of ops along a dim that stays split, for which ranks exchange a little data.

cumsum      the sum of each rank's entries
conv1d      the edges of each rank's entries: the window's length less one

Both are extra strategies (ops: shardc.runtime.ops.along_split_dim); in the op's notation the dim is whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import fx

from shardc.ir.metadata import Collective, Value
from shardc.ir.placement import PARTIAL_GRAD, REPLICATE, Placement, Shard
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import LocalCall
from shardc.rules.core.strategy import Strategy, needs_sum_grad, splits_of
from shardc.runtime import ops
from shardc.runtime.ops.along_split_dim import count

#: The kind of these strategies. Microbatches cannot communicate as ranks do.
ALONG_SPLIT_DIM = "along split dim"


def _stretches(x: Value, dim: int, n: int, available: frozenset[Placement], least: int) -> Iterator[Shard]:
    """Yield splits of a dim into contiguous parts of at least `least` entries, padded only at the end."""
    for p in splits_of(x, {dim}, n, available):
        if p.by_digits_alone and p.padded(x.shape[dim]) // (p.split * n) >= max(least, 1):
            yield p


def of_cumsum(call: Call, n: int, available: Sequence[frozenset[Placement]]) -> Iterable[Strategy]:
    x = call.operands[0]
    if x.shape:
        for p in _stretches(x, call.dim("dim"), n, available[0], 1):
            yield Strategy(ALONG_SPLIT_DIM, (p,), (p,))


def local_cumsum(call: LocalCall) -> fx.Node:
    if not call.axes(ALONG_SPLIT_DIM):
        return call.same()
    out = call.call.results[0]
    dim = call.call.dim("dim")
    (digits, _), dtype = call.digits(0, dim), call.kwargs.get("dtype")
    shape = call.out_shape
    rows = count(digits, call.mesh) * math.prod(shape) // shape[dim] * out.dtype.itemsize
    kwargs: dict[str, Any] = {"tag": ""} | ({"dtype": dtype} if dtype is not None else {})
    collective = _sum(call, rows, grad=out.requires_grad)
    return call.emit(ops.cumsum, (call.args[0], dim, call.mesh_node, digits), kwargs, collective=collective)


def of_conv1d(call: Call, n: int, available: Sequence[frozenset[Placement]]) -> Iterable[Strategy]:
    x = call.operands[0]
    left, right = edges(call)
    for p in _stretches(x, 2, n, available[0], max(left, right)):
        others = [PARTIAL_GRAD if needs_sum_grad(v) else REPLICATE for v in call.operands[1:]]
        yield Strategy(ALONG_SPLIT_DIM, (p, *others), (p,))


def edges(call: Call) -> tuple[int, int]:
    """Return how many entries a window of `ops.conv1d` reads before and behind each place."""
    left, dilation = call.arg("left"), call.arg("dilation")
    return left, (call.operands[1].shape[-1] - 1) * dilation - left


def local_conv1d(call: LocalCall) -> fx.Node:
    """Rewrite for a rank's groups, with zeros behind the sequence if a window reaches padding."""
    x, shape = call.call.operands[0], call.local(0)
    groups = shape[1] // call.local(1)[1]
    args = (*call.args[:3], call.call.arg("left"), call.call.arg("dilation"), groups)
    digits, _ = call.digits(0, 2)
    if not call.axes(ALONG_SPLIT_DIM) or not digits:
        return call.emit(ops.conv1d, args, {})
    left, right = edges(call.call)
    if right:
        args = (call.without_padding(call.args[0], 0, 2, 0.0), *args[1:])
    rows = count(digits, call.mesh) * shape[0] * shape[1] * (left + right) * x.dtype.itemsize
    collective = _sum(call, rows, grad=x.requires_grad)
    return call.emit(ops.conv1d, (*args, call.mesh_node, digits), {"tag": ""}, collective=collective)


def _sum(call: LocalCall, nbytes: int, *, grad: bool) -> Collective:
    axes = call.mesh.merge(call.axes(ALONG_SPLIT_DIM))
    return Collective("all_reduce", "all_reduce" if grad else "none", tuple(axes), nbytes)
