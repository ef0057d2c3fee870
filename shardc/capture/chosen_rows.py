"""Rows chosen by a mask, while a model is traced: a tensor of all rows and the mask, in place of a size that depends on
values.

    i = torch.where(mask)[0]                    Rows(arange(n), mask)
    y = expert(x[i]) * w[i, None]               Rows(expert(x) * w[:, None], mask)      what each row by itself becomes
    out.index_add_(0, i, y)                     out.index_add_(0, arange(n), where(mask, expert(x) * w[:, None], 0))

That is what loops over experts consist of. Ops see all rows, so the traced program has fixed sizes; rows that were not
chosen are left out where they would be written. It is the same if every op in between works on each row by itself,
which is checked op by op: the rules (shardc.rules) know what may be split by rows. Anything else is refused, and so is
any number of rows that Python sees, unless it only asks whether there are any: then it is told that there are, since
what is done with no rows changes nothing.

Sorted rows need no more than this: the rows from `ends[e - 1]` to `ends[e]` are those whose position lies between. Then
`Count` is a number that is not known, as an expression of the traced tensors that it is made of.

All experts on all rows is as many times too much work as there are experts: shardc.capture.expert_loops makes the
experts op of it. The two are apart so that this one need not know what a mixture of experts looks like: what it gives
is right for any loop.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from shardc.capture.constants import constant
from shardc.capture.data_dependent_sizes import KnownSizes, hidden
from shardc.capture.guards import Guards, bodies
from shardc.errors import ShardcError
from shardc.ir import types as values
from shardc.ir.graph import operands_of
from shardc.ir.program import Source, Value
from shardc.passes.canonical import rewritten
from shardc.rules import registry
from shardc.rules.calls import call_of
from shardc.torch_modes import untraced
from shardc.torch_private import FakeTensor, OpOverload, pytree, traced_node, tracing

aten = torch.ops.aten
#: A loop over chosen rows themselves (`for i, j in mask.nonzero()`) is unrolled up to so many.
_UNROLLED = 1024


class Unfit(ShardcError):
    """What is done with chosen rows is not done to each row by itself."""

    def __init__(self, what: str) -> None:
        super().__init__(f"rows chosen by a mask: {what}")


# --- numbers that are not known ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """An element of a traced tensor: where it is in it; and how often it counts."""

    tensor: Tensor
    at: tuple[int, ...]
    times: int

    def value(self, known: Any) -> int:
        return self.times * int(known[self.at] if self.at else known.sum())


class Count:
    """A whole number that depends on values: constant + sum of elements of traced tensors, times whole numbers.

    It may be compared with 0, and with others if the difference has one sign: then there are rows, which is taken for
    granted (shardc.capture.guards). It bounds slices of sorted rows. terms: by what the elements are.
    """

    def __init__(self, loop: ChosenRows, terms: dict[Any, Term], constant: int = 0) -> None:
        self.loop, self.constant = loop, constant
        self.terms = {key: term for key, term in terms.items() if term.times}

    @property
    def key(self) -> Any:
        return self.constant, frozenset((key, term.times) for key, term in self.terms.items())

    def tensor(self) -> Any:
        """Its value, in the graph."""
        total: Any = None
        for term in self.terms.values():
            element = term.tensor[term.at] if term.at else term.tensor.sum()
            element = element * term.times if term.times != 1 else element
            total = element if total is None else total + element
        return total + self.constant if self.constant else total

    def _plus(self, other: Any, sign: int) -> Any:
        if isinstance(other, (int, np.integer)):
            return self._simple(self.terms, self.constant + sign * int(other))
        if not isinstance(other, Count):
            return NotImplemented
        terms = dict(self.terms)
        for key, term in other.terms.items():
            before = terms[key].times if key in terms else 0
            terms[key] = replace(term, times=sign * term.times + before)
        return self._simple(terms, self.constant + sign * other.constant)

    def _simple(self, terms: dict[Any, Term], constant: int) -> Count | int:
        found = Count(self.loop, terms, constant)
        return found if found.terms else constant

    def __add__(self, other: Any) -> Any:
        return self._plus(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._plus(other, -1)

    def __neg__(self) -> Count:
        return Count(self.loop, {k: replace(t, times=-t.times) for k, t in self.terms.items()}, -self.constant)

    def __rsub__(self, other: Any) -> Any:
        return (-self)._plus(other, 1)

    def _compared(self, other: Any, compare: Callable[[int, int], bool]) -> bool:
        left = self - other
        if isinstance(left, int):
            return compare(left, 0)
        if not isinstance(left, Count):
            raise Unfit("their number is compared with something else")
        signs = {term.times > 0 for term in left.terms.values()}
        some = 1 if signs == {True} else -1
        found = {compare(some * n + left.constant, 0) for n in (1, 1 << 40)}
        if len(signs) > 1 or len(found) > 1 or compare(left.constant, 0) in found:
            raise Unfit("their number is compared with more than 0")
        (answer,) = found
        terms, constant = list(left.terms.values()), left.constant

        def truth(known: Any) -> bool:
            return compare(sum(t.value(k) for t, k in zip(terms, known, strict=True)) + constant, 0)

        nodes = [_node(t.tensor) for t in terms]
        keys = frozenset(left.terms)
        body = self.loop.guards.take(sys._getframe(2), nodes, truth, keys=keys)
        if body is None or body.wanted != answer:
            raise Unfit("what is done depends on whether there are any, in a way that cannot be checked")
        return answer

    def __eq__(self, other: object) -> bool:
        return self._compared(other, operator.eq)

    def __ne__(self, other: object) -> bool:
        return self._compared(other, operator.ne)

    def __lt__(self, other: Any) -> bool:
        return self._compared(other, operator.lt)

    def __le__(self, other: Any) -> bool:
        return self._compared(other, operator.le)

    def __gt__(self, other: Any) -> bool:
        return self._compared(other, operator.gt)

    def __ge__(self, other: Any) -> bool:
        return self._compared(other, operator.ge)

    def __bool__(self) -> bool:
        return self._compared(0, operator.ne)

    __hash__ = object.__hash__


class _Chosen(list[Any]):
    """Numbers of what was chosen, as a list: of all that could be. Each turn of a loop over it is for one that was."""

    def __init__(self, items: Any, pick: Pick) -> None:
        super().__init__(items)
        self.pick = pick

    def __iter__(self) -> Iterator[Any]:
        return self.pick.turns(super().__iter__())


# --- chosen rows ------------------------------------------------------------------------------------------------------


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
            if self.loop.guards.take(sys._getframe(1), [_node(self.mask)], chosen(i), loop=True) is None:
                raise Unfit("what a loop over them does cannot be checked")
            yield item


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
        """Python wants a number: only to ask whether there are rows."""
        guards, node = self.pick.loop.guards, _node(self.pick.mask)
        body = bodies(sys._getframe(1).f_code, loop=False).get(sys._getframe(1).f_lineno)
        if self.dim or body is None or body.some != body.wanted:
            raise Unfit("their number is used")
        if guards.take(sys._getframe(1), [node], lambda v: bool(v[0].any()) == body.some) is None:
            raise Unfit("what is done depends on whether there are any, in a way that cannot be checked")
        return self.full.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return self.pick.turns(iter(self.pick.loop.unrolled(self)))

    def tolist(self) -> list[Any]:
        return _Chosen([x.tolist() for x in self.pick.loop.unrolled(self)], self.pick)

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


# --- what is done with them -------------------------------------------------------------------------------------------

_WHERE: set[Any] = {torch.where, Tensor.where}
_NONZERO: set[Any] = {torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere}
_LIKE: set[Any] = {torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.Tensor.new_empty}
_CAT: set[Any] = {torch.cat, torch.concat, torch.concatenate}
_SPLIT: set[Any] = {torch.split, Tensor.split, Tensor.split_with_sizes, torch.split_with_sizes}
#: (function, in place) -> whether it adds.
_WRITES: dict[Any, tuple[bool, bool]] = {
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
_ADDS: set[Any] = {Tensor.__add__, Tensor.__iadd__, Tensor.add, Tensor.add_, torch.add}


class ChosenRows(KnownSizes):
    """While open, indexing by masks whose values are not known, and what is done with that, is traced as above."""

    def __init__(self, known: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__(known)
        self.picks: dict[Any, Pick] = {}
        self.guards = Guards()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _concerned((args, kwargs)) and not self._chooses(func, args):
            changed = args[0] if self.guards.open and tracing() and _changes(func) else None
            if isinstance(changed, FakeTensor) and not self.guards.allow_write(_node(changed)):
                raise Unfit("whether there are any changes more than rows")
            return super().__torch_function__(func, types, args, kwargs)
        return self.call(func, args, kwargs)

    def _chooses(self, func: Any, args: Any) -> bool:
        """Does a call on tensors choose rows by values that are not known?"""
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            if not hidden(args[1]) or (func is Tensor.__setitem__ and not _many(args[2])):
                return False
            masks = [i for i in _tuple(args[1]) if isinstance(i, Tensor) and i.dtype == torch.bool and i.dim()]
            return bool(masks) and any(self.known(m) is None for m in masks)
        if func in _NONZERO or (func in _WHERE and len(args) == 1):
            return isinstance(args[0], FakeTensor) and self.known(args[0]) is None
        if func in (torch.bincount, Tensor.bincount):
            return isinstance(args[0], FakeTensor) and self.known(args[0]) is None
        return False

    # --- calls

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is Tensor.__getitem__:
            found = self._picked(args[0], args[1])
            if isinstance(args[0], Tensor) and isinstance(found, Rows):
                found.read = args[0], _node(args[0])
            return found
        if func is Tensor.__setitem__:
            return self._put(args[0], args[1], args[2])
        if func in _NONZERO or (func in _WHERE and len(args) == 1):
            return self._chosen(args[0], func in _WHERE or bool(kwargs.get("as_tuple")))
        if func in (torch.bincount, Tensor.bincount):
            return self._bins(*args, **kwargs)
        if func in _WRITES:
            return self._written(func, *args, **kwargs)
        if func in _CAT:
            return self._cat(*args, **kwargs)
        if func in _SPLIT and not isinstance(args[0], Rows):
            return self._split(*args, **kwargs)
        made = self._rowwise(func, args, kwargs)
        old = args[0]
        adds = func in _ADDS and len(args) == 2 and not kwargs and isinstance(old, Rows) and isinstance(made, Rows)
        if adds and old.more is None and made.full.shape == old.full.shape:
            made.read, made.more = old.read, args[1]
        return made

    def pick(self, mask: Tensor) -> Pick:
        """The choice that a mask is; the same one for a mask that is equal, or another view of it."""
        key = _key(mask)
        if key not in self.picks:
            flat = (mask if mask.dtype == torch.bool else mask != 0).reshape(-1)
            self.picks[key] = Pick(self, flat, tuple(mask.shape))
        found = self.picks[key]
        return found if found.grid == tuple(mask.shape) else self._regridded(found, tuple(mask.shape))

    def _regridded(self, pick: Pick, grid: tuple[int, ...]) -> Pick:
        key = (id(pick), grid)
        if key not in self.picks:
            self.picks[key] = Pick(self, pick.mask, grid)
        return self.picks[key]

    def _coordinates(self, pick: Pick) -> list[Rows]:
        """The indices of chosen places, one for each dim of the mask."""
        found, inner = [], pick.n
        for d, size in enumerate(pick.grid):
            inner //= size
            along = torch.arange(pick.n, device=pick.mask.device)
            along = along // inner if inner > 1 else along
            found.append(Rows(along % size if d else along, 0, pick, d))
        return found

    def _chosen(self, x: Any, as_tuple: bool) -> Any:
        if isinstance(x, Rows):
            raise Unfit("some of them are chosen again")
        each = self._coordinates(self.pick(x))
        if as_tuple:
            return tuple(each)
        place = 0 if len(each) == 1 else None
        return Rows(torch.stack([r.full for r in each], 1), 0, each[0].pick, place)

    def unrolled(self, rows: Rows) -> list[Any]:
        """The rows of an index, all of them, as constants: of a loop over those that were chosen. (Those that were not
        have no rows of their own to work on.)"""
        if rows.dim != 0 or constant(rows.full) is None or rows.pick.n > _UNROLLED:
            raise Unfit("Python loops over them")
        return list(rows.full.unbind(0))

    def number(self, x: Any, method: str) -> Any:
        """What `x.item()`, `x.tolist()` and `x.numpy()` give for whole numbers that are not known; None for others."""
        if isinstance(x, FakeTensor) and not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool:
            if method == "item" and x.numel() == 1:
                return self._counts(x.reshape(1))[0]
            if method in ("tolist", "numpy") and x.numel() <= _UNROLLED:
                found = self._counts(x)
                return np.array(found, dtype=object) if method == "numpy" else found
        return None

    def _counts(self, x: Tensor) -> Any:
        """`x.tolist()` of whole numbers that are not known, nested alike."""

        def level(at: tuple[int, ...]) -> Any:
            if len(at) < x.dim():
                return [level((*at, i)) for i in range(x.shape[len(at)])]
            whole = x if at else x.reshape(1)
            return Count(self, {(_key(x), at): Term(whole, at or (0,), 1)})

        return level(())

    def truth(self, x: Tensor, frame: FrameType) -> bool | None:
        """What a condition is to be that is made of whole numbers and masks; None if that is not known."""
        if not _of_numbers(x):
            return None
        body = self.guards.take(frame, [_node(x)], lambda v: bool(v[0]))
        return None if body is None else body.wanted

    def check(self) -> None:
        """At the end. Raises Unfit if what was taken for granted does more than write rows."""
        if not self.guards.unchanged():
            raise Unfit("whether there are any changes more than rows")

    def _allow(self, pick: Pick) -> None:
        if not self.guards.allow(_node(pick.mask)):
            raise Unfit("what is done with them depends on more than whether there are any")

    def _bins(self, x: Any, weights: Any = None, minlength: int = 0) -> Tensor:
        if isinstance(x, Rows) or weights is not None or not minlength:
            raise Unfit("bincount has a size that depends on values")
        zeros = torch.zeros(minlength, dtype=torch.int64, device=x.device)
        return zeros.scatter_add(0, x.reshape(-1).long(), torch.ones_like(x.reshape(-1), dtype=torch.int64))

    # --- reading

    def _picked(self, x: Any, index: Any) -> Any:
        each = _tuple(index)
        if isinstance(x, Tensor) and len(each) == 1 and isinstance(each[0], slice) and _bounded(each[0]):
            return self._stretch(x, _from(each[0]), each[0].stop)
        masks = [i for i in each if isinstance(i, (Tensor, Rows)) and _dtype(i) == torch.bool and i.ndim]
        if any(isinstance(m, Rows) for m in masks) or (masks and isinstance(x, Rows)):
            raise Unfit("some of them are chosen again")
        if masks and each[0] is masks[0] and len(masks) == 1 and not any(isinstance(i, Rows) for i in each):
            mask = masks[0]
            pick = self.pick(mask)
            flat = Rows(x.reshape(pick.n, *x.shape[mask.dim() :]).clone(), 0, pick)
            return flat if len(each) == 1 else self._rowwise(Tensor.__getitem__, (flat, (slice(None), *each[1:])), {})
        found: list[Any] = []
        for i in each:
            found += self._coordinates(self.pick(i)) if any(i is m for m in masks) else [i]
        return self._rowwise(Tensor.__getitem__, (x, found[0] if len(found) == 1 else tuple(found)), {})

    def _stretch(self, x: Tensor, start: Any, stop: Any) -> Rows:
        """Rows of a tensor from one place to another one: those whose position lies between."""
        n = x.shape[0]
        stop = n if stop is None else stop
        ends = [e.key if isinstance(e, Count) else e for e in (start, stop)]
        key = ("stretch", n, *ends)
        if key not in self.picks:
            at = torch.arange(n, device=x.device)
            low, high = (e.tensor() if isinstance(e, Count) else e for e in (start, stop))
            self.picks[key] = Pick(self, (at >= low) & (at < high), (n,), (ends[0], ends[1]))
        return Rows(x.clone(), 0, self.picks[key])

    def _split(self, x: Tensor, sizes: Any = None, dim: int = 0, **other: Any) -> Any:
        sizes = other.get("split_size", other.get("split_sizes", sizes))
        if not isinstance(sizes, (list, tuple, np.ndarray)) or dim not in (0, -x.dim()):
            raise Unfit("a tensor is split by a number that is not known")
        start: Any = 0
        found = []
        for i, size in enumerate(sizes):
            stop = start + size
            found.append(self._stretch(x, start, x.shape[0] if i == len(sizes) - 1 else stop))
            start = stop
        return tuple(found)

    def _cat(self, parts: Any, dim: int = 0, **other: Any) -> Any:
        rows = [x for x in parts if isinstance(x, Rows)]
        dim = dim % rows[0].ndim
        if any(x.dim != dim for x in rows):
            return self._rowwise(torch.cat, (list(parts), dim), {})
        bounds = [x.pick.bounds for x in rows]
        whole = (
            len(rows) == len(parts)
            and all(bounds)
            and all(a is not None and b is not None and a[1] == b[0] for a, b in pairwise(bounds))
        )
        if whole and bounds[0] is not None and bounds[0][0] == 0:  # stretch after stretch: where they were before
            total: Any = None
            for x in rows:
                part = torch.where(_along(x.pick.mask, dim, x.ndim), x.full, 0)
                total = part if total is None else total + part
            return total
        if dim or len(rows) != len(parts):
            raise Unfit("they are joined with other rows")
        key = ("joined", *(id(x.pick) for x in rows))
        if key not in self.picks:
            mask = torch.cat([x.pick.mask for x in rows])
            self.picks[key] = Pick(self, mask, (mask.shape[0],))
        return Rows(torch.cat([x.full for x in rows]), 0, self.picks[key])

    # --- writing

    def _put(self, x: Any, index: Any, value: Any) -> None:
        """`x[index] = value`"""
        each = _tuple(index)
        if isinstance(x, Rows):
            raise Unfit("some of them are replaced")
        if len(each) == 1 and isinstance(each[0], slice) and _bounded(each[0]) and isinstance(value, Rows):
            pick = self._stretch(x, _from(each[0]), each[0].stop).pick
        elif len(each) == 1 and isinstance(each[0], Tensor) and each[0].dtype == torch.bool:
            pick = self.pick(each[0])
        elif len(each) == 1 and isinstance(each[0], Rows) and isinstance(value, Rows):
            self._replace(x, 0, each[0], value)
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
        self._allow(pick)
        mask = pick.mask.reshape(*pick.grid, *[1] * (x.dim() - len(pick.grid)))
        if added is not None:
            x.add_(torch.where(mask, added.reshape(*pick.grid, *added.shape[1:]), 0))
            return
        x.copy_(torch.where(mask, value, x))

    def _written(self, func: Any, x: Any, dim: int, index: Any, source: Any, **options: Any) -> Any:
        """`x.index_add(dim, index, source)` and the like."""
        inplace, adds = _WRITES[func]
        picks = {r.pick.mask for r in (index, source) if isinstance(r, Rows)}
        if isinstance(x, Rows) or len(picks) != 1 or not isinstance(source, Rows):
            raise Unfit("they are written to other rows")
        self._allow(source.pick)
        if not adds:
            made = x if inplace else x.clone()
            self._replace(made, dim, index, source)
        else:
            at = index.full if isinstance(index, Rows) else index
            masked = torch.where(_along(source.pick.mask, source.dim, source.ndim), source.full, 0)
            made = func(x, dim, at, masked, **options)
        if made is not x:
            self.guards.written[id(made)] = made, x
        return made

    def _replace(self, x: Tensor, dim: int, index: Rows, value: Rows) -> None:
        """`x[i] = value`, where i names no row twice (else torch does not say what comes out)."""
        if dim or index.pick.mask is not value.pick.mask or value.dim or index.full.dim() != 1:
            raise Unfit("they are written to other rows")
        self._allow(index.pick)
        mask = index.pick.mask
        if (added := _added(x, value)) is not None:
            x.index_add_(0, index.full, torch.where(_along(mask, 0, value.ndim), added, 0))
            return
        masked = torch.where(_along(mask, 0, value.ndim), value.full, 0)
        if index.place == 0 and len(index.pick.grid) == 1:  # row i to row i
            x.copy_(torch.where(_along(mask, 0, x.dim()), value.full, x))
            return
        new = torch.zeros_like(x).index_add(0, index.full, masked.to(x.dtype))
        hit = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device).index_add(0, index.full, mask.long())
        x.copy_(torch.where(_along(hit > 0, 0, x.dim()), new, x))

    # --- everything else

    def _rowwise(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call on all rows, if it is one on each."""
        rows = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Rows)]
        if not rows:
            raise Unfit(f"their number goes into {getattr(func, '__name__', func)}")
        masks = {id(r.pick.mask) for r in rows}
        if len(masks) > 1:
            raise Unfit("they meet other ones")
        pick = rows[0].pick
        sizes = getattr(func, "__name__", "") in _SIZED
        args, kwargs = pytree.tree_map(lambda x: _whole(x, pick, sizes), (args, kwargs))
        before = {_node(r.full): r for r in rows}  # now: a tensor that a call gives back is that call from then on
        graph = _node(rows[0].full).graph
        last = next(iter(reversed(graph.nodes)))
        made = self._plainly(func, args, kwargs)
        new = []
        while last.next.op != "root":
            last = last.next
            new.append(last)
        dims = untraced(follow, new, {n: r.dim for n, r in before.items()})

        def wrap(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            node = _node(x)
            if node in before and node not in dims:
                return before[node]
            if dims.get(node) is not None:
                keeps = rows[0].place if len(rows) == 1 and func in (Tensor.long, Tensor.to) else None
                return Rows(x, dims[node], pick, keeps)  # type: ignore[arg-type]
            if func in _LIKE:
                return Rows(x, rows[0].dim, pick)
            return x

        return pytree.tree_map(wrap, made)

    def _plainly(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


def _added(x: Tensor, value: Rows) -> Tensor | None:
    """What is added to rows of x, where they are what is written back to it: of `x[i] += y`."""
    if value.read is None or value.more is None or value.read[0] is not x or value.read[1] is not _node(x):
        return None
    more = value.more
    if isinstance(more, Rows):
        return more.full.expand(value.full.shape) if more.dim == value.dim else None
    return None


def _changes(func: Any) -> bool:
    """Does a function of torch's change its first argument?"""
    name = getattr(func, "__name__", "")
    return (
        name == "__setitem__"
        or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
        or (name.endswith("_") and not name.endswith("__"))
    )


#: Functions that take sizes, of which one may be the number of rows.
_SIZED = {"view", "reshape", "expand", "unflatten", "new_zeros", "new_ones", "new_full", "new_empty"}


def _whole(x: Any, pick: Pick, sizes: bool) -> Any:
    if isinstance(x, Rows):
        return x.full
    if isinstance(x, Count):
        if not sizes or x.key != pick.count().key:
            raise Unfit("their number is used")
        return pick.n
    return x


def _along(mask: Tensor, dim: int, ndim: int) -> Tensor:
    return mask.reshape([-1 if d == dim else 1 for d in range(ndim)])


def _concerned(x: Any) -> bool:
    return any(isinstance(leaf, (Rows, Count)) for leaf in _leaves(x))


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, (tuple, list)):
        for y in x:
            yield from _leaves(y)
    elif isinstance(x, dict):
        for y in x.values():
            yield from _leaves(y)
    elif isinstance(x, slice):
        yield from (x.start, x.stop)
    else:
        yield x


def _tuple(index: Any) -> tuple[Any, ...]:
    return tuple(index) if isinstance(index, (tuple, list)) else (index,)


def _from(s: slice) -> Any:
    return 0 if s.start is None else s.start


def _bounded(s: slice) -> bool:
    return s.step is None and (isinstance(s.start, Count) or isinstance(s.stop, Count))


def _many(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1


def _dtype(x: Any) -> torch.dtype:
    found: torch.dtype = x.full.dtype if isinstance(x, Rows) else x.dtype
    return found


def _node(x: Tensor) -> fx.Node:
    node = traced_node(x)
    if node is None:
        raise Unfit("a tensor among them is not traced")
    return node


#: Ops that leave a mask what it is, row by row.
_SAME = {"reshape", "view", "_unsafe_view", "flatten", "clone", "contiguous", "to", "_to_copy", "squeeze", "unsqueeze"}


def _key(x: Tensor) -> Any:
    """Equal for tensors that are computed in the same way, other views of the same rows included."""
    node = traced_node(x)
    return _structure(node) if node is not None else id(x)


def _structure(node: fx.Node) -> Any:
    while isinstance(node.target, OpOverload) and values.op_name(node.target) in _SAME:
        before = node.args[0]
        assert isinstance(before, fx.Node)
        if _bool(before) != _bool(node):
            break
        node = before
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return node
    if values.op_name(node.target) not in ("select", "slice", "eq", "ne", "gt", "any", "index", "bool", "to"):
        return node
    return (node.target, *map(_frozen, node.args), *((k, _frozen(v)) for k, v in node.kwargs.items()))


def _bool(node: fx.Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) == torch.bool


def _frozen(x: Any) -> Any:
    if isinstance(x, fx.Node):
        return _structure(x)
    return tuple(map(_frozen, x)) if isinstance(x, (tuple, list)) else (type(x), x)


def _of_numbers(x: Tensor) -> bool:
    """Is a value a comparison, count or combination of whole numbers and masks?"""
    node = traced_node(x)
    if node is None:
        return False
    val = node.meta.get("val")
    whole = isinstance(val, Tensor) and not val.is_floating_point() and not val.is_complex()
    before = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    return whole and all(not n.meta["val"].is_floating_point() for n in before)


# --- is it done to each row by itself? --------------------------------------------------------------------------------


def follow(new: Sequence[fx.Node], rows: dict[fx.Node, int]) -> dict[fx.Node, int | None]:
    """Along which dim each of these calls has the rows that its operands have along theirs; None: it hangs on no rows.

    Raises Unfit for an op that mixes rows, as the rule of its canonical form says: rows are one of the factors that may
    be split, in every operand that has rows, in no other one, and in every result.
    """
    graph = fx.Graph()
    for name in ("mesh", "rng"):
        graph.placeholder(name).meta["value"] = None
    env: dict[fx.Node, fx.Node] = {}
    for n in new:
        for x in n.all_input_nodes:
            if x not in env and x not in new:
                env[x] = graph.placeholder(f"given_{len(env)}")
                env[x].meta = {"value": values.typed(x.meta.get("val"), None, (), {})}
    given = {env[n]: d for n, d in rows.items() if n in env}
    results: list[fx.Node] = []
    for n in new:
        if n.op != "call_function":
            if n.op == "get_attr":
                env[n] = graph.placeholder(f"constant_{len(env)}")
                env[n].meta = {"value": values.typed(n.meta.get("val"), None, (), {})}
                continue
            raise Unfit(f"{n.op} {n.target}")
        copy = graph.node_copy(n, env.__getitem__)
        copy.target = _functional(n.target)
        copy.meta = {"source": Source(), "value": values.typed(n.meta.get("val"), copy.target, copy.args, {})}
        env[n] = copy
        if isinstance(copy.meta["value"], Value):
            results.append(n)
    graph.output(tuple(env[n] for n in results))
    found = rewritten(graph)
    if found.refused:
        raise Unfit(str(next(iter(found.refused.values()))))
    names = {n.name: d for n, d in given.items()}
    dims: dict[fx.Node, Any] = {}
    for n in found.graph.nodes:
        if n.op == "placeholder":
            dims[n] = names.get(n.name)
        elif n.target is operator.getitem:
            many = dims[n.args[0]]
            dims[n] = many[n.args[1]] if isinstance(many, tuple) else many
        elif n.op == "call_function":
            dims[n] = _through(n, dims)
    output: Any = found.graph.output_node().args[0]
    return {n: dims[out] for n, out in zip(results, output, strict=True)}


def _functional(target: Any) -> Any:
    """The op without its in-place mark."""
    if isinstance(target, OpOverload) and target._schema.is_mutable:
        name = target._schema.name.partition("::")[2].rstrip("_")
        packet = getattr(aten, name, None)
        plain = getattr(packet, target._overloadname, None)
        if plain is None or name in ("copy", "index_add", "scatter_add"):
            raise Unfit(f"{target} writes to them")
        return plain
    return target


def _through(node: fx.Node, dims: dict[fx.Node, Any]) -> Any:
    operands = operands_of(node)
    mine = [dims[x] for x in operands]
    if all(d is None for d in mine):
        return None
    rule = registry.find(node.target)
    if rule is None:
        raise Unfit(f"{node.target} has no rule")
    sig = rule.signature(call_of(node))
    factors = {sig.inputs[i][d] for i, d in enumerate(mine) if d is not None}
    rows = next(iter(factors))
    if len(factors) > 1 or not rows or set(rows) & (sig.summed | sig.whole):
        raise Unfit(f"{node.target} mixes them")
    for i, d in enumerate(mine):
        if any(set(rows) & set(f) for at, f in enumerate(sig.inputs[i]) if at != d):
            raise Unfit(f"{node.target} mixes them")
    found = []
    for out in sig.outputs:
        at = [d for d, f in enumerate(out) if f == rows]
        if not at:
            raise Unfit(f"{node.target} mixes them")
        found.append(at[0])
    return tuple(found) if isinstance(node.meta["value"], tuple) else found[0]
