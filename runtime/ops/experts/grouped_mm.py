"""Compute grouped products: rows that are sorted by expert, each times its expert's matrix.

    rows    f[n, a]                 those of expert 0 first
    weight  f[e, b, a]              transposed: f[e, a, b]
    sizes   rows of each expert, in order; their sum is n

On a GPU with torch's kernel (torch.nn.functional.grouped_mm: bfloat16, rows of whole 16 bytes) the product of all
experts is one call; elsewhere one product an expert, into its place in the result, which on a CPU is as fast. The
product and its three gradients are functions; products.py combines them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardc.runtime.ops.host_copy import to_device
from shardc.torch_private import FakeTensor, stands_for_gpu

#: The alignment that the kernel requires of each row, in bytes.
ALIGNED = 16


@dataclass(frozen=True)
class Groups:
    """The number of rows of each expert, in order. device: of the rows."""

    sizes: tuple[int, ...]
    device: torch.device

    @cached_property
    def counts(self) -> Tensor:
        """The rows of each expert, i64[e], on the device."""
        return to_device(torch.tensor(self.sizes), self.device)

    @cached_property
    def ends(self) -> Tensor:
        """The end of each expert's rows, i32[e]."""
        return self.counts.cumsum(0).to(torch.int32)

    def of(self, *tensors: Tensor) -> list[tuple[Any, ...]]:
        """Return (expert, its rows of each tensor) for each expert."""
        parts = zip(*(x.split_with_sizes(list(self.sizes)) for x in tensors), strict=True)
        return [(e, *each) for e, each in enumerate(parts)]

    def rows_of(self, each: Tensor) -> Tensor:
        """Return [n, ...]: for every row its expert's entry of [e, ...]."""
        return each.repeat_interleave(self.counts, 0, output_size=sum(self.sizes))


def has_kernel(weight: Tensor) -> bool:
    """Return whether torch's grouped product supports such matrices, in forward and in backward."""
    if weight.dtype is not torch.bfloat16:
        return False
    whole = all(size * weight.dtype.itemsize % ALIGNED == 0 for size in weight.shape[1:])
    if isinstance(weight, FakeTensor):
        return whole and stands_for_gpu(weight)
    if weight.device.type != "cuda" or weight.data_ptr() % ALIGNED:
        return False
    return whole and hasattr(F, "grouped_mm") and torch.cuda.get_device_capability(weight.device) >= (8, 0)


def product(rows: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, transposed: bool) -> Tensor:
    """Return the grouped product f[n, b]. All are of one dtype."""
    if has_kernel(weight) and rows.shape[0]:
        out = F.grouped_mm(rows.contiguous(), weight if transposed else weight.mT, offs=groups.ends)
        return out if bias is None else out + groups.rows_of(bias)
    out = rows.new_empty(rows.shape[0], weight.shape[2 if transposed else 1])
    for e, part, into in groups.of(rows, out):
        matrix = weight[e] if transposed else weight[e].t()
        if bias is None:
            torch.mm(part, matrix, out=into)
        else:
            torch.addmm(bias[e], part, matrix, out=into)
    return out


def grad_of_rows(g: Tensor, weight: Tensor, groups: Groups, transposed: bool) -> Tensor:
    """Return the gradient of the rows, f[n, a], from the gradient g f[n, b] of the product."""
    if has_kernel(weight) and g.shape[0]:
        return F.grouped_mm(g.contiguous(), weight.mT if transposed else weight, offs=groups.ends)
    of_rows = g.new_empty(g.shape[0], weight.shape[1 if transposed else 2])
    for e, into, grad in groups.of(of_rows, g):
        torch.mm(grad, weight[e].t() if transposed else weight[e], out=into)
    return of_rows


def grad_of_weight(g: Tensor, rows: Tensor, weight: Tensor, groups: Groups, transposed: bool) -> Tensor:
    """Return the gradient of the weight; zeros for experts without rows."""
    if has_kernel(weight) and g.shape[0]:
        g, rows = g.contiguous(), rows.contiguous()
        of_weight = F.grouped_mm(*((rows.t(), g) if transposed else (g.t(), rows)), offs=groups.ends)
        for e in (e for e, n in enumerate(groups.sizes) if not n):
            of_weight[e].zero_()  # the kernel does not define groups without rows
        return of_weight
    of_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for e, part, grad in groups.of(rows, g):
        torch.mm(*((part.t(), grad) if transposed else (grad.t(), part)), out=of_weight[e])
    return of_weight


def grad_of_bias(g: Tensor, groups: Groups) -> Tensor:
    """Return f[e, b]: sums of each expert's rows, added up in float32 at least."""
    expert = groups.rows_of(torch.arange(len(groups.sizes), device=g.device))
    wide = g.new_zeros(len(groups.sizes), g.shape[1], dtype=torch.promote_types(g.dtype, torch.float32))
    return wide.index_add_(0, expert, g.to(wide.dtype)).to(g.dtype)
