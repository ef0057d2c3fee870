"""Ops whose result has a size that depends on values, where a model calls them with values that are known: the result is a constant.

    lengths = torch.repeat_interleave(sizes, counts)     # sizes and counts made of constants, as masks and grids of images are
    x[mask]                                              # x[i, j], if the mask is known
    x.repeat_interleave(counts, dim=0)                   # with output_size, if the counts are known
    torch.arange(counts.sum())
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shardc.torch_private import tracing
from shardc.watch import untraced

#: By name, as functions of torch's and as methods.
SIZED = ("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "repeat_interleave")
_CALLS = {getattr(holder, name) for holder in (torch, Tensor) for name in SIZED if hasattr(holder, name)}
_COUNTING = (torch.arange, torch.linspace, torch.full)
_REPEAT = (torch.repeat_interleave, Tensor.repeat_interleave)


class KnownSizes(TorchFunctionMode):
    """While open, ops of SIZED and indexing with masks have sizes that are known, where values are. known: a traced tensor's value."""

    def __init__(self, known: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            if _masks(args[1]) and tracing():
                args = (args[0], self._places(args[1]))
        elif (func in _CALLS or (func is torch.where and len(args) == 1 and not kwargs)) and tracing():
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            values = {id(x): self.known(x) for x in tensors}
            if all(v is not None for v in values.values()):
                args, kwargs = pytree.tree_map(lambda x: values.get(id(x), x) if isinstance(x, Tensor) else x, (args, kwargs))
                return pytree.tree_map_only(Tensor, torch.clone, untraced(lambda: func(*args, **kwargs)))
            if func in _REPEAT and len(tensors) == 2 and (counts := values[id(tensors[1])]) is not None:
                kwargs = {"output_size": int(counts.sum()), **kwargs}
        elif func in _COUNTING and tracing():  # torch reads these numbers where Python does not see it
            args, kwargs = pytree.tree_map_only(Tensor, self._number, (args, kwargs))
        return func(*args, **kwargs)

    def _number(self, x: Tensor) -> Any:
        value = self.known(x) if x.dim() == 0 else None
        return x if value is None else untraced(value.item)

    def _places(self, index: Any) -> tuple[Any, ...]:
        """An index with the places where known masks are true in their stead."""
        found: list[Any] = []
        for i in index if isinstance(index, tuple) else (index,):
            value = self.known(i) if _masks(i) else None
            found += [i] if value is None else [torch.clone(n) for n in untraced(value.nonzero).unbind(1)]
        return tuple(found)


def _masks(index: Any) -> bool:
    """Whether an index is, or has in it, a mask."""
    return any(isinstance(i, Tensor) and i.dtype == torch.bool and i.dim() > 0 for i in (index if isinstance(index, tuple) else (index,)))
