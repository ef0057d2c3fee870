"""Rewrite losses as per-element values, then a sum or mean that sharding can split.

cross_entropy(x, t)  ->  sum(nll(x, t)) / sum(t != ignore_index)
"""

from __future__ import annotations

import torch
from torch import fx

from shardc.ir.graph import value_of
from shardc.ir.metadata import Value
from shardc.passes.canonical.rewrite import Args, Emit, Result, dim, rewrite, shape
from shardc.runtime import ops

aten = torch.ops.aten


def _nll(emit: Emit, logits: fx.Node, target: fx.Node, ignore: int) -> fx.Node:
    v = value_of(logits)
    return emit.typed(Value(shape(target), v.dtype, v.requires_grad), ops.nll, logits, target, ignore)


def _class_dim(x: fx.Node) -> int:
    return 0 if len(shape(x)) == 1 else 1


def _hard(
    emit: Emit, per: fx.Node, target: fx.Node, weight: fx.Node | None, ignore: int
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return (weighted per-element losses, valid elements, each element's weight in the mean)."""
    valid = emit(aten.ne.Scalar, target, ignore)
    if weight is None:
        return per, valid, valid
    safe = emit(aten.masked_fill.Scalar, target, emit(aten.logical_not.default, valid), 0)
    w = emit(aten.mul.Tensor, emit(aten.index.Tensor, weight, [safe]), emit.cast(valid, value_of(weight).dtype))
    return emit(aten.mul.Tensor, per, w), valid, w


def _mean(emit: Emit, per: fx.Node, weights: fx.Node, reduction: int) -> fx.Node:
    if reduction != 1:
        return emit.reduce(per, reduction)
    return emit(aten.div.Tensor, emit(aten.sum.default, per), emit(aten.sum.default, weights))


@rewrite("cross_entropy_loss")
def cross_entropy(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite cross-entropy. For class indices see the module; weights scale both sums.

    Probabilities: -sum(t log_softmax(x)) is sum(t) logsumexp(x) - sum(t x). Label smoothing mixes in the same of equal
    probabilities. No other value is as large as the logits.
    """
    x, target, weight, smoothing = a.self, a.target, a.weight, a.label_smoothing
    d = _class_dim(x)
    classes = shape(x)[d]
    if value_of(target).dtype.is_floating_point:
        if smoothing:
            target = emit(aten.add.Tensor, emit(aten.mul.Tensor, target, 1 - smoothing), smoothing / classes)
        if weight is not None:
            target = emit(aten.mul.Tensor, target, _along(emit, weight, x, d))
        lse, total = emit(aten.logsumexp.default, x, [d]), emit(aten.sum.dim_IntList, target, [d])
        picked = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, x, target), [d])
        per = emit(aten.sub.Tensor, emit(aten.mul.Tensor, lse, total), picked)
        return emit.reduce(per, a.reduction)
    per, valid, weights = _hard(emit, _nll(emit, x, target, a.ignore_index), target, weight, a.ignore_index)
    if smoothing:
        lse, total = emit(aten.logsumexp.default, x, [d]), x
        if weight is None:
            lse = emit(aten.mul.Tensor, lse, classes)
        else:
            lse = emit(aten.mul.Tensor, lse, emit(aten.sum.default, weight))
            total = emit(aten.mul.Tensor, x, _along(emit, weight, x, d))
        smooth = emit(aten.sub.Tensor, lse, emit(aten.sum.dim_IntList, total, [d]))
        smooth = emit(aten.masked_fill.Scalar, smooth, emit(aten.logical_not.default, valid), 0.0)
        per = emit(
            aten.add.Tensor,
            emit(aten.mul.Tensor, per, 1 - smoothing),
            emit(aten.mul.Tensor, smooth, smoothing / classes),
        )
    return _mean(emit, per, weights, a.reduction)


def _along(emit: Emit, weight: fx.Node, x: fx.Node, d: int) -> fx.Node:
    return emit.reshape(weight, [s if i == d else 1 for i, s in enumerate(shape(x))])


@rewrite("nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward")
def nll_loss(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite nll_loss: of log_softmax as cross-entropy of the logits, else by gathering targets' entries."""
    x, target = a.self, a.target
    d = _class_dim(x)
    if x.target is aten.log_softmax.int and dim(x.args[1], len(shape(x))) == d:
        per = _nll(emit, x.args[0], target, a.ignore_index)
    else:
        ignored = emit(aten.eq.Scalar, target, a.ignore_index)
        safe = emit(aten.unsqueeze.default, emit(aten.masked_fill.Scalar, target, ignored, 0), d)
        picked = emit.reshape(emit(aten.gather.default, x, d, safe), shape(target))
        per = emit(aten.masked_fill.Scalar, emit(aten.neg.default, picked), ignored, 0.0)
    per, _valid, weights = _hard(emit, per, target, a.weight, a.ignore_index)
    result = _mean(emit, per, weights, a.reduction)
    return (result, None) if a.op_name.endswith("forward") else result


@rewrite("mse_loss")
def mse_loss(emit: Emit, a: Args, out: Value) -> Result:
    difference = emit(aten.sub.Tensor, a.self, a.target)
    return emit.reduce(emit(aten.mul.Tensor, difference, difference), a.reduction)


@rewrite("l1_loss")
def l1_loss(emit: Emit, a: Args, out: Value) -> Result:
    return emit.reduce(emit(aten.abs.default, emit(aten.sub.Tensor, a.self, a.target)), a.reduction)


@rewrite("_linear_cross_entropy_batch_chunked _linear_cross_entropy_batch_chunked_no_reduction")
def linear_cross_entropy(emit: Emit, a: Args, out: Value | tuple[Value | None, ...]) -> Result:
    """Rewrite as linear, then cross_entropy.

    torch's op takes chunks of the batch only to save memory, and returns gradients as further results.
    """
    logits = emit(aten.linear.default, a.input, a.linear_weight, a.linear_bias)
    per, _valid, weights = _hard(emit, _nll(emit, logits, a.target, a.ignore_index), a.target, a.weight, a.ignore_index)
    result = _mean(emit, per, weights, {"none": 0, "mean": 1, "sum": 2}[a.get("reduction", "none")])
    return result if isinstance(out, Value) else (result, *[None] * (len(out) - 1))


@rewrite(
    "smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div soft_margin_loss "
    "multilabel_margin_loss"
)
def elementwise(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite as the op per element (or row), then its weight (a factor), then the reduction."""
    arguments, overrides = a.op._schema.arguments, {"reduction": 0, "weight": None}
    positional = [overrides.get(s.name, a[s.name]) for s in arguments if not s.kwarg_only]
    keywords = {s.name: a[s.name] for s in arguments if s.kwarg_only}
    per = emit(a.op, *positional, **keywords)
    if a.get("weight") is not None:
        per = emit(aten.mul.Tensor, per, a.weight)
    return emit.reduce(per, a.reduction)
