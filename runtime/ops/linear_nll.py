"""Compute a linear layer and its cross entropy in chunks of rows, so that few logits exist at a time.

    for each chunk of rows:
        logits = linear(x[rows], weight, bias)           [rows, classes of this rank]
        normaliser[rows] = log(sum(exp(logits)))         over this rank's classes
        picked[rows] = the target's logit                0 where another rank has that class

Backward computes the logits of each chunk again, turns them into their gradient in place, and adds up the weight's
gradients over chunks, in float32 at least. So only the operands and one number a row are saved, and the product is
computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardc.runtime.ops.local_math import Digits, Mesh, check_range, fill_padding, locate
from shardc.runtime.ops.with_backward import with_backward


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, fill: Any) -> Tensor:
    logits = F.linear(x, weight, bias).to(dtype)
    return logits if fill is None else fill(logits)


#: Rows of a chunk, dtype of logits, function that fills padded classes.
_How = tuple[int, torch.dtype, Any]


def _stats(
    x: Tensor, weight: Tensor, bias: Tensor | None, local: Tensor, here: Tensor, how: _How
) -> tuple[Tensor, tuple[Any, ...]]:
    size, dtype, fill = how
    out = x.new_empty((2, x.shape[0]), dtype=dtype)
    for top in range(0, x.shape[0], size):
        rows = slice(top, top + size)
        logits = _logits(x[rows], weight, bias, dtype, fill)
        out[1, rows] = logits.gather(1, local[rows].unsqueeze(1)).squeeze(1).masked_fill_(~here[rows], 0)
        largest = logits.amax(1).clamp_min_(torch.finfo(dtype).min)  # a rank may have only padding: -inf
        out[0, rows] = logits.sub_(largest.unsqueeze(1)).exp_().sum(1).log_().add_(largest)
        del logits
    return out, (x, weight, bias, local, here, out[0].clone(), how)


def _stats_backward(
    needs: Sequence[bool],
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    local: Tensor,
    here: Tensor,
    normaliser: Tensor,
    how: _How,
) -> tuple[Tensor | None, ...]:
    size, dtype, fill = how
    normaliser = normaliser.clamp_min(torch.finfo(dtype).min)
    of_x = torch.empty_like(x) if needs[0] else None
    of_weight = torch.zeros_like(weight, dtype=_sums(weight)) if needs[1] else None
    of_bias = torch.zeros_like(bias, dtype=_sums(bias)) if needs[2] and bias is not None else None
    for top in range(0, x.shape[0], size):
        rows = slice(top, top + size)
        grad = _logits(x[rows], weight, bias, dtype, fill)
        grad.sub_(normaliser[rows].unsqueeze(1)).exp_().mul_(g[0, rows].unsqueeze(1))
        grad.scatter_add_(1, local[rows].unsqueeze(1), torch.where(here[rows], g[1, rows], 0).unsqueeze(1))
        grad = grad.to(x.dtype)
        if of_x is not None:
            of_x[rows] = grad @ weight
        if of_weight is not None:
            _add_product(of_weight, grad.t(), x[rows])
        if of_bias is not None:
            of_bias += grad.sum(0, dtype=of_bias.dtype)
        del grad
    of_weight = of_weight.to(weight.dtype) if of_weight is not None else None
    return of_x, of_weight, of_bias.to(bias.dtype) if of_bias is not None and bias is not None else None


def _sums(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b, which may be in a narrower dtype, to total."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def linear_nll(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    mesh: Mesh,
    digits: Digits,
    classes: int,
    ignore_index: int,
    chunks: int,
    dtype: torch.dtype,
    padding: tuple[Any, ...] = (),
) -> Tensor:
    """Return [2, n]: the normaliser (a log of a sum) over this rank's classes, and the target's logit or 0.

    It is 0 if another rank has that class or the target is ignored. x [n, d]; weight [c, d], bias [c]: this rank's of
    all `classes`, split by `digits` (see `locate`), () = all; target [n]: global class indices; dtype: of the logits
    after the product; chunks: number of chunks of rows. padding: `fill_padding`'s arguments after the mesh, where this
    rank's classes are padded.
    """
    check_range(target, classes, "target", ignore_index)
    local, inside = locate(target, classes, digits, mesh)
    inside = inside & (target != ignore_index)

    def fill(logits: Tensor) -> Tensor:
        return fill_padding(logits, mesh, *padding)

    how = max(-(-x.shape[0] // chunks), 1), dtype, fill if padding else None
    tensors = x, weight, bias, local.masked_fill(~inside, 0), inside
    stats: Tensor = with_backward(_stats, _stats_backward, *tensors, how)
    return stats


def nll_top(stats: Tensor) -> Tensor:
    """Return one number a row of `linear_nll`'s result, to subtract before exponentials; detached."""
    return stats[0].detach()


def nll_exp(stats: Tensor, top: Tensor) -> Tensor:
    """Return this rank's summands of the loss: (exp(normaliser - top); the target's logit). top [n]."""
    return torch.stack([(stats[0] - top).exp(), stats[1]])
