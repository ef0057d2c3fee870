"""Define what the traced model sees for selected rows (`Rows`, `Pick`) and for their number (`Count`).

x[mask]                              Rows(x, 0, Pick(mask))
mask.sum().item(), len(x[mask])      Count(sum(mask))
counts.cumsum(0).tolist()            Counts, each an element of a tensor; x[ends[0] : ends[1]]: rows between two Counts
"""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx

from shardc.capture.masked_rows.branches import bodies
from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir import types as values
from shardc.ir.source import Source
from shardc.torch_private import OpOverload, traced_node

if TYPE_CHECKING:
    from shardc.capture.masked_rows import ChosenRows

UNCHECKED = "an operation depends on whether there are any, in a way that cannot be checked"


class DrawnError(ShardcError):
    """Random numbers are drawn for selected rows: one device draws fewer than a program for all rows."""

    def __init__(self, at: Source) -> None:
        super().__init__(
            "an expert draws random numbers for its rows (dropout), but the number of its rows depends on a tensor's "
            f"value ({at.shown})",
            where=at.line,
            fix="set the dropout inside of experts to 0, or move it after them, where all tokens pass",
        )


class Unfit(ShardcError):
    """Selected rows are not used row by row. at: the line of the model that uses them."""

    def __init__(self, what: str) -> None:
        self.at = source.of_call()
        super().__init__(f"rows chosen by a mask: {what}", where=self.at.line)


def add_reason(refused: ShardcError, error: ShardcError) -> ShardcError:
    """Extend a refusal of value-dependent code by the line that selected rows cannot pass either."""
    if not isinstance(error, Unfit) or not error.at.line or error.at.line == refused.where:
        return refused
    return ShardcError(f"{refused.what}; {error.what} ({error.at.shown})", where=error.at.line, fix=refused.fix)


# --- tensors in the graph being traced --------------------------------------------------------------------------------


def node_of(x: Tensor) -> fx.Node:
    node = traced_node(x)
    if node is None:
        raise Unfit("a tensor among them is not traced")
    return node


#: Ops that do not change a mask, row by row; and ops that make masks and counts.
_SAME = {"reshape", "view", "_unsafe_view", "flatten", "clone", "contiguous", "to", "_to_copy", "squeeze", "unsqueeze"}
_MAKERS = {"select", "slice", "eq", "ne", "gt", "any", "index", "bool", "to", "add", "sub", "sum"}


def structure_of(x: Tensor | fx.Node) -> Any:
    """Return a key that is equal for tensors computed in the same way, and for other views of the rows."""
    node = x if isinstance(x, fx.Node) else traced_node(x)
    if node is None:
        return id(x)
    while isinstance(node.target, OpOverload) and values.op_name(node.target) in _SAME:
        before: Any = node.args[0]
        if _is_mask(before) != _is_mask(node):
            break
        node = before
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return node
    if values.op_name(node.target) not in _MAKERS:
        return node
    return (node.target, *map(_frozen, node.args), *((k, _frozen(v)) for k, v in node.kwargs.items()))


def _is_mask(node: fx.Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) == torch.bool


def _frozen(x: Any) -> Any:
    if isinstance(x, fx.Node):
        return structure_of(x)
    return tuple(map(_frozen, x)) if isinstance(x, (tuple, list)) else (type(x), x)


# --- the number of rows -----------------------------------------------------------------------------------------------


class Count:
    """An integer >= 0 that depends on values: `tensor` has it in the graph.

    It may be compared with 0, and with others: if the outcome means that there are no rows, nothing may change
    (branches.py). It bounds slices of sorted rows. shifted: a number was added, so that 0 does not mean "no rows";
    differs: it is a difference, where 0 means "no rows" only if the one is a part of the other.
    """

    def __init__(self, loop: ChosenRows, tensor: Tensor, shifted: bool = False, differs: bool = False) -> None:
        self.loop, self.tensor, self.node = loop, tensor, node_of(tensor)
        self.shifted, self.differs = shifted, differs

    @property
    def key(self) -> Any:
        return structure_of(self.node)

    def __hash__(self) -> int:
        raise Unfit("their number is put in a set, or is the key of a dict")

    def __bool__(self) -> bool:
        return self.compared(0, operator.ne, sys._getframe(1))

    def combined(self, other: Any, combine: Callable[[Any, Any], Any]) -> Any:
        if isinstance(other, Count):
            operand: Any = other.tensor
            shifted, differs = other.shifted, other.differs
        elif isinstance(other, (int, np.integer)):
            operand, shifted, differs = int(other), bool(other != 0), False
        else:
            return NotImplemented
        differs = self.differs or differs or combine is not operator.add
        return Count(self.loop, combine(self.tensor, operand), self.shifted or shifted, differs)

    def compared(self, other: Any, compare: Callable[[int, int], bool], frame: FrameType) -> bool:
        """Return the comparison's result if there are rows; it may only distinguish some from none."""
        if not isinstance(other, (Count, int, np.integer)):
            raise Unfit("their number is compared with something else")
        difference = self.combined(other, operator.sub) if isinstance(other, Count) else self
        least = 0 if isinstance(other, Count) else int(other)
        signs = (1, -1) if isinstance(other, Count) else (1,)
        splits = [compare(0, least) != compare(s, least) == compare(s << 40, least) for s in signs]
        if difference.shifted or not any(splits):
            raise Unfit("their number is compared with more than 0")
        tried = 24 if difference.differs else 3
        body = self.loop.guards.take(frame, [difference.node], lambda known: compare(int(known[0]), least), tried=tried)
        if body is None:
            raise Unfit(UNCHECKED)
        return body.wanted


def _combining(combine: Callable[[Any, Any], Any]) -> Callable[[Count, Any], Any]:
    return lambda self, other: self.combined(other, combine)


def _comparing(compare: Callable[[int, int], bool]) -> Callable[[Count, Any], Any]:
    return lambda self, other: self.compared(other, compare, sys._getframe(1))


for _name, _combine in (
    ("add", operator.add),
    ("radd", operator.add),
    ("sub", operator.sub),
    ("rsub", lambda a, b: b - a),
):
    setattr(Count, f"__{_name}__", _combining(_combine))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Count, f"__{_name}__", _comparing(getattr(operator, _name)))


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Pick:
    """A choice of rows. mask: bool [n]. grid: the mask's shape. bounds: (from, to) of a stretch of rows."""

    loop: ChosenRows
    mask: Tensor
    grid: tuple[int, ...]
    bounds: tuple[Any, Any] | None = None

    @property
    def n(self) -> int:
        return int(self.mask.shape[0])

    @cached_property
    def count(self) -> Count:
        return Count(self.loop, self.mask.sum())

    def over(self, dim: int, ndim: int) -> Tensor:
        """Return the mask for tensors that have the rows along a dim."""
        return self.mask.reshape([-1 if d == dim else 1 for d in range(ndim)])

    def turns(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield all turns of a loop over selected rows, each with a guard."""

        def chosen(i: int) -> Callable[[Any], bool]:
            return lambda known: bool(known[0][i])

        for i, item in enumerate(items):
            if self.loop.guards.take(sys._getframe(1), [node_of(self.mask)], chosen(i), loop=True) is None:
                raise Unfit("a loop over them cannot be checked")
            yield item


class ChosenNumbers(list[Any]):
    """Numbers of selected places, as a list of all possible ones.

    A turn of a loop over it counts only if its number is selected; as an index it is the rows it was made of.
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
    """Represents `full` with only the rows of `pick` along dim `dim`.

    place: for indices of rows that are the coordinates along that dim of the grid; else None.
    """

    def __init__(self, full: Tensor, dim: int, pick: Pick, place: int | None = None) -> None:
        self.full, self.dim, self.pick, self.place = full, dim, pick, place
        self.read: tuple[Tensor, fx.Node] | None = None  # the tensor they are rows of, and its node at that time
        self.more: Any = None  # what was added to them later

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Unfit(f"{getattr(func, '__name__', func)} is called outside of what shardc sees")

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.pick.count if d == self.dim else n for d, n in enumerate(self.full.shape))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Count:
        rest = math.prod(n for d, n in enumerate(self.full.shape) if d != self.dim)
        return Count(self.pick.loop, self.pick.mask.sum() * rest)

    nelement = numel

    def chosen(self, otherwise: Any = 0) -> Tensor:
        """Return all rows, with a number in place of those that were not selected."""
        return torch.where(self.pick.over(self.dim, self.full.ndim), self.full, otherwise)

    def __len__(self) -> int:
        return self.some(sys._getframe(1))

    def some(self, frame: FrameType) -> int:
        """Return the number of rows at a line that only tests whether there are any."""
        guards, node = self.pick.loop.guards, node_of(self.pick.mask)
        body = bodies(frame.f_code, loop=False).get(frame.f_lineno)
        if self.dim or body is None or body.some != body.wanted:
            raise Unfit("their number is used")
        if guards.take(frame, [node], lambda known: bool(known[0].any()) == body.some) is None:
            raise Unfit(UNCHECKED)
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

_KINDS: dict[type, type] = {Rows: Tensor, Count: int}
_isinstance = builtins.isinstance


@contextmanager
def seen_by_the_model() -> Iterator[None]:
    """Let the model's `isinstance` and `is_tensor` see Rows as tensors and Count as int, in the block."""

    def seen(x: Any, kinds: Any) -> bool:
        if _isinstance(x, kinds):
            return True
        kind = _KINDS.get(type(x))
        if kind is None or not issubclass(kind, kinds):
            return False
        code = sys._getframe(1).f_code
        return source.is_models(code.co_filename) or code is torch.is_tensor.__code__

    with mock.patch.object(builtins, "isinstance", seen):
        yield
