"""Rules of softmax, log_softmax and logsumexp, also over a split dim.

So logits split by classes are never gathered (label smoothing, a z-loss, entropies, distillation).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from shardc.ir.metadata import Collective, Value
from shardc.ir.placement import PARTIAL, REPLICATE, Partial, Placement
from shardc.rules.core.op_call import Call
from shardc.rules.core.reduce_parts import per_row, squeezed
from shardc.rules.core.registry import LocalCall, rule, rules
from shardc.rules.core.shared_signatures import whole_dims
from shardc.rules.core.strategy import Strategy, needs_sum_grad, splits_of
from shardc.rules.reduce import reduced
from shardc.runtime import ops
from shardc.runtime.ops.softmax_parts import wide

aten = torch.ops.aten
#: The kind of the strategy by which a dim of the softmax is split.
PARTS = "normaliser"


def elements(call: Call) -> int:
    """Return how many elements are normalised together."""
    return math.prod(call.operands[0].shape[d] for d in call.dims())


def by_parts(call: Call, n: int, available: Sequence[frozenset[Placement]]) -> Iterable[Strategy]:
    """Yield strategies that split a softmax's dim: two small reductions over ranks make the normaliser.

    The vocabulary-parallel loss works the same way (Megatron-LM, Shoeybi et al. 2019, section 3).
    """
    x, result = call.operands[0], call.results[0].shape
    for p in splits_of(x, call.dims(), n, available[0]):
        if not p.mirrored:
            yield Strategy(PARTS, (p,), (p if result == x.shape else REPLICATE,))


def local_softmax(call: LocalCall) -> fx.Node:
    """Compute the largest element over ranks, the sum of exponentials over ranks, and the result."""
    split = call.axes(PARTS)
    if not split:
        return call.same()
    x, out, dims = call.call.operands[0], call.call.results[0], sorted(call.call.dims())
    axes, layout, dtype = call.mesh.merge(split), call.inputs[0], wide(call.call.operands[0].dtype)
    value, grad = per_row(call, dims, split, dtype), out.requires_grad
    terms = call.args[0]
    for d in dims:
        terms = call.without_padding(terms, 0, d, -math.inf)
    cause = "softmax over a split dim: the"
    top = call.emit(ops.largest, (terms, dims), {}, value=value(Partial("max")))
    top = call.all_reduce(ops.all_reduce_max, top, axes, value(REPLICATE), f"{cause} largest element")
    sums = call.emit(ops.sum_exp, (terms, top, dims), {}, value=value(PARTIAL, grad=grad))
    whole = value(REPLICATE, grad=grad)
    sums = call.all_reduce(ops.all_reduce, sums, axes, whole, f"{cause} normaliser")
    lse = call.emit(ops.log_sum, (sums, top), {}, value=whole)
    if out.shape != x.shape or call.call.target is aten.logsumexp.default:
        return _cast(call, squeezed(call, lse, whole, dims), dtype)
    if needs_sum_grad(whole):  # each rank uses it only for its part
        sent = Collective("none", "all_reduce", axes, whole.nbytes(call.mesh), f"{cause} normaliser")
        lse = call.emit(ops.sum_grad, (lse, call.mesh_node, axes), {}, value=whole, collective=sent)
    typed = Value(x.shape, dtype, grad, layout)
    y = call.emit(aten.sub.Tensor, (call.args[0], lse), {}, value=typed)
    if "log" not in str(call.call.target):
        y = call.emit(aten.exp.default, (y,), {}, value=typed)
    return _cast(call, y, dtype)


def _cast(call: LocalCall, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    target = call.call.results[0].dtype
    return x if target == dtype else call.emit(aten._to_copy.default, (x,), {"dtype": target})


rule(aten.logsumexp.default, reduced, local=local_softmax, extra=by_parts)
rules("softmax.int _softmax log_softmax.int _log_softmax", whole_dims, local=local_softmax, extra=by_parts)
