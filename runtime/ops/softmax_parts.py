"""Compute a softmax's normaliser over split dims: the steps of one rank between two sums over ranks.

    top = all_reduce_max(largest(x))          sums = all_reduce(sum_exp(x, top))          lse = log_sum(sums, top)

All of it is in float32 at least, as in torch's kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.runtime.ops.with_backward import with_backward


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of normalisers."""
    return torch.promote_types(dtype, torch.float32)


def largest(x: Tensor, dims: list[int]) -> Tensor:
    """Return the largest element along `dims`, which are kept; detached."""
    return x.detach().amax(dims, keepdim=True).to(wide(x.dtype))


def sum_exp(x: Tensor, top: Tensor, dims: list[int]) -> Tensor:
    """Compute this rank's summand of a normaliser: the sum of exp(x - top) along `dims`, which are kept.

    top: the largest elements, of all ranks. Saves one buffer of the size of x, in float32 at least. Backward works on
    it in place: it runs once.
    """

    def forward(x: Tensor, top: Tensor) -> tuple[Tensor, tuple[Tensor, torch.dtype]]:
        exps = (x - _finite(top)).exp_()
        return exps.sum(dims, keepdim=True), (exps, x.dtype)

    sums: Tensor = with_backward(forward, lambda needs, g, exps, dtype: (exps.mul_(g).to(dtype),), x, top)
    return sums


def log_sum(sums: Tensor, top: Tensor) -> Tensor:
    """Return the log of the sum of exponentials, from the normaliser of `sum_exp`."""
    return sums.log() + _finite(top)


def _finite(top: Tensor) -> Tensor:
    """Replace infinities by 0, as subtracting them would produce nan."""
    return top.masked_fill(top.abs() == torch.inf, 0.0)
