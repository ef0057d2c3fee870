"""Define what the traced model sees for selected rows (`Rows`, `Pick`) and for their number (`Count`).

x[mask]                              Rows(x, 0, Pick(mask))
mask.sum().item(), len(x[mask])      Count(sum(mask))
counts.cumsum(0).tolist()            Counts, each an element of a tensor; x[ends[0] : ends[1]]: rows between two Counts
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx

from shardc.capture.constants import constant
from shardc.capture.masked_rows.branches import bodies, caller, harmless
from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir import types as values
from shardc.ir.source import Source
from shardc.torch_private import OpOverload, traced_node

if TYPE_CHECKING:
    from shardc.capture.masked_rows import ChosenRows

#: Most turns of an unrolled loop over selected rows (`for i, j in mask.nonzero()`).
UNROLLED = 1024
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
    return node.target, values.typed_key((node.args, node.kwargs), structure_of)


def _is_mask(node: fx.Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) == torch.bool


# --- the number of rows -----------------------------------------------------------------------------------------------


class Count:
    """An integer >= 0 that depends on values: `tensor` has it in the graph.

    It may be compared with 0, and with others: if the outcome means that there are no rows, nothing may change
    (branches.py). It bounds slices of sorted rows. shifted: a number was added, so that 0 does not mean "no rows";
    differs: it is a difference, where 0 means "no rows" only if the one is a part of the other.
    """

    __class__: Any = property(lambda self: int)  # isinstance(x, int) is true

    def __init__(self, loop: ChosenRows, tensor: Tensor, shifted: bool = False, differs: bool = False) -> None:
        self.loop, self.tensor, self.node = loop, tensor, node_of(tensor)
        self.shifted, self.differs = shifted, differs

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Unfit("their number is used")

    @property
    def key(self) -> Any:
        return structure_of(self.node)

    def __hash__(self) -> int:
        raise Unfit("their number is put in a set, or is the key of a dict")

    def __bool__(self) -> bool:
        return self.compared(0, operator.ne)

    def combined(self, other: Any, combine: Callable[[Any, Any], Any]) -> Any:
        if not isinstance(other, (Count, int, np.integer)):
            return NotImplemented
        if isinstance(other, Count):
            operand: Any = other.tensor
            shifted, differs = other.shifted, other.differs
        else:
            operand, shifted, differs = int(other), bool(other), False
        differs = self.differs or differs or combine is not operator.add
        return Count(self.loop, combine(self.tensor, operand), self.shifted or shifted, differs)

    def compared(self, other: Any, compare: Callable[[int, int], bool]) -> bool:
        """Return the comparison's result if there are rows; it may only distinguish some from none, or be a check."""
        if (fine := harmless()) is not None:
            return fine
        if not isinstance(other, (int, np.integer)):
            raise Unfit("their number is compared with something else")
        difference, least = (self.combined(other, operator.sub), 0) if isinstance(other, Count) else (self, int(other))
        signs = (1, -1) if isinstance(other, Count) else (1,)
        splits = [compare(0, least) != compare(s, least) == compare(s << 40, least) for s in signs]
        if difference.shifted or not any(splits):
            raise Unfit("their number is compared with more than 0")
        tried = 24 if difference.differs else 3
        body = self.loop.guards.take([difference.node], lambda known: compare(int(known[0]), least), tried=tried)
        if body is None:
            raise Unfit(UNCHECKED)
        return body.wanted


def _method(function: Callable[..., Any], operation: Callable[[Any, Any], Any]) -> Callable[[Count, Any], Any]:
    return lambda self, other: function(self, other, operation)


for _name, _combine in (("add", operator.add), ("radd", operator.add), ("sub", operator.sub)):
    setattr(Count, f"__{_name}__", _method(Count.combined, _combine))
Count.__rsub__ = _method(Count.combined, lambda a, b: b - a)  # type: ignore[attr-defined]
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Count, f"__{_name}__", _method(Count.compared, getattr(operator, _name)))


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


class Rows(Tensor):
    """Represents `full` with only the rows of `pick` along dim `at`.

    place: for indices of rows that are the coordinates along that dim of the grid; else None. listed: the model has
    them as a list of numbers. read: the tensor they are rows of, and its node at that time; more: what was added to
    them later.
    """

    full: Tensor
    at: int
    pick: Pick
    place: int | None
    listed: bool
    read: tuple[Tensor, fx.Node] | None = None
    more: Any = None

    @staticmethod
    def __new__(cls, full: Tensor, at: int, pick: Pick, place: int | None = None, listed: bool = False) -> Rows:
        self: Any = Tensor._make_wrapper_subclass(cls, full.shape, dtype=full.dtype, requires_grad=full.requires_grad)
        self.full, self.at, self.pick, self.place, self.listed = full, at, pick, place, listed
        return self  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Unfit(f"{getattr(func, '__name__', func)} is called outside of what shardc sees")

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[Any, ...]:  # type: ignore[override]
        return tuple(self.pick.count if d == self.at else n for d, n in enumerate(self.full.shape))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Count:  # type: ignore[override]
        rest = math.prod(n for d, n in enumerate(self.full.shape) if d != self.at)
        return Count(self.pick.loop, self.pick.mask.sum() * rest)

    nelement = numel  # type: ignore[assignment]

    def chosen(self, otherwise: Any = 0) -> Tensor:
        """Return all rows, with a number in place of those that were not selected."""
        return torch.where(self.pick.over(self.at, self.full.ndim), self.full, otherwise)

    def __len__(self) -> int:
        """Return the number of rows at a line that only tests whether there are any."""
        guards, frame = self.pick.loop.guards, caller()
        body = bodies(frame.f_code, loop=False).get(frame.f_lineno)
        if self.at or body is None or body.some != body.wanted:
            raise Unfit("their number is used")
        if guards.take([node_of(self.pick.mask)], lambda known: bool(known[0].any()) == body.some) is None:
            raise Unfit(UNCHECKED)
        return self.full.shape[0]

    def __bool__(self) -> bool:
        return len(self) > 0

    def __iter__(self) -> Iterator[Any]:
        """Yield all rows of an index, as constants, each with a guard: those not selected have nothing to work on."""
        if self.at != 0 or constant(self.full) is None or self.pick.n > UNROLLED:
            raise Unfit("Python loops over them")

        def chosen(i: int) -> Callable[[Any], bool]:
            return lambda known: bool(known[0][i])

        for i, row in enumerate(self.full.unbind(0)):
            if self.pick.loop.guards.take([node_of(self.pick.mask)], chosen(i), loop=True) is None:
                raise Unfit("a loop over them cannot be checked")
            yield row.tolist() if self.listed else row

    def tolist(self) -> Rows:  # type: ignore[override]
        """Return the rows of an index as numbers: a turn of a loop over them counts only if its number is selected."""
        return Rows(self.full, self.at, self.pick, self.place, listed=True)


#: Methods whose sizes may include the number of rows. torch's own take no `Count`.
SIZED = ("view", "reshape", "expand", "unflatten", "new_zeros", "new_ones", "new_full", "new_empty")


def _sized(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self.pick.loop.call(method, (self, *args), kwargs)


for _name in SIZED:
    setattr(Rows, _name, _sized(getattr(Tensor, _name)))
