"""Rewrite variances, norms and truth tests (all, any) over the leading dim as sums: they can be split.

Others stay one op.

std(x, [0], correction=1)    ->    sqrt(sum((x - mean(x, [0]))²) / (n - 1))     with a gradient of zero at zero
linalg_vector_norm(x, 2)     ->    sqrt(sum(x * x))                             with the same
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import value_of
from shardc.ir.metadata import Value
from shardc.passes.canonical.rewrite import Args, Emit, Result, dim, rewrite, shape

aten = torch.ops.aten
_WHOLE = {"var": aten.var, "std": aten.std, "var_mean": aten.var_mean, "std_mean": aten.std_mean}


def _reduced(x: fx.Node, a: Args) -> tuple[list[int], bool]:
    """Return the dims that an op reduces (no dims: all), and whether the result keeps them."""
    ndim, dims = len(shape(x)), a.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    return sorted({dim(d, ndim) for d in dims or range(ndim)}), bool(a.get("keepdim", False))


@rewrite("var std var_mean std_mean")
def moments(emit: Emit, a: Args, out: Any) -> Result:
    """Rewrite every overload as `.correction`, or as means if dim 0 is among the dims (no dims: all)."""
    x: fx.Node = a.self
    gone, keepdim = _reduced(x, a)
    correction = a.get("correction", 1 if a.get("unbiased", True) else 0)
    correction = 1 if correction is None else correction
    both = a.op_name.endswith("_mean")
    if 0 not in gone or value_of(x).dtype.is_complex:
        if both:
            var = emit(_WHOLE[a.op_name[:3]].correction, x, gone, correction=correction, keepdim=keepdim)
            return (var, emit(aten.mean.dim, x, gone, keepdim))
        return emit(_WHOLE[a.op_name].correction, x, gone, correction=correction, keepdim=keepdim)
    n = math.prod(shape(x)[d] for d in gone)
    mean = emit(aten.mean.dim, x, gone, True)
    centred = emit(aten.sub.Tensor, x, mean)
    squares = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, centred, centred), gone, keepdim)
    result = emit(aten.div.Tensor, squares, max(n - correction, 0))
    if a.op_name.startswith("std"):
        result = _root(emit, result)
    return (result, emit(aten.mean.dim, x, gone, keepdim)) if both else result


@rewrite("linalg_vector_norm norm frobenius_norm")
def vector_norm(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite Euclidean and absolute norms that reduce the leading dim."""
    x: fx.Node = a.self
    order = a.get("ord", a.get("p", 2))
    order = 2 if order is None else order
    gone, keepdim = _reduced(x, a)
    if 0 not in gone or order not in (1, 2) or value_of(x).dtype.is_complex:
        return emit(
            aten.linalg_vector_norm.default,
            x if value_of(x).dtype.is_complex else emit.cast(x, out.dtype),
            order,
            gone,
            keepdim,
        )
    x = emit.cast(x, out.dtype)
    if order == 1:
        return emit(aten.sum.dim_IntList, emit(aten.abs.default, x), gone, keepdim)
    return _root(emit, emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, x, x), gone, keepdim))


@rewrite("linalg_matrix_norm")
def matrix_norm(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite the Frobenius norm as that of a vector of all elements."""
    if a.ord == "fro":
        return vector_norm(emit, Args(aten.linalg_vector_norm.default, (a.self, 2, a.dim, a.keepdim), {}), out)
    return emit(a.op, *a.args, **a.kwargs)


def _root(emit: Emit, squares: fx.Node) -> fx.Node:
    """Return the root of a sum of squares, with a gradient of zero at zero, as torch's norms have."""
    zero = emit(aten.eq.Scalar, squares, 0)
    root = emit(aten.sqrt.default, emit(aten.masked_fill.Scalar, squares, zero, 1))
    return emit(aten.masked_fill.Scalar, root, zero, 0)


@rewrite("all any")
def truth(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite over the leading dim as counts, which add up: none is false, or some are true."""
    x: fx.Node = a.self
    gone, keepdim = _reduced(x, a)
    if 0 not in gone or out.dtype != torch.bool:
        return emit(a.op, *a.named.values())
    if a.op_name == "all":
        x = emit(aten.logical_not.default, x)
    elif value_of(x).dtype != torch.bool:
        x = emit(aten.ne.Scalar, x, 0)
    count = emit(aten.sum.dim_IntList, x, gone, keepdim)
    return emit(aten.eq.Scalar if a.op_name == "all" else aten.ne.Scalar, count, 0)
