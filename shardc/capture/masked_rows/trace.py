"""Trace a model that selects rows by unknown values: a selection is one op, its number of rows a symbol of torch's.

x[mask], masked_select           rows(x, mask, u0), where u0 = mask.sum().item()
torch.where(mask), nonzero       rows(arange(n), mask, u0): the coordinates of the places
x[ends[0] : ends[1]], split      rows(x, (position >= ends[0]) & (position < ends[1]), u1)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from shardc.capture.data_dependent_sizes import KnownSizes, each, functions, hidden
from shardc.capture.masked_rows.all_rows import ROWS, Unfit, node_of, value_of_all
from shardc.capture.masked_rows.branches import Guards, bodies, caller, harmless
from shardc.ir import source
from shardc.ir import types as values
from shardc.passes.canonical.choices import draws, leaves, run
from shardc.torch_modes import untraced
from shardc.torch_private import FakeTensor, OpOverload, expression, generic, pytree, traced_node, tracing

_WHERE, _NONZERO, _SELECT = functions("where"), functions("nonzero argwhere"), functions("masked_select")
_CAT, _SPLIT, _BINS = functions("cat concat concatenate"), functions("split split_with_sizes"), functions("bincount")
#: torch.export writes x[a:b] with unknown bounds as this op.
_SLICE = (torch.ops.aten.slice, torch.ops.aten.slice.Tensor)
#: `for i in rows` calls unbind(0).
_EACH = functions("unbind")
_ADDS = functions("index_add index_add_ scatter_add scatter_add_")
#: Most turns of an unrolled loop over selected rows (`for i, j in mask.nonzero()`), and numbers of a list.
UNROLLED = 1024
UNCHECKED = "an operation depends on whether there are any, in a way that cannot be checked"
CHANGES = "whether there are any changes more than rows"


class Count(torch.SymInt):
    """A number that Python read from a tensor. For the model, it is an instance of int."""

    __class__: Any = property(lambda self: int if source.is_models(sys._getframe(1).f_code.co_filename) else Count)


@dataclass(eq=False)
class Pick:
    """A choice of rows. mask: bool [n]. grid: the mask's shape. bounds: (from, to) of a stretch of rows."""

    mask: Tensor
    grid: tuple[int, ...]
    count: torch.SymInt
    bounds: tuple[Any, Any] | None = None

    def of(self, x: Tensor) -> Tensor:
        """Return the selected rows of a tensor that begins with the dims of the mask."""
        return ROWS(x.reshape(self.mask.shape[0], *x.shape[len(self.grid) :]).clone(), self.mask, self.count)  # type: ignore[no-any-return]

    def coordinates(self) -> list[Tensor]:
        """Return the indices of the selected places, one for each dim of the mask."""
        coordinates: list[Tensor] = []
        n = inner = self.mask.shape[0]
        for d, size in enumerate(self.grid):
            inner //= size
            places = torch.arange(n, device=self.mask.device)
            places = places // inner if inner > 1 else places
            coordinates.append(ROWS(places % size if d else places, self.mask, self.count))
        return coordinates


class SelectedRows(KnownSizes):
    """A mode that traces selections by unknown values as above."""

    def __init__(self, known: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__(known)
        self.picks: dict[Any, Pick] = {}
        self.by_symbol: dict[Any, Pick] = {}
        self.numbers: dict[Any, Count] = {}
        self.tensors: dict[Any, Tensor] = {}  # those that symbols were read from
        self.guards = Guards()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if tracing() and (result := self._selected(func, args, kwargs)) is not NotImplemented:
            return result
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call that selects nothing. Raises Unfit if it writes what depends on a branch."""
        adds = func in _ADDS
        if self.guards.open and tracing() and (adds or _changes_first(func)) and not self._rows_in(args[0]):
            picks = self._rows_in((args[1:], kwargs))
            if not all(self.guards.allow(node_of(p.mask)) for p in picks):
                raise Unfit("an operation on them depends on more than whether there are any")
            if not picks and isinstance(args[0], FakeTensor) and not self.guards.allow_write(node_of(args[0])):
                raise Unfit(CHANGES)
        result = super().__torch_function__(func, (), args, kwargs)
        if adds and result is not args[0]:
            self.guards.written[id(result)] = result, args[0]
        return result

    def _unknown(self, x: Any) -> bool:
        return isinstance(x, FakeTensor) and self.known(x) is None

    def _rows_in(self, x: Any) -> list[Pick]:
        """Return the choices whose number of rows is a size of a tensor in nested arguments."""
        sizes = (n for y in pytree.tree_leaves(x) for n in (y.shape if isinstance(y, Tensor) else (y,)))
        symbols = (s for n in sizes if isinstance(n, torch.SymInt) for s in expression(n).free_symbols)
        return list(dict.fromkeys(self.by_symbol[s] for s in symbols if s in self.by_symbol))

    # --- selections

    def _selected(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a call that selects rows by unknown values; NotImplemented for other calls."""
        if func is Tensor.__getitem__ or func is Tensor.__setitem__:
            return self._indexed(func, *args)
        if func in _SLICE and args[1] == 0 and args[4:] in ((), (1,)):
            return self._indexed(Tensor.__getitem__, args[0], slice(*args[2:4]))
        if func in _SELECT and len(args) == 2 and args[0].shape == args[1].shape:
            return self._indexed(Tensor.__getitem__, *args)
        if (func in _NONZERO or (func in _WHERE and len(args) == 1)) and self._unknown(args[0]):
            coordinates = self._pick(args[0]).coordinates()
            as_tuple = func in _WHERE or kwargs.get("as_tuple")
            return tuple(coordinates) if as_tuple else torch.stack(coordinates, 1)
        if func in _BINS and self._unknown(args[0]):
            return self._bins(*args, **kwargs)
        if func in _SPLIT:
            return self._split(*args, **kwargs)
        if func in _CAT:
            return self._cat(*args, **kwargs)
        if func is Tensor.__len__ and (picks := self._rows_in(args[0].shape[:1])):
            return self._len(picks[0])
        if func in _EACH and args[1:] in ((), (0,)) and (picks := self._rows_in(args[0].shape[:1])):
            return self._each(args[0], picks[0])
        return NotImplemented

    def _indexed(self, func: Any, x: Tensor, index: Any, *value: Any) -> Any:
        keys = each(index)
        bounds = [(k.start, k.stop) for k in keys if isinstance(k, slice) and k.step is None]
        if len(keys) == 1 and any(isinstance(e, torch.SymInt) for ends in bounds for e in ends):
            first: Any = self._stretch(x, *bounds[0])
            others: Sequence[Any] = ()
        else:
            many = not value or (isinstance(value[0], Tensor) and value[0].dim() > 0)
            masks = [k for k in keys if isinstance(k, Tensor) and hidden(k)] if many else []
            masks = [k for k in masks if self._unknown(k)]
            if not masks:
                return NotImplemented
            first, *others = [self._pick(k) if any(k is m for m in masks) else k for k in keys]
        if not value and self._rows_in(x):
            raise Unfit("some of them are selected again")
        if not value and isinstance(first, Pick) and not any(isinstance(k, Tensor | Pick) for k in others):
            rows = first.of(x)
            return self._run(func, (rows, (slice(None), *others)), {}) if others else rows
        places = [c for k in (first, *others) for c in (k.coordinates() if isinstance(k, Pick) else [k])]
        return self._run(func, (x, tuple(places), *value), {})

    def _pick(self, mask: Tensor) -> Pick:
        """Return the choice of a mask; equal masks, and other views of one, share the mask [n]."""
        if self._rows_in(mask):
            raise Unfit("some of them are selected again")
        key, grid = structure_of(mask), tuple(mask.shape)
        if key not in self.picks:
            self._choose(key, (mask.clone() if mask.dtype == torch.bool else mask != 0).reshape(-1), grid)
        first = self.picks[key]
        return self.picks.setdefault((key, grid), Pick(first.mask, grid, first.count))

    def _choose(self, key: Any, mask: Tensor, grid: tuple[int, ...], bounds: Any = None) -> None:
        count = self._read(mask.sum())
        generic(count)
        self.picks[key] = self.by_symbol[expression(count)] = Pick(mask, grid, count, bounds)

    def _stretch(self, x: Tensor, start: Any, stop: Any) -> Pick:
        """Return the choice of the rows of a tensor whose position is between two places."""
        n = x.shape[0]
        if self._rows_in(x):
            raise Unfit("some of them are selected again")
        bounds = tuple(expression(e) for e in (0 if start is None else start, n if stop is None else stop))
        key = ("stretch", n, *bounds)
        if key not in self.picks:
            low, high = map(self._tensor, bounds)
            position = torch.arange(n, device=x.device)
            self._choose(key, (position >= low) & (position < high), (n,), bounds)
        return self.picks[key]

    def _tensor(self, number: Any) -> Any:
        """Return a sum of numbers that were read from tensors, as a tensor."""
        if isinstance(number, int):
            return number
        terms = number.as_coefficients_dict().items()
        if any(not s.is_number and s not in self.tensors for s, _ in terms):
            raise Unfit("their number is used")
        return sum(int(k) if s.is_number else self.tensors[s] * int(k) for s, k in terms)

    def _bins(self, x: Tensor, weights: Any = None, minlength: int = 0) -> Tensor:
        if self._rows_in(x) or weights is not None or not minlength:
            raise Unfit("bincount has a size that depends on values")
        zeros = torch.zeros(minlength, dtype=torch.int64, device=x.device)
        return zeros.scatter_add(0, x.reshape(-1).long(), torch.ones_like(x.reshape(-1), dtype=torch.int64))

    def _split(self, x: Tensor, sizes: Any = None, dim: int = 0, **other: Any) -> Any:
        sizes = other.get("split_size", other.get("split_sizes", sizes))
        if not isinstance(sizes, (list, tuple, np.ndarray)) or not any(isinstance(n, torch.SymInt) for n in sizes):
            return NotImplemented
        if dim not in (0, -x.dim()):
            raise Unfit("a tensor is split by a number that is not known")
        ends = accumulate(sizes[:-1], initial=0)
        return tuple(self._stretch(x, start, stop).of(x) for start, stop in pairwise([*ends, None]))

    def _cat(self, parts: Any, dim: int = 0, **other: Any) -> Any:
        """Put consecutive stretches, from the first row to the last, at their old places."""
        picks = [self._rows_in(x.shape[:1]) for x in parts if isinstance(x, Tensor)] if dim == 0 else []
        bounds: list[Any] = [p[0].bounds for p in picks if len(p) == 1]
        if not parts or len(bounds) < len(parts) or not all(bounds):
            return NotImplemented
        (n,) = picks[0][0].grid
        if any(a[1] != b[0] for a, b in pairwise([(0, 0), *bounds])) or not self._is_end(bounds[-1][1], n):
            return NotImplemented
        whole = parts[0].new_zeros(n, *parts[0].shape[1:])
        for x, (pick,) in zip(parts, picks, strict=True):
            whole = whole.index_add(0, pick.coordinates()[0], x)
        return whole

    def _is_end(self, number: Any, n: int) -> bool:
        """Return whether a sum of numbers is n, as tested on choices of 2, 3, ... numbers while these are possible."""
        if isinstance(number, int):
            return number == n
        node = node_of(self._tensor(number))

        def value(count: int) -> int:
            return int(run([node], next(draws(leaves([node]), count)))[0])

        for count in range(2, 99):
            try:
                if untraced(value, count) != n:
                    return False
            except (RuntimeError, IndexError, KeyError):
                return count > 2
        return True

    # --- what Python reads

    def _each(self, x: Tensor, pick: Pick) -> Iterator[Any]:
        """Yield all rows of an index, as constants, each with a guard: those not selected have nothing to work on."""
        rows = untraced(value_of_all, node_of(x))
        if rows is None or len(rows) > UNROLLED:
            raise Unfit("Python loops over them")

        def chosen(i: int) -> Callable[[Any], bool]:
            return lambda known: bool(known[0][i])

        for i, row in enumerate(rows):
            if self.guards.take([node_of(pick.mask)], chosen(i), loop=True) is None:
                raise Unfit("a loop over them cannot be checked")
            numbers = untraced(row.flatten().tolist)
            listed = hasattr(x, "listed") and not row.dim()
            yield numbers[0] if listed else torch.stack([torch.full((), n) for n in numbers]).reshape(row.shape)

    def _len(self, pick: Pick) -> int:
        """Return the number of rows at a line that only tests whether there are any."""
        frame = caller()
        body = bodies(frame.f_code).get(frame.f_lineno)
        if body is None or body.some != body.wanted:
            raise Unfit("their number is used")
        if self.guards.take([node_of(pick.mask)], lambda known: bool(known[0].any()) == body.some) is None:
            raise Unfit(UNCHECKED)
        return pick.mask.shape[0]

    def number(self, x: Any, method: str) -> Any:
        """Return the result of `x.item()`, `x.tolist()`, `x.numpy()` for unknown integers; None for others."""
        if not isinstance(x, FakeTensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            return None
        if method == "tolist" and self._rows_in(x):  # a list of them is an index, too
            rows: Any = x.clone()
            rows.listed = True
            return rows
        if method == "item" and x.numel() == 1:
            return self._read(x.reshape(()))
        if method in ("tolist", "numpy") and not self._rows_in(x) and x.numel() <= UNROLLED:
            return np.array(self._counts(x), dtype=object) if method == "numpy" else self._counts(x)
        return None

    def _counts(self, x: Tensor) -> Any:
        """Return `x.tolist()` of unknown integers, with the same nesting."""
        return [self._counts(x[i]) for i in range(x.shape[0])] if x.dim() else self._read(x)

    def _read(self, x: Tensor) -> torch.SymInt:
        """Return the number in a tensor, the same for tensors that are computed in the same way."""
        key = structure_of(x)
        if key not in self.numbers:
            self.numbers[key] = number = Count(torch.ops.aten.item.default(x).node)  # type: ignore[no-untyped-call]
            self.tensors[expression(number)], self.guards.read[expression(number)] = x, node_of(x)
        return self.numbers[key]

    def truth(self, x: Tensor) -> bool | None:
        """Return the assumed value of a condition on integers and masks; None if it cannot be assumed."""
        if picks := self._rows_in(x):
            return self._len(picks[0]) > 0
        node = traced_node(x)
        made_of = [] if node is None else [n.meta.get("val") for n in (node, *node.all_input_nodes)]
        if node is None or any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in made_of):
            return None
        body = self.guards.take([node], lambda known: bool(known[0]))
        return None if body is None else body.wanted

    def compared(self, original: Callable[[Any], bool], comparison: torch.SymBool) -> bool:
        """Return the assumed outcome of a comparison of numbers that the model read; `original` knows others.

        It may only distinguish some rows from none, or be a check.
        """
        relation = expression(comparison)
        ours = hasattr(relation, "lhs") and self.guards.read.keys() >= relation.free_symbols
        if not ours or not source.is_models(caller().f_code.co_filename):  # torch compares, too
            return original(comparison)
        if (fine := harmless()) is not None:
            return fine
        constant, _ = (relation.lhs - relation.rhs).as_coeff_Add()
        splits = [[bool(relation.func(constant + sign * n, 0)) for n in (0, 1, 1 << 40)] for sign in (1, -1)]
        if not any(none != one == many for none, one, many in splits):
            raise Unfit("their number is compared with more than 0")
        nodes, value = self.guards.evaluated(relation)
        body = self.guards.take(nodes, lambda known: bool(value(known)), tried=3 if len(nodes) == 1 else 24)
        if body is None:
            raise Unfit(UNCHECKED)
        return body.wanted

    def check(self) -> None:
        """Raise Unfit, at the end, if assumed branches do more than write rows."""
        if not self.guards.unchanged():
            raise Unfit(CHANGES)


def _changes_first(func: Any) -> bool:
    """Return whether a function of torch changes its first argument."""
    name = getattr(func, "__name__", "")
    return (
        name == "__setitem__"
        or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__", "__iter__"))
        or (name.endswith("_") and not name.endswith("__"))
    )


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
        if len({getattr(n.meta.get("val"), "dtype", None) == torch.bool for n in (before, node)}) == 2:
            break
        node = before
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return node
    if values.op_name(node.target) not in _MAKERS:
        return node
    return node.target, values.typed_key((node.args, node.kwargs), structure_of)
