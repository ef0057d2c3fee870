"""What becomes of chosen rows in a sum, a mean or a loss: of all rows, those that were not chosen count nothing.

x[mask].mean()                          where(mask, x, 0).sum() / mask.sum()
cross_entropy(x[mask], y[mask])         cross_entropy(x, where(mask, y, -100))
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from shardc.capture.masked_rows.arguments import along
from shardc.capture.masked_rows.rows import Rows
from shardc.capture.masked_rows.traced import counts, node_of
from shardc.capture.masked_rows.unfit import Unfit

_SUMS: set[Any] = {torch.sum, Tensor.sum}
_MEANS: set[Any] = {torch.mean, Tensor.mean}
#: Losses of classes, and others, which give each element its own with `reduction="none"`.
_CLASSES: set[Any] = {F.cross_entropy, F.nll_loss}
_ELEMENTS: set[Any] = {
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
}


def reduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The value of a call that reduces chosen rows; None for a call that keeps them, or is none of these."""
    if func in _SUMS or func in _MEANS:
        return _total(func in _MEANS, *args, **kwargs)
    if func is F.ctc_loss and isinstance(args[1], Rows):
        return _alignment(*args, **kwargs)
    how = kwargs.get("reduction", "mean")
    if how not in ("sum", "mean") or len(args) != 2:
        return None
    x, y = args
    if func in _ELEMENTS:
        rows = x if isinstance(x, Rows) else y
        each = rows.pick.loop.call(func, (x, y), {**kwargs, "reduction": "none"})
        return _total(how == "mean", each) if isinstance(each, Rows) else None
    classes = func in _CLASSES and isinstance(x, Rows) and isinstance(y, Rows) and x.pick.mask is y.pick.mask
    if not classes or x.dim or y.dim or y.dtype != torch.int64:
        return None
    labels = torch.where(along(y.pick.mask, 0, y.ndim), y.full, kwargs.get("ignore_index", -100))
    return func(x.full, labels, **kwargs)  # type: ignore[no-any-return]


def _alignment(log_probs: Tensor, targets: Rows, frames: Any, lengths: Any, *args: Any, **kwargs: Any) -> Tensor:
    """CTC of the labels that a mask of [rows, labels] keeps: moved to the front of their row, as padded ones are."""
    mask = targets.pick.mask.reshape(targets.pick.grid)
    if mask.dim() != 2 or targets.ndim != 1 or not counts(lengths, mask):
        raise Unfit("their lengths are not their numbers in each row")
    order = torch.sort((~mask).long(), dim=-1, stable=True).indices
    kept = torch.where(mask, targets.full.reshape(mask.shape), 0).gather(1, order)
    return F.ctc_loss(log_probs, kept, frames, lengths, *args, **kwargs)


def _total(of_mean: bool, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor | None:
    """The sum or mean of rows along dims that have the rows among them."""
    if not isinstance(x, Rows):
        raise Unfit("their number is a dim")
    dims = range(x.ndim) if dim is None else [d % x.ndim for d in ((dim,) if isinstance(dim, int) else dim)]
    if x.dim not in dims:
        return None
    total = torch.where(along(x.pick.mask, x.dim, x.ndim), x.full, 0).sum(list(dims), keepdim, dtype=dtype)
    if not of_mean:
        return total
    mean = total / (x.pick.mask.sum() * math.prod(x.full.shape[d] for d in dims if d != x.dim))
    x.pick.loop.means.add(node_of(mean))
    return mean


def behind(node: fx.Node, means: set[fx.Node]) -> bool:
    """Is a value made of one of these means?"""
    todo, seen = [node], {node}
    while todo:
        node = todo.pop()
        if node in means:
            return True
        new = set(node.all_input_nodes) - seen
        seen |= new
        todo += new
    return False
