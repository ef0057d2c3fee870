"""Writing chosen rows to a tensor: `where(mask, row, 0)` is added, or `where(mask, row, before)` put in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardc.capture.masked_rows.arguments import along, as_tuple, bounded, start_of
from shardc.capture.masked_rows.rows import Rows
from shardc.capture.masked_rows.traced import node_of
from shardc.capture.masked_rows.unfit import Unfit

if TYPE_CHECKING:
    from shardc.capture.masked_rows import ChosenRows

#: (function, in place) -> whether it adds.
WRITES: dict[Any, tuple[bool, bool]] = {
    Tensor.index_add_: (True, True),
    Tensor.index_add: (False, True),
    torch.index_add: (False, True),
    Tensor.scatter_add_: (True, True),
    Tensor.scatter_add: (False, True),
    torch.scatter_add: (False, True),
    Tensor.index_copy_: (True, False),
    Tensor.index_copy: (False, False),
    torch.index_copy: (False, False),
}


def put(loop: ChosenRows, x: Any, index: Any, value: Any) -> None:
    """`x[index] = value`"""
    each = as_tuple(index)
    if isinstance(x, Rows):
        raise Unfit("some of them are replaced")
    if len(each) == 1 and isinstance(each[0], slice) and bounded(each[0]) and isinstance(value, Rows):
        pick = loop.stretch(x, start_of(each[0]), each[0].stop).pick
    elif len(each) == 1 and isinstance(each[0], Tensor) and each[0].dtype == torch.bool:
        pick = loop.pick(each[0])
    elif len(each) == 1 and isinstance(each[0], Rows) and isinstance(value, Rows):
        replace_rows(loop, x, 0, each[0], value)
        return
    else:
        raise Unfit("they are written to places of another form")
    added = None
    if isinstance(value, Rows):
        if value.pick.mask is not pick.mask or value.dim:
            raise Unfit("they are written to other rows")
        added = _added(x, value)
        value = value.full.reshape(*pick.grid, *value.full.shape[1:])
    elif isinstance(value, Tensor) and value.dim() >= x.dim() - len(pick.grid) + 1 and value.shape[0] != 1:
        raise Unfit("their places are filled with a tensor of fixed size")
    loop.allow(pick)
    mask = pick.mask.reshape(*pick.grid, *[1] * (x.dim() - len(pick.grid)))
    if added is not None:
        x.add_(torch.where(mask, added.reshape(*pick.grid, *added.shape[1:]), 0))
        return
    x.copy_(torch.where(mask, value, x))


def written(loop: ChosenRows, func: Any, x: Any, dim: int, index: Any, source: Any, **options: Any) -> Any:
    """`x.index_add(dim, index, source)` and the like."""
    inplace, adds = WRITES[func]
    picks = {r.pick.mask for r in (index, source) if isinstance(r, Rows)}
    if isinstance(x, Rows) or len(picks) != 1 or not isinstance(source, Rows):
        raise Unfit("they are written to other rows")
    loop.allow(source.pick)
    if not adds:
        result = x if inplace else x.clone()
        replace_rows(loop, result, dim, index, source)
    else:
        positions = index.full if isinstance(index, Rows) else index
        masked = torch.where(along(source.pick.mask, source.dim, source.ndim), source.full, 0)
        result = func(x, dim, positions, masked, **options)
    if result is not x:
        loop.guards.written[id(result)] = result, x
    return result


def replace_rows(loop: ChosenRows, x: Tensor, dim: int, index: Rows, value: Rows) -> None:
    """`x[i] = value`, where i names no row twice (else torch does not say what comes out)."""
    if dim or index.pick.mask is not value.pick.mask or value.dim or index.full.dim() != 1:
        raise Unfit("they are written to other rows")
    loop.allow(index.pick)
    mask = index.pick.mask
    if (added := _added(x, value)) is not None:
        x.index_add_(0, index.full, torch.where(along(mask, 0, value.ndim), added, 0))
        return
    masked = torch.where(along(mask, 0, value.ndim), value.full, 0)
    if index.place == 0 and len(index.pick.grid) == 1:  # row i to row i
        x.copy_(torch.where(along(mask, 0, x.dim()), value.full, x))
        return
    new = torch.zeros_like(x).index_add(0, index.full, masked.to(x.dtype))
    hit = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device).index_add(0, index.full, mask.long())
    x.copy_(torch.where(along(hit > 0, 0, x.dim()), new, x))


def _added(x: Tensor, value: Rows) -> Tensor | None:
    """What is added to rows of x, where they are what is written back to it: of `x[i] += y`."""
    if value.read is None or value.more is None or value.read[0] is not x or value.read[1] is not node_of(x):
        return None
    more = value.more
    if isinstance(more, Rows):
        return more.full.expand(value.full.shape) if more.dim == value.dim else None
    return None
