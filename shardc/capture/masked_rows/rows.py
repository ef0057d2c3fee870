"""Chosen rows as the traced model sees them: all rows, and the choice (`Pick`) that says which of them count."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from shardc.capture.guards import bodies
from shardc.capture.masked_rows.count import Count, Term
from shardc.capture.masked_rows.traced import node_of
from shardc.capture.masked_rows.unfit import Unfit

if TYPE_CHECKING:
    from shardc.capture.masked_rows import ChosenRows


@dataclass(eq=False)
class Pick:
    """A choice of rows. mask: bool [n]. grid: the mask's own shape. bounds: of a stretch of rows: from, to."""

    loop: ChosenRows
    mask: Tensor
    grid: tuple[int, ...]
    bounds: tuple[Any, Any] | None = None

    @property
    def n(self) -> int:
        return int(self.mask.shape[0])

    def count(self) -> Count:
        return Count(self.loop, {("rows", id(self.mask)): Term(self.mask, (), 1)})

    def turns(self, items: Iterator[Any]) -> Iterator[Any]:
        """The turns of a loop over chosen rows: all of them, each taken for granted."""

        def chosen(i: int) -> Callable[[Any], bool]:
            return lambda values: bool(values[0][i])

        for i, item in enumerate(items):
            if self.loop.guards.take(sys._getframe(1), [node_of(self.mask)], chosen(i), loop=True) is None:
                raise Unfit("what a loop over them does cannot be checked")
            yield item


class ChosenNumbers(list[Any]):
    """Numbers of what was chosen, as a list: of all that could be. Each turn of a loop over it is for one that was; as
    an index it is the rows that it was made of.
    """

    def __init__(self, items: Any, rows: Rows) -> None:
        super().__init__(items)
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return self.rows.pick.turns(super().__iter__())

    def __len__(self) -> int:
        return self.rows.some(sys._getframe(1))

    def __bool__(self) -> bool:
        return self.rows.some(sys._getframe(1)) > 0


class Rows:
    """Stands for `full` with only the rows of `pick` along dim `dim`. place: of indices of rows, that they are the
    coordinates along that dim of the grid; None: anything else.
    """

    def __init__(self, full: Tensor, dim: int, pick: Pick, place: int | None = None) -> None:
        self.full, self.dim, self.pick, self.place = full, dim, pick, place
        self.read: tuple[Tensor, fx.Node] | None = None  # the tensor that they are rows of, as it was then
        self.more: Any = None  # what was added to them since

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Unfit(f"{getattr(func, '__name__', func)} is called where shardc does not see it")

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.pick.count() if d == self.dim else n for d, n in enumerate(self.full.shape))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Count:
        rest = math.prod(n for d, n in enumerate(self.full.shape) if d != self.dim)
        return Count(self.pick.loop, {k: replace(t, times=rest) for k, t in self.pick.count().terms.items()})

    nelement = numel

    def __len__(self) -> int:
        return self.some(sys._getframe(1))

    def some(self, frame: FrameType) -> int:
        """The number of rows, which Python wants at a line: only to ask whether there are any."""
        guards, node = self.pick.loop.guards, node_of(self.pick.mask)
        body = bodies(frame.f_code, loop=False).get(frame.f_lineno)
        if self.dim or body is None or body.some != body.wanted:
            raise Unfit("their number is used")
        if guards.take(frame, [node], lambda v: bool(v[0].any()) == body.some) is None:
            raise Unfit("what is done depends on whether there are any, in a way that cannot be checked")
        return self.full.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return self.pick.turns(iter(self.pick.loop.unrolled(self)))

    def tolist(self) -> list[Any]:
        return ChosenNumbers([x.tolist() for x in self.pick.loop.unrolled(self)], self)

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "ndim", "layout", "is_cuda", "requires_grad", "is_sparse", "is_meta"):
            return getattr(self.full, name)
        method = getattr(Tensor, name, None)
        if name.startswith("__") or method is None:
            raise AttributeError(name)
        if not callable(method):
            return self.pick.loop.call(getattr, (self, name), {})
        return lambda *args, **kwargs: self.pick.loop.call(method, (self, *args), kwargs)


def _operator(name: str) -> Callable[..., Any]:
    def method(self: Rows, *args: Any) -> Any:
        return self.pick.loop.call(getattr(Tensor, name), (self, *args), {})

    return method


_OPERATORS = """
    add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv mod pow rpow neg matmul
    rmatmul eq ne lt le gt ge and rand or ror xor invert abs getitem setitem
"""
for _name in _OPERATORS.split():
    setattr(Rows, f"__{_name}__", _operator(f"__{_name}__"))
Rows.__hash__ = object.__hash__  # type: ignore[method-assign]
