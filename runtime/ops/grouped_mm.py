"""Grouped products: rows that are sorted by expert, each times its expert's matrix.

    rows    f[n, a]                 those of expert 0 first
    weight  f[e, b, a]              transposed: f[e, a, b]
    sizes   rows of each expert, in order; their sum is n

On a GPU that has torch's kernel for it (torch.nn.functional.grouped_mm: bfloat16, rows of whole 16 bytes) a product of
all experts is one call; elsewhere one product an expert, into its place in the result, which on a CPU is as fast. Both
are differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardc.runtime.ops.host_copy import to_device
from shardc.torch_private import FakeTensor

#: What the kernel asks of the memory that a row begins at, in bytes.
ALIGNED = 16


def grouped(rows: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], transposed: bool) -> Tensor:
    """f[n, b]: each row times the matrix of its expert, plus its bias f[e, b]."""
    rows = rows.to(weight.dtype)
    how = _AtOnce if has_kernel(weight) and rows.shape[0] else _Each
    result: Tensor = how.apply(rows, weight, bias, tuple(sizes), transposed)  # type: ignore[no-untyped-call]
    return result


def has_kernel(weight: Tensor) -> bool:
    """Does torch's grouped product take matrices of this kind, in forward and in backward?"""
    if weight.device.type != "cuda" or isinstance(weight, FakeTensor) or weight.dtype is not torch.bfloat16:
        return False
    whole = all(size * weight.dtype.itemsize % ALIGNED == 0 for size in weight.shape[1:])
    whole = whole and weight.data_ptr() % ALIGNED == 0
    return whole and hasattr(F, "grouped_mm") and torch.cuda.get_device_capability(weight.device) >= (8, 0)


class _Each(Function):
    """One product an expert."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, sizes: tuple[int, ...], transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.how = sizes, transposed, bias is not None
        out = rows.new_empty(rows.shape[0], weight.shape[2 if transposed else 1])
        for e, part, into in _groups(sizes, rows, out):
            matrix = weight[e] if transposed else weight[e].t()
            if bias is None:
                torch.mm(part, matrix, out=into)
            else:
                torch.addmm(bias[e], part, matrix, out=into)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        sizes, transposed, biased = ctx.how
        of_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if ctx.needs_input_grad[1] else None
        of_bias = g.new_empty(weight.shape[0], g.shape[1]) if biased and ctx.needs_input_grad[2] else None
        for e, part, grad in _groups(sizes, rows, g):
            if of_weight is not None:
                torch.mm(
                    *((part.t(), grad) if transposed else (grad.t(), part)), out=of_weight[e]
                )  # without rows: zeros
            if of_bias is not None:
                torch.sum(grad, 0, out=of_bias[e])
        if of_rows is not None:
            for e, into, grad in _groups(sizes, of_rows, g):
                torch.mm(grad, weight[e].t() if transposed else weight[e], out=into)
        return of_rows, of_weight, of_bias, None, None


def _groups(sizes: Sequence[int], *tensors: Tensor) -> list[tuple[Any, ...]]:
    """(expert, its rows of each tensor)."""
    return [
        (e, *parts) for e, parts in enumerate(zip(*(x.split_with_sizes(list(sizes)) for x in tensors), strict=True))
    ]


class _AtOnce(Function):
    """All experts in one call of torch's."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, sizes: tuple[int, ...], transposed: bool
    ) -> Tensor:
        counts = to_device(torch.tensor(sizes), rows.device)
        ends = counts.cumsum(0).to(torch.int32)
        rows = rows.contiguous()
        ctx.save_for_backward(rows, weight, counts, ends)
        ctx.how = sizes, transposed, bias is not None
        out = F.grouped_mm(rows, weight if transposed else weight.mT, offs=ends)
        return out if bias is None else out + bias.repeat_interleave(counts, 0, output_size=rows.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        rows, weight, counts, ends = ctx.saved_tensors
        sizes, transposed, biased = ctx.how
        g = g.contiguous()
        of_rows = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_rows = F.grouped_mm(g, weight.mT if transposed else weight, offs=ends)
        if ctx.needs_input_grad[1]:
            of_weight = F.grouped_mm(*((rows.t(), g) if transposed else (g.t(), rows)), offs=ends)
            for e in (e for e, n in enumerate(sizes) if not n):
                of_weight[e].zero_()  # the kernel says nothing of groups without rows
        if biased and ctx.needs_input_grad[2]:
            expert = torch.arange(len(sizes), device=g.device).repeat_interleave(counts, output_size=g.shape[0])
            of_bias = (
                g.new_zeros(len(sizes), g.shape[1], dtype=torch.float32).index_add_(0, expert, g.float()).to(g.dtype)
            )
        return of_rows, of_weight, of_bias, None, None
