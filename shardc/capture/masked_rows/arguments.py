"""Reads the arguments of calls on chosen rows: indices, slices, and whether any argument is one of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardc.capture.masked_rows.count import Count
from shardc.capture.masked_rows.rows import ChosenNumbers, Rows
from shardc.torch_private import pytree


def changes_first(func: Any) -> bool:
    """Does a function of torch's change its first argument?"""
    name = getattr(func, "__name__", "")
    return (
        name == "__setitem__"
        or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
        or (name.endswith("_") and not name.endswith("__"))
    )


def along(mask: Tensor, dim: int, ndim: int) -> Tensor:
    return mask.reshape([-1 if d == dim else 1 for d in range(ndim)])


def concerned(x: Any) -> bool:
    return any(isinstance(leaf, (Rows, Count)) for leaf in _leaves(x))


def as_rows(x: Any) -> Any:
    """Arguments with the rows of which a list was made in its place: `x[i.tolist()]` is `x[i]`."""
    return pytree.tree_map(lambda leaf: leaf.rows if isinstance(leaf, ChosenNumbers) else leaf, x)


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, ChosenNumbers):
        yield x.rows
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from _leaves(y)
    elif isinstance(x, dict):
        for y in x.values():
            yield from _leaves(y)
    elif isinstance(x, slice):
        yield from (x.start, x.stop)
    else:
        yield x


def as_tuple(index: Any) -> tuple[Any, ...]:
    return tuple(index) if isinstance(index, (tuple, list)) else (index,)


def start_of(s: slice) -> Any:
    return 0 if s.start is None else s.start


def bounded(s: slice) -> bool:
    return s.step is None and (isinstance(s.start, Count) or isinstance(s.stop, Count))


def many(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1


def dtype_of(x: Any) -> torch.dtype:
    dtype: torch.dtype = x.full.dtype if isinstance(x, Rows) else x.dtype
    return dtype
