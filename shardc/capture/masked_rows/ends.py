"""Finish selected rows by a write, a sum, a mean or a loss, in which the other rows do not count.

x[mask] = y, x[i] += y, index_add           where(mask, y, x), x + where(mask, y, 0)
x[mask].mean()                              where(mask, x, 0).sum() / mask.sum()
cross_entropy(x[mask], y[mask])             cross_entropy(x, where(mask, y, -100))
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardc.capture.data_dependent_sizes import functions
from shardc.capture.masked_rows.rows import Pick, Rows, Unfit, node_of, structure_of
from shardc.ir import types as values
from shardc.torch_private import traced_node

if TYPE_CHECKING:
    from shardc.capture.masked_rows import ChosenRows

aten = torch.ops.aten
ADDS = functions("index_add index_add_ scatter_add scatter_add_")
_SUMS, _MEANS = functions("sum"), functions("mean")
#: Losses of classes, and others, which return one per element with `reduction="none"`.
_CLASSES = functions("cross_entropy nll_loss", F)
_ELEMENTS = functions(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits", F
)


# --- writes -----------------------------------------------------------------------------------------------------------


def put(x: Tensor, pick: Pick, grid: tuple[int, ...], index: Rows | None, value: Any) -> None:
    """Write `x[...] = value`: row i to row i of a mask, or to the row that an index names (only once)."""
    pick.loop.allow(pick)
    added = None
    if isinstance(value, Rows):
        if value.pick.mask is not pick.mask or value.at or (index is not None and index.full.ndim != 1):
            raise Unfit("they are written to other rows")
        added = _added(x, value)
        value = value.full
        value, added = (y if y is None else y.reshape(*grid, *y.shape[1:]) for y in (value, added))
    elif index is not None:
        raise Unfit("they are written to places of another form")
    elif isinstance(value, Tensor) and value.dim() >= x.dim() - len(grid) + 1 and value.shape[0] != 1:
        raise Unfit("their places are filled with a tensor of fixed size")
    if index is None:
        mask = pick.mask.reshape(*grid, *[1] * (x.dim() - len(grid)))
        x.copy_(torch.where(mask, value, x)) if added is None else x.add_(torch.where(mask, added, 0))
        return
    mask = pick.over(0, value.ndim)
    if added is not None:
        x.index_add_(0, index.full, torch.where(mask, added, 0))
        return
    new = torch.zeros_like(x).index_add(0, index.full, torch.where(mask, value, 0).to(x.dtype))
    hit = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device).index_add(0, index.full, pick.mask.long())
    x.copy_(torch.where((hit > 0).reshape(-1, *[1] * (x.dim() - 1)), new, x))


def add(loop: ChosenRows, func: Any, x: Any, dim: int, index: Any, rows: Any, **options: Any) -> Any:
    """Run `x.index_add(dim, index, rows)` and similar functions."""
    picks = {r.pick.mask for r in (index, rows) if isinstance(r, Rows)}
    if isinstance(x, Rows) or len(picks) != 1 or not isinstance(rows, Rows):
        raise Unfit("they are written to other rows")
    loop.allow(rows.pick)
    result = func(x, dim, index.full if isinstance(index, Rows) else index, rows.chosen(), **options)
    if result is not x:
        loop.guards.written[id(result)] = result, x
    return result


def _added(x: Tensor, value: Rows) -> Tensor | None:
    """Return what is added in `x[i] += y`, if the rows of x that were read are written back; else None."""
    if value.read is None or value.read[0] is not x or value.read[1] is not node_of(x):
        return None
    more = value.more
    return more.full.expand(value.full.shape) if isinstance(more, Rows) and more.at == value.at else None


# --- reductions -------------------------------------------------------------------------------------------------------


def reduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the value of a call that reduces selected rows; None for other calls."""
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
        losses = rows.pick.loop.call(func, (x, y), {**kwargs, "reduction": "none"})
        return _total(how == "mean", losses) if isinstance(losses, Rows) else None
    classes = func in _CLASSES and isinstance(x, Rows) and isinstance(y, Rows) and x.pick.mask is y.pick.mask
    if not classes or x.at or y.at or y.full.dtype != torch.int64:
        return None
    return func(x.full, y.chosen(kwargs.get("ignore_index", -100)), **kwargs)  # type: ignore[no-any-return]


def _total(of_mean: bool, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor | None:
    """Return the sum or mean of rows along dims that include the rows' dim; else None."""
    if not isinstance(x, Rows):
        raise Unfit("their number is a dim")
    dims = range(x.full.ndim) if dim is None else [d % x.full.ndim for d in ((dim,) if isinstance(dim, int) else dim)]
    if x.at not in dims:
        return None
    total = x.chosen().sum(list(dims), keepdim, dtype=dtype)
    if not of_mean:
        return total
    mean = total / (x.pick.mask.sum() * math.prod(x.full.shape[d] for d in dims if d != x.at))
    x.pick.loop.means.add(node_of(mean))
    return mean


def _alignment(log_probs: Tensor, targets: Rows, frames: Any, lengths: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Compute CTC of the labels that a mask of [rows, labels] keeps, moved to the front like padded ones."""
    mask = targets.pick.mask.reshape(targets.pick.grid)
    node = traced_node(lengths) if isinstance(lengths, Tensor) else None
    count = node is not None and node.target is aten.sum.dim_IntList and node.args[1] in ([-1], [mask.dim() - 1])
    if mask.dim() != 2 or targets.full.ndim != 1 or not count or structure_of(node.args[0]) != structure_of(mask):  # type: ignore[union-attr, arg-type]
        raise Unfit("their lengths are not their numbers in each row")
    order = torch.sort((~mask).long(), dim=-1, stable=True).indices
    kept = torch.where(mask, targets.full.reshape(mask.shape), 0).gather(1, order)
    return F.ctc_loss(log_probs, kept, frames, lengths, *args, **kwargs)


def from_mean(loop: ChosenRows, x: Tensor) -> bool:
    """Return whether a value depends on a mean of selected rows."""
    return bool(loop.means) and not loop.means.isdisjoint(values.behind([node_of(x)]))
