"""Resolve data-dependent sizes during capture: ops whose result size follows from known values.

lengths = torch.repeat_interleave(sizes, counts)     of constants (masks, grids of images): the result is one too
x[mask]                                              x[i, j], if the mask is known
x.repeat_interleave(counts, dim=0)                   with output_size, if the counts are known
torch.arange(counts.sum()), F.pad(x, (left, right))  numbers in place of tensors
torch.cov(x), corrcoef(x), combinations(x)            written out: torch reads a number there, or selects by a mask
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardc.torch_modes import untraced
from shardc.torch_private import pytree, tracing


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    if fweights is not None or aweights is not None or input.dim() > 2:  # refused: divides by a value
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    n = rows.shape[1]
    centered = rows - rows.sum(1, keepdim=True) / n
    return (centered @ centered.mH / max(n - correction, 0)).squeeze()


def _corrcoef(input: Tensor) -> Tensor:
    c = _cov(input)
    if c.dim() == 0:
        return c / c
    deviation = (c.diagonal().real if c.is_complex() else c.diagonal()).sqrt()
    c = c / deviation[:, None] / deviation
    return torch.complex(c.real.clamp(-1, 1), c.imag.clamp(-1, 1)) if c.is_complex() else c.clamp(-1, 1)


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    if r == 0:
        return input.new_empty(0)
    chosen = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = torch.tensor(list(chosen(range(len(input)), r)), dtype=torch.int64, device=input.device)
    return input[places.reshape(-1, r)]


WRITTEN_OUT: dict[Any, Callable[..., Tensor]] = {
    torch.cov: _cov,
    Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    Tensor.corrcoef: _corrcoef,
    torch.combinations: _combinations,
}


def functions(names: str, *holders: Any) -> set[Any]:
    """Return the functions of torch, and the methods of tensors, with these names; or those of other holders."""
    return {getattr(holder, n) for n in names.split() for holder in holders or (torch, Tensor) if hasattr(holder, n)}


#: Ops whose result's size follows from values.
_CALLS = functions("nonzero argwhere unique unique_consecutive masked_select bincount repeat_interleave combinations")
#: Calls in which torch reads numbers from arguments without Python.
_NUMBERED = {F.pad, F.interpolate} | functions(
    "arange linspace full zeros ones empty rand randn view reshape expand repeat narrow new_zeros new_ones new_full"
)
_WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8}
_REPEAT = functions("repeat_interleave")
_MINE = {Tensor.__getitem__, torch.where, *_CALLS, *_NUMBERED, *WRITTEN_OUT}


class KnownSizes(TorchFunctionMode):
    """A mode in which ops with value-dependent sizes, and indexing by masks, get known sizes if possible.

    known: returns the value of a traced tensor, or None.
    """

    def __init__(self, known: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _MINE:  # the most frequent case: every read of a shape comes here
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func in WRITTEN_OUT:
            return WRITTEN_OUT[func](*args, **kwargs) if tracing() else func(*args, **kwargs)
        if func is Tensor.__getitem__:
            if (hidden(args[1]) or any(map(_number_like, each(args[1])))) and tracing():
                args = (args[0], self._places(args[1]))
        elif (func in _CALLS or (func is torch.where and len(args) == 1 and not kwargs)) and tracing():
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            values = {id(x): self.known(x) for x in tensors}
            if all(v is not None for v in values.values()):
                args, kwargs = pytree.tree_map(
                    lambda x: values.get(id(x), x) if isinstance(x, Tensor) else x, (args, kwargs)
                )
                return pytree.tree_map_only(Tensor, torch.clone, untraced(lambda: func(*args, **kwargs)))
            if func in _REPEAT and len(tensors) == 2 and (counts := values[id(tensors[1])]) is not None:
                kwargs = {"output_size": int(counts.sum()), **kwargs}
        elif func in _NUMBERED and tracing():
            args, kwargs = pytree.tree_map_only(Tensor, self._number, (args, kwargs))
        return func(*args, **kwargs)

    def _number(self, x: Any) -> Any:
        value = self.known(x) if isinstance(x, Tensor) and x.dim() == 0 else None
        return x if value is None else untraced(value.item)

    def _places(self, index: Any) -> tuple[Any, ...]:
        """Replace a known mask in an index by the indices where it is true; convert numbers and slice bounds."""
        places: list[Any] = []
        for i in each(index):
            if isinstance(i, slice):
                places.append(slice(*map(self._number, (i.start, i.stop, i.step))))
            elif _number_like(i):
                places.append(self._number(i))
            else:
                value = self.known(i) if isinstance(i, Tensor) and hidden(i) else None
                places += [i] if value is None else [torch.clone(n) for n in untraced(value.nonzero).unbind(1)]
        return tuple(places)


def each(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _number_like(index: Any) -> bool:
    """Return whether it is a tensor that indexes as a number does: torch reads it. (uint8 is a mask.)"""
    return isinstance(index, Tensor) and index.dim() == 0 and index.dtype in _WHOLE


def hidden(index: Any) -> bool:
    """Return whether an index is or contains a mask, or a slice whose bounds are tensors."""
    if isinstance(index, tuple):
        return any(map(hidden, index))
    if isinstance(index, slice):
        return any(isinstance(x, Tensor) for x in (index.start, index.stop, index.step))
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 0
