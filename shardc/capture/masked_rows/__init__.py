"""Rows chosen by a mask, while a model is traced: a tensor of all rows and the mask, in place of a size that depends on
values.

    i = torch.where(mask)[0]                    Rows(arange(n), mask)
    y = expert(x[i]) * w[i, None]               Rows(expert(x) * w[:, None], mask)      what each row by itself becomes
    out.index_add_(0, i, y)                     out.index_add_(0, arange(n), where(mask, expert(x) * w[:, None], 0))

That is what loops over experts consist of. Ops see all rows, so the traced program has fixed sizes; rows that were not
chosen are left out where they would be written. It is the same if every op in between works on each row by itself,
which is checked op by op: the rules (shardc.rules) know what may be split by rows. Anything else is refused, and so is
any number of rows that Python sees, unless it only asks whether there are any: then the answer is yes, since what is
done with no rows changes nothing.

Sorted rows need no more than this: the rows from `ends[e - 1]` to `ends[e]` are those whose position lies between. Then
`Count` is a number that is not known, as an expression of the traced tensors that it is made of.

All experts on all rows is as many times too much work as there are experts: shardc.capture.expert_loops makes the
experts op of it. The two are apart so that this one need not know what a mixture of experts looks like: what it gives
is right for any loop.

    rows.py, count.py    what the model sees in place of chosen rows, and of their number
    __init__.py          `ChosenRows`, the mode under which the model is traced: calls that choose, read and join rows
    kinds.py             what they are to the model's `isinstance`
    reductions.py        sums, means and losses of them
    writes.py            writing them back to a tensor
    rowwise.py           is a call one on each row by itself? by the rules
    traced.py            what the graph in the making says of a tensor
    arguments.py         indices and slices of calls on chosen rows; unfit.py: the error that all files here raise
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from shardc.capture.constants import constant
from shardc.capture.data_dependent_sizes import KnownSizes, hidden
from shardc.capture.guards import Guards
from shardc.capture.masked_rows.arguments import (
    along,
    as_rows,
    as_tuple,
    bounded,
    changes_first,
    concerned,
    dtype_of,
    many,
    start_of,
)
from shardc.capture.masked_rows.count import Count, Term
from shardc.capture.masked_rows.reductions import behind, reduced
from shardc.capture.masked_rows.rows import Pick, Rows
from shardc.capture.masked_rows.rowwise import follow
from shardc.capture.masked_rows.traced import key_of, node_of, of_numbers
from shardc.capture.masked_rows.unfit import DrawnError, Unfit
from shardc.capture.masked_rows.writes import WRITES, put, written
from shardc.ir import source
from shardc.torch_modes import untraced
from shardc.torch_private import FakeTensor, OpOverload, pytree, tracing

aten = torch.ops.aten
#: A loop over chosen rows themselves (`for i, j in mask.nonzero()`) is unrolled up to so many.
UNROLLED = 1024
_WHERE: set[Any] = {torch.where, Tensor.where}
_NONZERO: set[Any] = {torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere}
_SELECT: set[Any] = {torch.masked_select, Tensor.masked_select}
_LIKE: set[Any] = {torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.Tensor.new_empty}
_CAT: set[Any] = {torch.cat, torch.concat, torch.concatenate}
_SPLIT: set[Any] = {torch.split, Tensor.split, Tensor.split_with_sizes, torch.split_with_sizes}
_ADDS: set[Any] = {Tensor.__add__, Tensor.__iadd__, Tensor.add, Tensor.add_, torch.add}


class ChosenRows(KnownSizes):
    """While open, indexing by masks whose values are not known, and what is done with that, is traced as above."""

    def __init__(self, known: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__(known)
        self.picks: dict[Any, Pick] = {}
        self.guards = Guards()
        self.means: set[fx.Node] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not concerned((args, kwargs)) and not self._chooses(func, args):
            changed = args[0] if self.guards.open and tracing() and changes_first(func) else None
            if isinstance(changed, FakeTensor) and not self.guards.allow_write(node_of(changed)):
                raise Unfit("whether there are any changes more than rows")
            return super().__torch_function__(func, types, args, kwargs)
        return self.call(func, args, kwargs)

    def _chooses(self, func: Any, args: Any) -> bool:
        """Does a call on tensors choose rows by values that are not known?"""
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            if not hidden(args[1]) or (func is Tensor.__setitem__ and not many(args[2])):
                return False
            masks = [i for i in as_tuple(args[1]) if isinstance(i, Tensor) and i.dtype == torch.bool and i.dim()]
            return bool(masks) and any(self.known(m) is None for m in masks)
        if func in _SELECT:
            return len(args) == 2 and args[0].shape == args[1].shape and self.known(args[1]) is None
        if func in _NONZERO or (func in _WHERE and len(args) == 1):
            return isinstance(args[0], FakeTensor) and self.known(args[0]) is None
        if func in (torch.bincount, Tensor.bincount):
            return isinstance(args[0], FakeTensor) and self.known(args[0]) is None
        return False

    # --- calls

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = as_rows((args, kwargs))
        if func is Tensor.__getitem__ or func in _SELECT:
            rows = self._picked(args[0], args[1])
            if isinstance(args[0], Tensor) and isinstance(rows, Rows):
                rows.read = args[0], node_of(args[0])
            return rows
        if func is Tensor.__setitem__:
            return put(self, args[0], args[1], args[2])
        if func in _NONZERO or (func in _WHERE and len(args) == 1):
            return self._chosen(args[0], func in _WHERE or bool(kwargs.get("as_tuple")))
        if func in (torch.bincount, Tensor.bincount):
            return self._bins(*args, **kwargs)
        if func in WRITES:
            return written(self, func, *args, **kwargs)
        if func in _CAT:
            return self._cat(*args, **kwargs)
        if func in _SPLIT and not isinstance(args[0], Rows):
            return self._split(*args, **kwargs)
        if (value := reduced(func, args, kwargs)) is not None:
            return value
        result = self._rowwise(func, args, kwargs)
        old = args[0]
        adds = func in _ADDS and len(args) == 2 and not kwargs and isinstance(old, Rows) and isinstance(result, Rows)
        if adds and old.more is None and result.full.shape == old.full.shape:
            result.read, result.more = old.read, args[1]
        return result

    def pick(self, mask: Tensor) -> Pick:
        """The choice that a mask is; the same one for a mask that is equal, or another view of it."""
        key = key_of(mask)
        if key not in self.picks:
            flat = (mask if mask.dtype == torch.bool else mask != 0).reshape(-1)
            self.picks[key] = Pick(self, flat, tuple(mask.shape))
        chosen = self.picks[key]
        return chosen if chosen.grid == tuple(mask.shape) else self._regridded(chosen, tuple(mask.shape))

    def _regridded(self, pick: Pick, grid: tuple[int, ...]) -> Pick:
        key = (id(pick), grid)
        if key not in self.picks:
            self.picks[key] = Pick(self, pick.mask, grid)
        return self.picks[key]

    def _coordinates(self, pick: Pick) -> list[Rows]:
        """The indices of chosen places, one for each dim of the mask."""
        coordinates, inner = [], pick.n
        for d, size in enumerate(pick.grid):
            inner //= size
            along = torch.arange(pick.n, device=pick.mask.device)
            along = along // inner if inner > 1 else along
            coordinates.append(Rows(along % size if d else along, 0, pick, d))
        return coordinates

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
        if rows.dim != 0 or constant(rows.full) is None or rows.pick.n > UNROLLED:
            raise Unfit("Python loops over them")
        return list(rows.full.unbind(0))

    def number(self, x: Any, method: str) -> Any:
        """What `x.item()`, `x.tolist()` and `x.numpy()` give for whole numbers that are not known; None for others."""
        if isinstance(x, FakeTensor) and not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool:
            if method == "item" and x.numel() == 1:
                return self._counts(x.reshape(1))[0]
            if method in ("tolist", "numpy") and x.numel() <= UNROLLED:
                numbers = self._counts(x)
                return np.array(numbers, dtype=object) if method == "numpy" else numbers
        return None

    def _counts(self, x: Tensor) -> Any:
        """`x.tolist()` of whole numbers that are not known, nested alike."""

        def level(position: tuple[int, ...]) -> Any:
            if len(position) < x.dim():
                return [level((*position, i)) for i in range(x.shape[len(position)])]
            whole = x if position else x.reshape(1)
            return Count(self, {(key_of(x), position): Term(whole, position or (0,), 1)})

        return level(())

    def truth(self, x: Tensor, frame: FrameType) -> bool | None:
        """What a condition is to be that is made of whole numbers and masks; None if that is not known."""
        if not of_numbers(x):
            return None
        body = self.guards.take(frame, [node_of(x)], lambda v: bool(v[0]))
        return None if body is None else body.wanted

    def check(self) -> None:
        """At the end. Raises Unfit if what was taken for granted does more than write rows."""
        if not self.guards.unchanged():
            raise Unfit("whether there are any changes more than rows")

    def allow(self, pick: Pick) -> None:
        if not self.guards.allow(node_of(pick.mask)):
            raise Unfit("what is done with them depends on more than whether there are any")

    def _bins(self, x: Any, weights: Any = None, minlength: int = 0) -> Tensor:
        if isinstance(x, Rows) or weights is not None or not minlength:
            raise Unfit("bincount has a size that depends on values")
        zeros = torch.zeros(minlength, dtype=torch.int64, device=x.device)
        return zeros.scatter_add(0, x.reshape(-1).long(), torch.ones_like(x.reshape(-1), dtype=torch.int64))

    # --- reading

    def _picked(self, x: Any, index: Any) -> Any:
        each = as_tuple(index)
        if isinstance(x, Tensor) and len(each) == 1 and isinstance(each[0], slice) and bounded(each[0]):
            return self.stretch(x, start_of(each[0]), each[0].stop)
        masks = [i for i in each if isinstance(i, (Tensor, Rows)) and dtype_of(i) == torch.bool and i.ndim]
        if any(isinstance(m, Rows) for m in masks) or (masks and isinstance(x, Rows)):
            raise Unfit("some of them are chosen again")
        if masks and each[0] is masks[0] and len(masks) == 1 and not any(isinstance(i, Rows) for i in each):
            mask = masks[0]
            pick = self.pick(mask)
            flat = Rows(x.reshape(pick.n, *x.shape[mask.dim() :]).clone(), 0, pick)
            return flat if len(each) == 1 else self._rowwise(Tensor.__getitem__, (flat, (slice(None), *each[1:])), {})
        indices: list[Any] = []
        for i in each:
            indices += self._coordinates(self.pick(i)) if any(i is m for m in masks) else [i]
        return self._rowwise(Tensor.__getitem__, (x, indices[0] if len(indices) == 1 else tuple(indices)), {})

    def stretch(self, x: Tensor, start: Any, stop: Any) -> Rows:
        """Rows of a tensor from one place to another one: those whose position lies between."""
        n = x.shape[0]
        stop = n if stop is None else stop
        ends = [e.key if isinstance(e, Count) else e for e in (start, stop)]
        key = ("stretch", n, *ends)
        if key not in self.picks:
            position = torch.arange(n, device=x.device)
            low, high = (e.tensor() if isinstance(e, Count) else e for e in (start, stop))
            self.picks[key] = Pick(self, (position >= low) & (position < high), (n,), (ends[0], ends[1]))
        return Rows(x.clone(), 0, self.picks[key])

    def _split(self, x: Tensor, sizes: Any = None, dim: int = 0, **other: Any) -> Any:
        sizes = other.get("split_size", other.get("split_sizes", sizes))
        if not isinstance(sizes, (list, tuple, np.ndarray)) or dim not in (0, -x.dim()):
            raise Unfit("a tensor is split by a number that is not known")
        start: Any = 0
        stretches = []
        for i, size in enumerate(sizes):
            stop = start + size
            stretches.append(self.stretch(x, start, x.shape[0] if i == len(sizes) - 1 else stop))
            start = stop
        return tuple(stretches)

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
                part = torch.where(along(x.pick.mask, dim, x.ndim), x.full, 0)
                total = part if total is None else total + part
            return total
        if dim or len(rows) != len(parts):
            raise Unfit("they are joined with other rows")
        key = ("joined", *(id(x.pick) for x in rows))
        if key not in self.picks:
            mask = torch.cat([x.pick.mask for x in rows])
            self.picks[key] = Pick(self, mask, (mask.shape[0],))
        return Rows(torch.cat([x.full for x in rows]), 0, self.picks[key])

    # --- everything else

    def _rowwise(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call on all rows, if it is one on each."""
        leaves = pytree.tree_leaves((args, kwargs))
        rows = [x for x in leaves if isinstance(x, Rows)]
        if not rows:
            raise Unfit(f"their number goes into {getattr(func, '__name__', func)}")
        masks = {id(r.pick.mask) for r in rows}
        if len(masks) > 1:
            raise Unfit("they meet other ones")
        if self.means and any(isinstance(x, FakeTensor) and behind(node_of(x), self.means) for x in leaves):
            raise Unfit("they meet their mean, which is nan without rows")
        pick = rows[0].pick
        sizes = getattr(func, "__name__", "") in _SIZED
        args, kwargs = pytree.tree_map(lambda x: _whole(x, pick, sizes), (args, kwargs))
        before = {node_of(r.full): r for r in rows}  # now: a tensor that a call gives back is that call from then on
        graph = node_of(rows[0].full).graph
        last = next(iter(reversed(graph.nodes)))
        result = self._plainly(func, args, kwargs)
        new = []
        while last.next.op != "root":
            last = last.next
            new.append(last)
        if any(map(_draws, new)):
            raise DrawnError(source.of_call())
        dims = untraced(follow, new, {n: r.dim for n, r in before.items()})

        def wrap(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            node = node_of(x)
            if node in before and node not in dims:
                return before[node]
            if dims.get(node) is not None:
                keeps = rows[0].place if len(rows) == 1 and func in (Tensor.long, Tensor.to) else None
                return Rows(x, dims[node], pick, keeps)  # type: ignore[arg-type]
            if func in _LIKE:
                return Rows(x, rows[0].dim, pick)
            return x

        return pytree.tree_map(wrap, result)

    def _plainly(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


def _draws(node: fx.Node) -> bool:
    """Does an op draw random numbers? Dropout that is off, or drops nothing, draws none."""
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    off = node.target is torch.ops.aten.dropout.default and (not node.args[1] or not node.args[2])
    return not off


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
