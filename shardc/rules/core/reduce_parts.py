"""Reduce over a dim that stays split: each rank reduces its part, then all reduce the results again.

    norm(x), prod(x)    the norm of the ranks' norms, the product of their products
    amax(x), max(x)     the largest of their largest; its gradient goes to all equal elements, in equal parts

Both are extra strategies; in the op's notation a reduced dim is whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.ir.metadata import Value
from shardc.ir.placement import PARTIAL, REPLICATE, Layout, Partial, Placement, Shard
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import LocalCall
from shardc.rules.core.strategy import Strategy, splits_of
from shardc.runtime import ops

aten = torch.ops.aten
#: The kind of these strategies. Microbatches cannot communicate as ranks do.
PARTS = "reduced parts"
_LARGEST = {aten.amax.default, aten.max.default}
_SMALLEST = {aten.amin.default, aten.min.default}
_EXTREMA = {*_LARGEST, *_SMALLEST}
_INTEGERS = (torch.int64, torch.int32)


def per_row(call: LocalCall, dims: Collection[int], axes: Sequence[str], dtype: torch.dtype) -> Callable[..., Value]:
    """Return a function that types one number for each row of x over `dims`, from its placement on these axes."""
    shape = tuple(1 if d in dims else s for d, s in enumerate(call.call.operands[0].shape))
    kept = {a: p for a, p in call.inputs[0].items if not isinstance(p, Shard) or p.dim not in dims}

    def value(p: Placement, *, grad: bool = False) -> Value:
        return Value(shape, dtype, grad, Layout.of(kept | dict.fromkeys(axes, p), call.mesh))

    return value


def squeezed(call: LocalCall, x: fx.Node, value: Value, dims: Sequence[int]) -> fx.Node:
    """Emit x, of this type, without dims of size one if the result lacks them."""
    shape = call.call.results[0].shape
    if shape == value.shape:
        return x

    def moved(p: Placement) -> Placement:
        return replace(p, dim=p.dim - sum(d < p.dim for d in dims)) if isinstance(p, Shard) else p

    layout = Layout(tuple((a, moved(p)) for a, p in value.layout.items))
    return call.emit(aten.squeeze.dims, (x, dims), {}, value=replace(value, shape=shape, layout=layout))


def behind(layout: Layout, more: int) -> Layout:
    """Return a layout behind so many more leading dims."""
    return Layout(tuple((a, replace(p, dim=p.dim + more) if isinstance(p, Shard) else p) for a, p in layout.items))


def _order(call: Call) -> float:
    """Return the order of a norm; 1 for other ops."""
    return float(call.arg("ord")) if call.target is aten.linalg_vector_norm.default else 1.0


def _is_extremum(call: Call) -> bool:
    return call.target in _EXTREMA or math.isinf(_order(call))


def by_parts(call: Call, n: int, available: Sequence[frozenset[Placement]]) -> Iterable[Strategy]:
    x = call.operands[0]
    floats = x.dtype.is_floating_point
    if _order(call) == 0 or not (floats or (x.dtype.is_complex and not _is_extremum(call)) or x.dtype in _INTEGERS):
        return
    for p in splits_of(x, call.dims(), n, available[0]):
        if not p.mirrored and (floats or not p.padding):
            yield Strategy(PARTS, (p,), (REPLICATE,))


def local_parts(call: LocalCall) -> fx.Node:
    if not (split := call.axes(PARTS)):
        return call.same()
    return _extremum(call, split) if _is_extremum(call.call) else _reduced_again(call, split)


def _filled(call: LocalCall, x: fx.Node, fill: float) -> fx.Node:
    """Fill the padding of reduced dims with a neutral number."""
    for d in sorted(call.call.dims()):
        x = call.without_padding(x, 0, d, fill)
    return x


def _reduced_again(call: LocalCall, split: list[str]) -> fx.Node:
    """Sum every rank's result at its place among zeros [ranks, ...], then reduce along the first dims."""
    target, out = call.call.target, call.call.results[0]
    norm = target is aten.linalg_vector_norm.default
    neutral = 1.0 if not norm else 0.0 if _order(call.call) > 0 else math.inf
    first = call.same(self=_filled(call, call.args[0], neutral))
    ranks, kept = [call.mesh.size(a) for a in split], call.outputs[0]
    shifted = behind(kept, len(split))

    def value(placements: Sequence[Placement]) -> Value:
        layout = Layout.of(dict(shifted.items) | dict(zip(split, placements, strict=True)), call.mesh)
        return replace(out, shape=(*ranks, *out.shape), layout=layout)

    places: list[Placement] = [Shard(d) for d in range(len(split))]
    local = [1] * len(split) + list(kept.local_shape(out.shape, call.mesh))
    parts = call.emit(aten.reshape.default, (first, local), {}, value=value(places))
    for d, axis in enumerate(split):
        places[d] = PARTIAL
        parts = call.emit(ops.unshard_partial, (parts, call.mesh_node, axis, d, 1), {"tag": ""}, value=value(places))
    axes, whole = call.mesh.merge(split), value([REPLICATE] * len(split))
    parts = call.all_reduce(ops.all_reduce, parts, axes, whole, "results of ranks, reduced again", tag="")
    if norm:
        return call.emit(target, (parts, call.call.arg("ord"), list(range(len(split)))), {})
    if len(split) > 1:
        flat = [math.prod(ranks), *local[len(split) :]]
        value_of_flat = replace(out, shape=(math.prod(ranks), *out.shape), layout=shifted)
        parts = call.emit(aten.reshape.default, (parts, flat), {}, value=value_of_flat)
    return call.emit(aten.prod.dim_int, (parts, 0), {})


def _extremum(call: LocalCall, split: list[str]) -> fx.Node:
    """Find the largest element of all ranks, count its ties, and send gradients to these.

    The smallest is the largest of the negated numbers.
    """
    x, out, dims = call.call.operands[0], call.call.results[0], sorted(call.call.dims())
    negative = call.call.target in _SMALLEST or _order(call.call) == -math.inf
    grad, axes = out.requires_grad, call.mesh.merge(split)
    value, typed = per_row(call, dims, split, x.dtype), replace(x, layout=call.inputs[0])

    def over_ranks(op: Any, y: fx.Node, why: str) -> fx.Node:
        return call.all_reduce(op, y, axes, value(REPLICATE), f"{why} over a split dim", tag="")

    terms = call.args[0]
    if math.isinf(_order(call.call)):
        terms = call.emit(aten.abs.default, (terms,), {}, value=typed)
    if negative:
        terms = call.emit(aten.neg.default, (terms,), {}, value=typed)
    terms = _filled(call, terms, -math.inf)
    top = call.emit(ops.top, (terms, dims), {}, value=value(Partial("max")))
    top = over_ranks(ops.all_reduce_max, top, "the largest element")
    if grad:
        ties = call.emit(ops.ties, (terms, top, dims), {}, value=value(PARTIAL))
        ties = over_ranks(ops.all_reduce, ties, "how many elements are the largest")
        top = call.emit(ops.extremum, (terms, top, ties), {}, value=value(REPLICATE, grad=True))
    if negative:
        top = call.emit(aten.neg.default, (top,), {}, value=value(REPLICATE, grad=grad))
    return squeezed(call, top, value(REPLICATE, grad=grad), dims)
