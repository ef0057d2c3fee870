"""Conversions between placements under autograd, for tests of ops that are composed of them.

A program differentiates its graphs before it runs (shardc.passes.joint): ops are functions, and their transposes are
too. Here each conversion is an autograd.Function of the two.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from shardc.ir.conversions import BY_OP
from shardc.runtime import ops as plain


class _Converted(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        ctx.op, ctx.args, ctx.kwargs = op, args, {k: v for k, v in kwargs.items() if k == "tag"}
        result: Tensor = getattr(plain, op)(x, *args, **kwargs)
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return plain.transpose(ctx.op, g, *ctx.args, **ctx.kwargs), None, None, None


class _Ops:
    """Ops by name."""

    def __getattr__(self, name: str) -> Any:
        if name not in BY_OP:
            return getattr(plain, name)
        return lambda x, *args, **kwargs: _Converted.apply(x, name, args, kwargs)  # type: ignore[no-untyped-call]


ops: Any = _Ops()
