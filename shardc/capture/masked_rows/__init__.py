"""Trace rows selected by a mask as all rows plus the mask, instead of a size that depends on values.

    i = torch.where(mask)[0]                    Rows(arange(n), mask)
    y = expert(x[i]) * w[i, None]               Rows(expert(x) * w[:, None], mask)      the result of each row
    out.index_add_(0, i, y)                     out.index_add_(0, arange(n), where(mask, expert(x) * w[:, None], 0))

Loops over experts consist of this. Ops see all rows, so the traced program has fixed sizes; rows that were not
selected are left out where they would be written. The result is the same if every op in between works on each row
separately, which is checked op by op: the rules (shardc.rules) know what may be split by rows. Anything else is
refused, and so is any number of rows that Python sees, unless Python only tests whether there are any: then the answer
is yes, since operations on no rows change nothing.

Sorted rows need no more than this: the rows from `ends[e - 1]` to `ends[e]` are those whose position is in between.
Then `Count` is an unknown number, which the graph computes.

All experts on all rows is too much work by a factor of the number of experts: shardc.capture.expert_loops turns it into
the experts op. The two are separate so that this one need not know what a mixture of experts looks like: its result is
right for any loop.

    __init__.py     `ChosenRows`, the mode under which the model is traced: calls that select, read and join rows
    rows.py         what the model sees instead of selected rows, and of their number
    rowwise.py      checks by the rules that a call works on each row separately
    ends.py         writes, sums, means and losses of selected rows
    branches.py     branches that are always taken, as tested on random choices (shardc.passes.canonical.choices)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from shardc.capture.constants import is_random
from shardc.capture.data_dependent_sizes import KnownSizes, each, functions, hidden
from shardc.capture.masked_rows.branches import Guards
from shardc.capture.masked_rows.ends import ADDS, add, from_mean, put, reduced
from shardc.capture.masked_rows.rows import SIZED, UNROLLED, Count, DrawnError, Pick, Rows, Unfit, node_of, structure_of
from shardc.capture.masked_rows.rowwise import follow
from shardc.ir import source
from shardc.torch_modes import untraced
from shardc.torch_private import FakeTensor, pytree, traced_node, tracing

_WHERE, _NONZERO, _SELECT = functions("where"), functions("nonzero argwhere"), functions("masked_select")
_LIKE = functions("zeros_like ones_like empty_like full_like new_empty")
_CAT, _SPLIT, _BINS = functions("cat concat concatenate"), functions("split split_with_sizes"), functions("bincount")
_PLUS = functions("__add__ __iadd__ add add_")
#: Numbers of a tensor that do not depend on the number of rows.
_NUMBERS = {"dim", "ndim", "ndimension", "itemsize", "element_size", "get_device"}


class ChosenRows(KnownSizes):
    """A mode in which indexing by unknown masks, and everything done with the result, is traced as above."""

    def __init__(self, known: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__(known)
        self.picks: dict[Any, Pick] = {}
        self.guards = Guards()
        self.means: set[fx.Node] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(x, (Rows, Count)) for x in _leaves((args, kwargs))) and not self._chooses(func, args):
            changed = args[0] if self.guards.open and tracing() and _changes_first(func) else None
            if isinstance(changed, FakeTensor) and not self.guards.allow_write(node_of(changed)):
                raise Unfit("whether there are any changes more than rows")
            return super().__torch_function__(func, types, args, kwargs)
        return self.call(func, args, kwargs)

    def _chooses(self, func: Any, args: Any) -> bool:
        """Return whether a call on tensors selects rows by unknown values."""
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            if not hidden(args[1]) or (func is Tensor.__setitem__ and not _many(args[2])):
                return False
            masks = [i for i in each(args[1]) if isinstance(i, Tensor) and i.dtype == torch.bool and i.dim()]
            return any(self.known(m) is None for m in masks)
        if func in _SELECT:
            return len(args) == 2 and args[0].shape == args[1].shape and self.known(args[1]) is None
        if func in _NONZERO or func in _BINS or (func in _WHERE and len(args) == 1):
            return isinstance(args[0], FakeTensor) and self.known(args[0]) is None
        return False

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace a call that selects rows, or has some or their number among its arguments."""
        if func is Tensor.__getitem__ or func in _SELECT:
            rows = self._picked(args[0], args[1])
            if not isinstance(args[0], Rows) and isinstance(rows, Rows):
                rows.read = args[0], node_of(args[0])
            return rows
        if func is Tensor.__setitem__:
            return put(args[0], *self._target(args[0], args[1]), args[2])
        if func in _NONZERO or (func in _WHERE and len(args) == 1):
            return self._chosen(args[0], func in _WHERE or bool(kwargs.get("as_tuple")))
        if func in _BINS:
            return self._bins(*args, **kwargs)
        if func is torch.numel:
            return args[0].numel()
        if func in ADDS:
            return add(self, func, *args, **kwargs)
        if func in _CAT:
            return self._cat(*args, **kwargs)
        if func in _SPLIT and not isinstance(args[0], Rows):
            return self._split(*args, **kwargs)
        if (value := reduced(func, args, kwargs)) is not None:
            return value
        result = self._rowwise(func, args, kwargs)
        old = args[0]
        adds = func in _PLUS and len(args) == 2 and not kwargs and isinstance(old, Rows) and isinstance(result, Rows)
        if adds and old.more is None and result.full.shape == old.full.shape:
            result.read, result.more = old.read, args[1]
        return result

    # --- choices

    def pick(self, mask: Tensor) -> Pick:
        """Return the choice of a mask; equal masks, and other views of one, share the mask [n]."""
        key, grid = structure_of(mask), tuple(mask.shape)
        if key not in self.picks:
            flat = (mask if mask.dtype == torch.bool else mask != 0).reshape(-1)
            self.picks[key] = Pick(self, flat, grid)
        first = self.picks[key]
        return first if first.grid == grid else self.picks.setdefault((key, grid), Pick(self, first.mask, grid))

    def _coordinates(self, pick: Pick) -> list[Rows]:
        """Return the indices of selected places, one for each dim of the mask."""
        coordinates, inner = [], pick.n
        for d, size in enumerate(pick.grid):
            inner //= size
            places = torch.arange(pick.n, device=pick.mask.device)
            places = places // inner if inner > 1 else places
            coordinates.append(Rows(places % size if d else places, 0, pick, d))
        return coordinates

    def _chosen(self, x: Any, as_tuple: bool) -> Any:
        if isinstance(x, Rows):
            raise Unfit("some of them are selected again")
        columns = self._coordinates(self.pick(x))
        if as_tuple:
            return tuple(columns)
        return Rows(torch.stack([r.full for r in columns], 1), 0, columns[0].pick, 0 if len(columns) == 1 else None)

    def _bins(self, x: Any, weights: Any = None, minlength: int = 0) -> Tensor:
        if isinstance(x, Rows) or weights is not None or not minlength:
            raise Unfit("bincount has a size that depends on values")
        zeros = torch.zeros(minlength, dtype=torch.int64, device=x.device)
        return zeros.scatter_add(0, x.reshape(-1).long(), torch.ones_like(x.reshape(-1), dtype=torch.int64))

    # --- values that Python reads

    def number(self, x: Any, method: str) -> Any:
        """Return the result of `x.item()`, `x.tolist()`, `x.numpy()` for unknown integers; None for others."""
        if not isinstance(x, FakeTensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            return None
        if method == "item" and x.numel() == 1:
            return Count(self, x.reshape(()))
        if method in ("tolist", "numpy") and x.numel() <= UNROLLED:
            return np.array(self._counts(x), dtype=object) if method == "numpy" else self._counts(x)
        return None

    def _counts(self, x: Tensor) -> Any:
        """Return `x.tolist()` of unknown integers, with the same nesting."""
        return [self._counts(x[i]) for i in range(x.shape[0])] if x.dim() else Count(self, x)

    def truth(self, x: Tensor) -> bool | None:
        """Return the assumed value of a condition on integers and masks; None if it cannot be assumed."""
        node = traced_node(x)
        made_of = [] if node is None else [n.meta.get("val") for n in (node, *node.all_input_nodes)]
        if node is None or any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in made_of):
            return None
        body = self.guards.take([node], lambda known: bool(known[0]))
        return None if body is None else body.wanted

    def check(self) -> None:
        """Raise Unfit, at the end, if assumed branches do more than write rows."""
        if not self.guards.unchanged():
            raise Unfit("whether there are any changes more than rows")

    def allow(self, pick: Pick) -> None:
        if not self.guards.allow(node_of(pick.mask)):
            raise Unfit("an operation on them depends on more than whether there are any")

    # --- reading and joining

    def _target(self, x: Any, index: Any) -> tuple[Pick, tuple[int, ...], Rows | None]:
        """Return where `x[index] = ...` writes: rows, their grid, and the places that an index names, if any."""
        if isinstance(x, Rows):
            raise Unfit("some of them are replaced")
        key: Any = keys[0] if len(keys := each(index)) == 1 else None
        if isinstance(key, Rows):
            grid = (key.pick.n,)
            straight = key.place == 0 and key.pick.grid == grid == x.shape[:1]
            return key.pick, grid, None if straight else key
        if _bounded(key):
            pick = self._stretch(x, key.start, key.stop).pick
        elif isinstance(key, Tensor) and key.dtype == torch.bool:
            pick = self.pick(key)
        else:
            raise Unfit("they are written to places of another form")
        return pick, pick.grid, None

    def _picked(self, x: Any, index: Any) -> Any:
        keys = each(index)
        if not isinstance(x, Rows) and len(keys) == 1 and _bounded(keys[0]):
            return self._stretch(x, keys[0].start, keys[0].stop)
        tensors = [(i, i.full if isinstance(i, Rows) else i) for i in keys if isinstance(i, Tensor)]
        masks = [i for i, full in tensors if full.dtype == torch.bool and full.dim()]
        if any(isinstance(m, Rows) for m in masks) or (masks and isinstance(x, Rows)):
            raise Unfit("some of them are selected again")
        if masks and keys[0] is masks[0] and len(masks) == 1 and not any(isinstance(i, Rows) for i in keys):
            pick = self.pick(masks[0])
            flat = Rows(x.reshape(pick.n, *x.shape[masks[0].dim() :]).clone(), 0, pick)
            return flat if len(keys) == 1 else self._rowwise(Tensor.__getitem__, (flat, (slice(None), *keys[1:])), {})
        indices: list[Any] = []
        for i in keys:
            indices += self._coordinates(self.pick(i)) if any(i is m for m in masks) else [i]
        return self._rowwise(Tensor.__getitem__, (x, indices[0] if len(indices) == 1 else tuple(indices)), {})

    def _stretch(self, x: Tensor, start: Any, stop: Any) -> Rows:
        """Return the rows of a tensor whose position is between two places."""
        n = x.shape[0]
        ends = [0 if start is None else start, n if stop is None else stop]
        bounds = getattr(ends[0], "key", ends[0]), getattr(ends[1], "key", ends[1])
        key = ("stretch", n, *bounds)
        if key not in self.picks:
            position = torch.arange(n, device=x.device)
            low, high = (e.tensor if isinstance(e, Count) else e for e in ends)
            self.picks[key] = Pick(self, (position >= low) & (position < high), (n,), bounds)
        return Rows(x.clone(), 0, self.picks[key])

    def _split(self, x: Tensor, sizes: Any = None, dim: int = 0, **other: Any) -> Any:
        sizes = other.get("split_size", other.get("split_sizes", sizes))
        if not isinstance(sizes, (list, tuple, np.ndarray)) or dim not in (0, -x.dim()):
            raise Unfit("a tensor is split by a number that is not known")
        ends = accumulate(sizes[:-1], initial=0)
        return tuple(self._stretch(x, start, stop) for start, stop in pairwise([*ends, None]))

    def _cat(self, parts: Any, dim: int = 0, **other: Any) -> Any:
        rows = [x for x in parts if isinstance(x, Rows)]
        dim = dim % rows[0].full.ndim
        if any(x.at != dim for x in rows):
            return self._rowwise(torch.cat, (list(parts), dim), {})
        bounds: list[Any] = [x.pick.bounds for x in rows]
        if len(rows) == len(parts) and all(bounds) and all(a[1] == b[0] for a, b in pairwise([(0, 0), *bounds])):
            return reduce(operator.add, (x.chosen() for x in rows))  # consecutive stretches: at their old places
        if dim or len(rows) != len(parts):
            raise Unfit("they are joined with other rows")
        key = ("joined", *(id(x.pick) for x in rows))
        if key not in self.picks:
            mask = torch.cat([x.pick.mask for x in rows])
            self.picks[key] = Pick(self, mask, (mask.shape[0],))
        return Rows(torch.cat([x.full for x in rows]), 0, self.picks[key])

    # --- everything else

    def _rowwise(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call on all rows, if it works on each row separately."""
        leaves = pytree.tree_leaves((args, kwargs))
        rows = [x for x in leaves if isinstance(x, Rows)]
        name = getattr(func, "__name__", str(func))
        if not rows:
            raise TypeError(f"{name} takes no number that depends on values")
        pick = rows[0].pick
        if any(r.pick.mask is not pick.mask for r in rows):
            raise Unfit("they are combined with other rows")
        if any(isinstance(x, FakeTensor) and from_mean(self, x) for x in leaves):
            raise Unfit("they are combined with their mean, which is nan without rows")
        before = {node_of(r.full): r for r in rows}  # before the call: a tensor that it returns gets its node
        last = next(iter(reversed(node_of(rows[0].full).graph.nodes)))

        def whole(x: Any) -> Any:
            if isinstance(x, Count):
                if name not in SIZED or x.key != pick.count.key:
                    raise Unfit("their number is used")
                return pick.n
            return x.full if isinstance(x, Rows) else x

        args, kwargs = pytree.tree_map(whole, (args, kwargs))
        result = func(*args, **kwargs)
        if not any(isinstance(x, Tensor) for x in pytree.tree_leaves(result)):
            name = getattr(getattr(func, "__self__", None), "__name__", name)  # of a property such as x.dtype
            if isinstance(result, int) and not isinstance(result, bool) and name not in _NUMBERS:
                raise Unfit(f"their number goes into {name}")
            return result
        new: list[fx.Node] = []
        while last.next.op != "root":
            last = last.next
            new.append(last)
        if any(map(_draws, new)):
            raise DrawnError(source.of_call())
        dims = untraced(follow, new, {n: r.at for n, r in before.items()})

        def wrap(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            node = node_of(x)
            if node in before and node not in dims:
                return before[node]
            dim = rows[0].at if func in _LIKE else dims.get(node)
            place = rows[0].place if len(rows) == 1 and func in (Tensor.long, Tensor.to) else None
            return x if dim is None else Rows(x, dim, pick, place)

        return pytree.tree_map(wrap, result)


def _draws(node: fx.Node) -> bool:
    """Return whether an op draws random numbers. Dropout that is off, or drops nothing, does not."""
    dropout = node.target is torch.ops.aten.dropout.default
    return is_random(node) and not (dropout and not (node.args[1] and node.args[2]))


def _leaves(x: Any) -> Iterator[Any]:
    """Yield arguments of a call, and the bounds of slices."""
    for leaf in pytree.tree_leaves(x):
        yield from (leaf.start, leaf.stop) if isinstance(leaf, slice) else (leaf,)


def _changes_first(func: Any) -> bool:
    """Return whether a function of torch changes its first argument."""
    name = getattr(func, "__name__", "")
    return (
        name == "__setitem__"
        or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
        or (name.endswith("_") and not name.endswith("__"))
    )


def _bounded(index: Any) -> bool:
    ends = (index.start, index.stop) if isinstance(index, slice) and index.step is None else ()
    return any(isinstance(e, Count) for e in ends)


def _many(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1
