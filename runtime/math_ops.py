"""Local math that no single aten op does: loss per position, the loss on split classes, look-ups in a part of a table."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Mesh = Any


def batch_stat(batch: Tensor, running: Tensor, rng: Any) -> Tensor:
    """BatchNorm's choice of statistics: the batch's when training, else the running one's (cast to the batch's dtype)."""
    return batch if rng is None or rng.training else running.to(batch.dtype).reshape(batch.shape)


def partial_mean(x: Tensor, dims: list[int], keepdim: bool, count: int) -> Tensor:
    """This rank's share of a mean over `count` elements in all: the sum over `dims` of what is here, over count."""
    return x.sum(dims, keepdim) / count


def nll(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Negative log likelihood per position: logits [n, c, ...] (or [c]), target [n, ...] -> [n, ...]; 0 where ignored."""
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")


def nll_max(logits: Tensor) -> Tensor:
    """The largest logit of each position over this rank's classes; detached."""
    return logits.detach().amax(1 if logits.dim() > 1 else 0)


class _NllParts(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, maximum: Tensor, first: int, ignore_index: int) -> Tensor:
        c = 1 if logits.dim() > 1 else 0
        shifted = logits - maximum.unsqueeze(c)
        here = (target >= first) & (target < first + logits.shape[c]) & (target != ignore_index)
        local = torch.where(here, target - first, 0).unsqueeze(c)
        picked = shifted.gather(c, local).squeeze(c).masked_fill_(~here, 0)
        exps = shifted.exp_()
        ctx.save_for_backward(exps, local, here)
        ctx.c = c
        return torch.stack([exps.sum(c), picked])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        exps, local, here = ctx.saved_tensors
        c = ctx.c
        # the saved buffer, as large as the logits, becomes the gradient; autograd notices if backward is run again
        grad = exps.mul_(g[0].unsqueeze(c))
        grad.scatter_add_(c, local, torch.where(here, g[1], 0).unsqueeze(c))
        return grad, None, None, None, None


def nll_parts(logits: Tensor, target: Tensor, maximum: Tensor, mesh: Mesh, axis: str, ignore_index: int = -100) -> Tensor:
    """This rank's summands of the loss: [2, n, ...] = (sum of exp(logit - maximum) over its classes; target's logit - maximum,
    or 0 if another rank has that class).

    logits [n, c/ranks, ...]: this rank's classes; target [n, ...]: global class indices; maximum [n, ...]: over all classes.
    Saves one buffer of the size of the logits. Backward works on it in place, so it can run once.
    """
    c = 1 if logits.dim() > 1 else 0
    first = mesh.coordinate(axis) * logits.shape[c]
    parts: Tensor = _NllParts.apply(logits, target, maximum, first, ignore_index)  # type: ignore[no-untyped-call]
    return parts


def nll_join(parts: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """log(sum of exponentials) - target's logit, from the summed parts; 0 where ignored."""
    return (parts[0].log() - parts[1]).masked_fill(target == ignore_index, 0)


def embedding_partial(weight: Tensor, ids: Tensor, mesh: Mesh, axis: str, padding_idx: int = -1) -> Tensor:
    """Look-up in this rank's rows of a table: weight [v/ranks, d], ids global -> [..., d], zeros for rows of other ranks."""
    first = mesh.coordinate(axis) * weight.shape[0]
    away = (ids < first) | (ids >= first + weight.shape[0])
    local = (ids - first).masked_fill_(away, 0)
    padding = padding_idx - first if 0 <= padding_idx - first < weight.shape[0] else -1
    found: Tensor = torch.ops.aten.embedding.default(weight, local, padding)
    # padding's row gets no gradient in `embedding`, and rows of other ranks none through the mask
    return found.masked_fill(away.unsqueeze(-1), 0)
