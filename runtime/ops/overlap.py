"""Backward of a column-parallel product: the gradient of its input is summed over ranks while the gradient of its
weight is computed (Shoeybi et al. 2019, "Megatron-LM").

    x_each = ops.sum_grad(x, mesh, ('tp',), tag='x_each', overlap=True)      Wait, then Begin
    y = aten.linear.default(x_each, w, b)                                    OfWeights, then OfData

Each line is two nodes of autograd. Backward goes through them like this:

    OfData       g -> the gradient of x_each, for Begin; g itself for OfWeights. Where x_each was not kept, but is
                 gathered once more (shardc.runtime.step.recompute: `ahead`), that begins first
    Begin        starts the sum of that gradient (all_reduce, or reduce_scatter after an all_gather in forward)
    OfWeights    g, x -> the gradients of w and b
    Wait         waits for the sum, which goes on from here

Of the nodes that are ready, autograd runs that of the greatest number, and numbers grow in forward. So `OfWeights` is
given a number between those of `Wait` and `Begin`: it runs after the sum has begun, however many products use x_each.
The same products are computed; where a kernel depends on strides, the last bits may differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardc.runtime.mesh.base import Work
from shardc.runtime.ops.fp8_products import Fp8, fp8_linear
from shardc.torch_private import set_sequence_number

aten = torch.ops.aten

#: Products of an input and a weight: op -> the places of (input, weight, bias) among its arguments. The weight is
#: [out, in] for linear, [in, out] else.
PRODUCTS: dict[Any, tuple[int, int, int]] = {
    aten.linear.default: (0, 1, 2),
    aten.addmm.default: (1, 2, 0),
    aten.mm.default: (0, 1, -1),
    aten.matmul.default: (0, 1, -1),
    fp8_linear: (0, 1, -1),
}


def factors(target: Any, args: Sequence[Any]) -> tuple[Any, Any, Any]:
    """(input, weight, bias or None) among a product's arguments."""
    x, weight, bias = PRODUCTS[target]
    return args[x], args[weight], args[bias] if 0 <= bias < len(args) else None


def multiplies(op: fx.Node, x: fx.Node) -> bool:
    """Is an op of a program a product with x as its input?"""
    return op.target in PRODUCTS and not op.kwargs and factors(op.target, op.args)[0] is x


def of_matrices(x: int, weight: int, bias: int | None) -> bool:
    """Is a product of factors with so many dims one of rows and a matrix, whose gradients are such products too?"""
    return x >= 2 and weight == 2 and bias in (None, 1)


#: Starts a sum of a gradient: -> (where the sum will be, and when).
Start = Callable[[Tensor], tuple[Tensor, Work]]


class _Sum:
    """One sum under way. number: of `Begin` in autograd."""

    def __init__(self, start: Start) -> None:
        self.start, self.work, self.number = start, Work(), 0


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: _Sum) -> Tensor:
        ctx.pending = pending
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        ctx.pending.work.wait()
        return g, None


class Begin(Function):
    """move: what forward does with x, if anything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Callable[[Tensor], Tensor], pending: _Sum) -> Tensor:
        ctx.pending = pending
        result = move(x)
        return x.view_as(x) if result is x else result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        total, ctx.pending.work = ctx.pending.start(g)
        return total, None, None


def begun(x: Tensor, move: Callable[[Tensor], Tensor], start: Start) -> Tensor:
    """The result of a conversion whose backward starts a sum, and waits for it where the gradient of x is used."""
    pending = _Sum(start)
    waited: Tensor = _Wait.apply(x, pending)  # type: ignore[no-untyped-call]
    result: Tensor = Begin.apply(waited, move, pending)  # type: ignore[no-untyped-call]
    assert waited.grad_fn is not None
    assert result.grad_fn is not None
    pending.number = result.grad_fn._sequence_nr()
    set_sequence_number(waited.grad_fn, max(pending.number - 2, 0))
    return result


@dataclass(frozen=True)
class _Plain:
    """The gradients of a product in one dtype: of complex factors with the conjugate of the other factor, as torch
    defines them. last: the weight is [out, in].
    """

    last: bool

    def of_data(self, g: Tensor, weight: Tensor) -> Tensor:
        rows = g.reshape(-1, g.shape[-1])
        x = rows.mm((weight if self.last else weight.t()).conj())
        return x.view(*g.shape[:-1], x.shape[-1])

    def of_weight(self, g: Tensor, x: Tensor) -> Tensor:
        rows, g = x.reshape(-1, x.shape[-1]).conj(), g.reshape(-1, g.shape[-1])
        return g.t().mm(rows) if self.last else rows.t().mm(g)


def _by(target: Any, args: Sequence[Any]) -> tuple[_Plain | Fp8, Tensor, tuple[Tensor, ...]]:
    """(how a product's gradients are computed, what its weight's takes of x, what its input's takes of the weight)."""
    x, weight, _ = factors(target, args)
    if target is not fp8_linear:
        return _Plain(target is aten.linear.default), x, (weight,)
    _, _, amax, recipe, *rest = args
    kept = rest[1] if len(rest) > 1 and rest[1] is not None else x
    return Fp8(recipe, bool(rest and rest[0]), x.shape), kept, (weight, amax)


class _OfWeights(Function):
    """The way of the gradient g of a product to its weight and bias. The result stands for the product's: it has its
    shape, and no memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, like: Tensor, by: _Plain | Fp8, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.by, ctx.bias = by, bias is not None
        return like.new_empty(()).expand(like.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        weight = ctx.by.of_weight(g, x) if ctx.needs_input_grad[3] else None
        bias = g.reshape(-1, g.shape[-1]).sum(0) if ctx.bias and ctx.needs_input_grad[4] else None
        return None, None, None, weight, bias


class _OfData(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, by: _Plain | Fp8, x: Tensor, path: Tensor, *weight: Tensor) -> Tensor:
        ctx.save_for_backward(*weight)
        ctx.by, ctx.ahead = by, []
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        for begin in (ref() for ref in ctx.ahead):
            if begin is not None:
                begin()
        weight = ctx.saved_tensors
        return None, None, ctx.by.of_data(g, *weight), g, *[None] * len(weight)


def product(target: Any, *args: Any) -> Tensor:
    """A product whose input's gradient is to be summed over ranks: as the op itself, but for the order of backward."""
    x, weight, bias = factors(target, args)
    begin = x.grad_fn
    if (
        not torch.is_grad_enabled()
        or getattr(begin, "pending", None) is None
        or not (weight.requires_grad or (bias is not None and bias.requires_grad))
        or not of_matrices(x.dim(), weight.dim(), None if bias is None else bias.dim())
    ):
        result: Tensor = target(*args)
        return result
    by, rows, matrix = _by(target, args)
    with torch.no_grad():
        y = target(*args)
    path: Tensor = _OfWeights.apply(rows.detach(), y, by, weight, bias)  # type: ignore[no-untyped-call]
    assert path.grad_fn is not None
    set_sequence_number(path.grad_fn, max(begin.pending.number - 1, 0))
    result = _OfData.apply(y, by, x, path, *(m.detach() for m in matrix))  # type: ignore[no-untyped-call]
    return result


def product_of_8_bits(*args: Any) -> Tensor:
    """`fp8_linear`, alike."""
    return product(fp8_linear, *args)


def beside(target: Any, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """What generated code calls in the place of a product whose input's gradient is to be summed."""
    return (product_of_8_bits, tuple(args)) if target is fp8_linear else (product, (target, *args))
