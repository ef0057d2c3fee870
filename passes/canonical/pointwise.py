"""Rewrite elementwise ops and softmax: one name each, no neutral elements, explicit dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.ir.graph import value_of
from shardc.ir.metadata import Value
from shardc.passes.canonical.rewrite import Args, Emit, Result, dim, rewrite, shape

aten = torch.ops.aten
_BITWISE = {"__and__": aten.bitwise_and, "__or__": aten.bitwise_or, "__xor__": aten.bitwise_xor}
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}


@rewrite("__and__ __or__ __xor__")
def bitwise(emit: Emit, a: Args, out: Value) -> Result:
    op = getattr(_BITWISE[a.op_name], a.op._overloadname)
    return emit(op, a.self, a.other)


@rewrite("min max")
def extremum(emit: Emit, a: Args, out: Any) -> Result:
    """Rewrite `min(x, y)` of two tensors as `minimum(x, y)`."""
    if a.op._overloadname == "other":
        return emit(aten.minimum.default if a.op_name == "min" else aten.maximum.default, a.self, a.other)
    return emit(a.op, *a.named.values())


@rewrite("rsub")
def rsub(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite `1 - x` as `add(neg(x), 1)`: the tensor comes first in every op."""
    x = a.self if a.alpha == 1 else emit(aten.mul.Tensor, a.self, a.alpha)
    if isinstance(a.other, fx.Node):
        return emit(aten.sub.Tensor, a.other, x)
    return emit(aten.add.Tensor, emit(aten.neg.default, x), a.other)


@rewrite("add sub mul div")
def arithmetic(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite `x + 0` and `x * 1.0` as x; `add(x, y, alpha=2)` multiplies first."""
    x, other = a.self, a.other
    if a.get("rounding_mode") is not None:
        return emit(a.op, x, other, rounding_mode=a.rounding_mode)
    if not isinstance(other, fx.Node):
        other = other * a.get("alpha", 1)
        if other == _NEUTRAL[a.op_name] and value_of(x).dtype == out.dtype:
            return x  # type: ignore[no-any-return]
    elif a.get("alpha", 1) != 1:
        other = emit(aten.mul.Tensor, other, a.alpha)
    return emit(getattr(getattr(aten, a.op_name), "Tensor"), x, other)  # noqa: B009


@rewrite("softmax _softmax log_softmax _log_softmax special_softmax special_log_softmax")
def softmax(emit: Emit, a: Args, out: Value) -> Result:
    x = emit.cast(a.first, out.dtype)
    op = aten.log_softmax.int if "log_softmax" in a.op_name else aten.softmax.int
    return emit(op, x, dim(a.dim, max(1, len(shape(x)))))


@rewrite("sum mean cumsum prod")
def reduction(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite `sum(x, dtype=torch.float32)` to cast first. Integers add in int64 unless a dtype is set."""
    dtype: torch.dtype | None = a.get("dtype")
    x = emit.cast(a.first, dtype)
    rest = [v for k, v in a.named.items() if k not in ("self", "dtype")]
    if dtype is not None and not dtype.is_floating_point and dtype != torch.int64:
        return emit(a.op, x, *rest, dtype=dtype)
    return emit(a.op, x, *rest)
