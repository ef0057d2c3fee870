"""Quantised weights as torchao writes them: tensors that consist of tensors. In any dtype, so that results can be
compared in float64, and in the three ways in which torchao's go into a product.

    rows      int8 numbers and a scale a row, which multiplies the result (Int8Tensor)
    groups    int8 numbers and a scale for every few: the weight is put together first (IntxUnpackedToInt8Tensor)
    packed    two numbers in a byte, all in a row, by a Function of its own (NF4Tensor)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

GROUP = 4


class Quantized(Tensor):
    """kind: of the above; numbers and scale are what it consists of."""

    kind: str
    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor, kind: str, shape: tuple[int, ...]) -> Quantized:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=scale.device)  # type: ignore[attr-defined]
        made.numbers, made.scale, made.kind = numbers, scale, kind
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], (self.kind, tuple(self.shape))

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Quantized:
        return cls(inner["numbers"], inner["scale"], *context)

    def whole(self) -> Tensor:
        rows, columns = self.shape
        numbers = self.numbers
        if self.kind == "packed":
            numbers = torch.stack([numbers // 16, numbers % 16], -1).to(self.scale.dtype) - 8
        each = numbers.reshape(rows, -1, GROUP).to(self.scale.dtype) * self.scale.reshape(rows, -1, 1)
        return each.reshape(rows, columns)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear:
            return _product(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            x = args[0]
            return cls(x.numbers, x.scale, x.kind, tuple(x.shape))
        raise NotImplementedError(f"{func} of a quantised weight")


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Quantized) -> Tensor:
        ctx.save_for_backward(weight)
        return linear(x, weight.whole())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return g @ weight.whole(), None


def _product(x: Tensor, weight: Quantized, bias: Tensor | None = None) -> Tensor:
    if weight.kind == "rows":
        y = (x.reshape(-1, x.shape[-1]) @ weight.numbers.t().to(x.dtype)) * weight.scale.flatten()
        y = y.reshape(*x.shape[:-1], -1)
    else:
        y = linear(x, weight.whole()) if weight.kind == "groups" else _Packed.apply(x, weight)
    return y if bias is None else y + bias


def quantized(w: Tensor, kind: str) -> nn.Parameter:
    """The weight, of [rows, columns], in one of these ways."""
    w = w.detach()
    if kind == "rows":
        scale = w.abs().amax(1, keepdim=True) / 127
        numbers = (w / scale).round().to(torch.int8)
    else:
        blocks = w.reshape(w.shape[0], -1, GROUP)
        scale = blocks.abs().amax(2) / 7
        numbers = (blocks / scale.unsqueeze(-1)).round().to(torch.int8).reshape(w.shape)
    if kind == "packed":
        pairs = (numbers + 8).to(torch.uint8).reshape(-1, 2)
        numbers, scale = pairs[:, 0] * 16 + pairs[:, 1], scale.flatten()
    return nn.Parameter(Quantized(numbers, scale, kind, tuple(w.shape)), requires_grad=False)
