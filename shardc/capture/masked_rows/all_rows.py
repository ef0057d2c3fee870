"""Let every op of an exported graph see all rows, where the model selects rows by unknown values.

rows(x, mask, u0)                           x
view(y, [u0, 4])                            view(y, [n, 4])
x[mask] = y, x[i] += y, index_add           where(mask, y, x), x + where(mask, y, 0)
x[mask].mean()                              where(mask, x, 0).sum() / mask.sum()
cross_entropy(x[mask], y[mask])             cross_entropy(x, where(mask, y, -100))
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture.constants import is_random
from shardc.capture.rewrite import call_like
from shardc.capture.rewrite.functional_twins import arguments_of, mutates, twin_of
from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir import types as values
from shardc.ir.graph import operands_of, source_of
from shardc.ir.metadata import Value
from shardc.ir.source import Source
from shardc.passes.canonical import rewritten
from shardc.passes.canonical.choices import run
from shardc.passes.canonical.rewrite import Args
from shardc.rules.core import registry
from shardc.rules.core.op_call import call_of
from shardc.torch_private import expression, fake_mode_of, traced_node

aten = torch.ops.aten
torch.library.define("shardc::rows", "(Tensor x, Tensor mask, SymInt n) -> Tensor")
torch.library.register_fake("shardc::rows", lambda x, mask, n: x.new_empty((n, *x.shape[1:])))
#: The rows of a tensor that a mask [n] selects; the third argument is their number.
ROWS = torch.ops.shardc.rows.default

#: Ops that make a tensor of a size, and others whose sizes may include the number of rows.
_MAKERS = {form.format(name) for name in ("zeros", "ones", "full", "empty") for form in ("{}", "new_{}", "{}_like")}
_SIZED = {"view", "reshape", "_unsafe_view", "expand", "unflatten", *_MAKERS}
#: Losses of classes, and others, which return one per element without a reduction.
_CLASSES = {"cross_entropy_loss", "nll_loss", "nll_loss_nd"}
_ELEMENTS = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"}
_ELEMENTS.add("binary_cross_entropy_with_logits")


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
    """Selected rows are not used row by row. at: the line of the model that uses them; default: the current one."""

    def __init__(self, fault: str, at: Source | None = None) -> None:
        self.at = source.of_call() if at is None else at
        super().__init__(f"rows chosen by a mask: {fault}", where=self.at.line)


def add_reason(refused: ShardcError, error: ShardcError) -> ShardcError:
    """Extend a refusal of value-dependent code by the line that selected rows cannot pass either."""
    if not isinstance(error, Unfit) or not error.at.line or error.at.line == refused.where:
        return refused
    return ShardcError(f"{refused.what}; {error.what} ({error.at.shown})", where=error.at.line, fix=refused.fix)


def node_of(x: Tensor) -> fx.Node:
    """Return the node of a tensor in the graph being traced."""
    node = traced_node(x)
    if node is None:
        raise Unfit("a tensor among them is not traced")
    return node


def value_of_all(index: fx.Node) -> Tensor | None:
    """Return all rows of an index, of which some are selected, if they depend on no data."""
    known: dict[fx.Node, Any] = {}
    try:
        for n in values.behind([index], lambda n: n.target is not ROWS):
            if n.target is ROWS:
                known[n] = run([n.args[0]], {})[0]  # type: ignore[list-item]
        return run([index], known)[0]  # type: ignore[no-any-return]
    except (KeyError, RuntimeError):
        return None


def with_all_rows(graph: fx.Graph) -> None:
    """Write a graph with all rows, in place. Raises Unfit where something else than each row by itself counts."""
    _AllRows(graph).run()


class _AllRows:
    """Rewrites a graph. masks, dims: of each node with rows, the mask bool [n], and along which dim they are."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.masks: dict[fx.Node, fx.Node] = {}
        self.dims: dict[fx.Node, int] = {}
        self.symbols: dict[Any, fx.Node] = {}  # the number of rows that a mask selects -> the mask
        self.joined: dict[tuple[fx.Node, ...], fx.Node] = {}
        self.rowwise: list[fx.Node] = []  # calls to check
        self.means: set[fx.Node] = set()

    def run(self) -> None:
        nodes = list(self.graph.nodes)
        for self.node in nodes:
            if self.node.target is ROWS:
                x, mask, count = self.node.args
                self.symbols[expression(count.meta["val"])] = mask
                self._mark(mask, 0, x.meta["val"])
            elif self.node.op == "output" and any(x in self.masks for x in self.node.all_input_nodes):
                raise self._unfit("they are a result of the model")
            elif self.node.op == "call_function" and isinstance(self.node.meta.get("val"), Tensor | tuple | list):
                with self.graph.inserting_before(self.node):
                    self._call()
        follow(self.rowwise, self.dims)
        for n in nodes:
            if n.target is ROWS:
                n.replace_all_uses_with(n.args[0])
                self.graph.erase_node(n)

    def _unfit(self, fault: str) -> Unfit:
        return Unfit(fault, source.of_node(self.node))

    def _mark(self, mask: fx.Node, dim: int, val: Any = None) -> None:
        """Note that the current node has all rows along a dim now. val: its result, if that is known."""
        node = self.node
        val = self._value(node.target, node.args, node.kwargs) if val is None else val
        first = val if isinstance(val, Tensor) else val[0]
        if first.shape[dim] != mask.meta["val"].shape[0]:
            raise self._unfit(f"{node.target} mixes them")
        self.masks[node], self.dims[node], node.meta["val"] = mask, dim, val

    def _call(self) -> None:
        node, name = self.node, values.op_name(self.node.target)
        rows = [x for x in node.all_input_nodes if x in self.masks]
        numbers = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.SymInt)]
        if not rows and not any(map(self._symbols_of, numbers)):
            return
        masks = dict.fromkeys([self.masks[x] for x in rows] + [m for x in numbers for m in self._symbols_of(x)])
        (mask, *others) = masks
        if numbers:
            sizes = {x: self._size(x) for x in numbers}
            if name not in _SIZED or None in sizes.values():
                raise self._unfit("their number is used")
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda x: sizes.get(x, x))
        first = node.meta["val"] if isinstance(node.meta["val"], Tensor) else node.meta["val"][0]
        dims = [d for d, n in enumerate(first.shape) if isinstance(n, torch.SymInt)]
        parts: Any = node.args[0] if name == "cat" and Args(node.target, node.args, node.kwargs).dim == 0 else ()
        if parts and all(self.dims.get(x) == 0 for x in parts):
            joined = tuple(self.masks[x] for x in parts)
            if joined not in self.joined:
                self.joined[joined] = self._emit(aten.cat.default, list(joined))
            return self._mark(self.joined[joined], 0)
        if others:
            raise self._unfit("they are combined with other rows")
        if self._ends(name, rows, mask) or (name in _MAKERS and not dims):
            return None
        if len(dims) != 1:
            raise self._unfit(f"{node.target} mixes them")
        if name not in _MAKERS:
            no_dropout = node.target is aten.dropout.default and not (node.args[1] and node.args[2])
            if is_random(node) and not no_dropout:
                raise DrawnError(source.of_node(node))
            beside = [x for x in node.all_input_nodes if x not in rows]
            if self.means and not self.means.isdisjoint(values.behind(beside)):
                raise self._unfit("they are combined with their mean, which is nan without rows")
            self.rowwise.append(node)
        return self._mark(mask, dims[0])

    def _symbols_of(self, number: fx.Node) -> list[fx.Node]:
        return [self.symbols[s] for s in expression(number.meta["val"]).free_symbols if s in self.symbols]

    def _size(self, number: fx.Node) -> int | None:
        """Return a size with all rows."""
        every = {s: mask.meta["val"].shape[0] for s, mask in self.symbols.items()}
        size = expression(number.meta["val"]).subs(every)
        return int(size) if size.is_number else None

    def _value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a call as fake tensors."""
        args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with fake_mode_of(next(iter(self.masks.values())).meta["val"]), torch.no_grad():
            return target(*args, **kwargs)

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call_like(self.node, target, *args, val=self._value(target, args, kwargs), **kwargs)

    def _chosen(self, x: fx.Node, otherwise: float = 0) -> fx.Node:
        """Write all rows, with a number in place of those that were not selected."""
        dims = range(x.meta["val"].dim())
        over = self._emit(aten.reshape.default, self.masks[x], [-1 if d == self.dims[x] else 1 for d in dims])
        return self._emit(aten.where.ScalarOther, over, x, otherwise)

    # --- where rows end: the others do not count

    def _ends(self, name: str, rows: Sequence[fx.Node], mask: fx.Node) -> bool:
        """Rewrite a write, sum, mean or loss of rows; return False for other calls."""
        node, args = self.node, list(self.node.args)
        dims = [self.dims[x] for x in rows]
        if name in ("index_put", "index_put_"):
            self._put(mask)
        elif name in ("index_add", "index_add_", "scatter_add", "scatter_add_"):
            if args[0] in rows or args[3] not in rows:
                raise self._unfit("they are written to other rows")
            chosen = self._chosen(args[3])
            plain = name.startswith("index_add") and args[1] == 0 and not node.kwargs
            if plain and _in_order(args[2:3], args[0], mask):
                self._replace(self._emit(aten.add_.Tensor if mutates(node) else aten.add.Tensor, args[0], chosen))
            else:
                node.update_arg(3, chosen)
        elif name in ("sum", "mean"):
            a = Args(node.target, node.args, node.kwargs)
            ndim, dim = rows[0].meta["val"].dim(), a.get("dim")
            over = [d % ndim for d in ([dim] if isinstance(dim, int) else dim or range(ndim))]
            if dims[0] not in over:
                return False
            self._total(rows[0], name == "mean", over, a.get("keepdim", False), a.get("dtype"))
        elif name in _CLASSES | _ELEMENTS and (a := Args(node.target, node.args, node.kwargs)).reduction:
            if name in _ELEMENTS:
                every = {**a.named, "reduction": 0}
                losses = self._emit(node.target, *every.values())
                self.masks[losses], self.dims[losses] = mask, dims[0]
                self.rowwise.append(losses)
                self._total(losses, a.reduction == 1, list(range(losses.meta["val"].dim())))
            elif rows != args[:2] or any(dims) or rows[1].meta["val"].dtype != torch.int64:
                return False
            else:
                node.update_arg(1, self._chosen(rows[1], a.ignore_index))
        elif name == "ctc_loss" and rows == [args[1]]:
            node.update_arg(1, self._labels(rows[0], args[3]))
        else:
            return False
        return True

    def _total(self, x: fx.Node, of_mean: bool, dims: list[int], keepdim: bool = False, dtype: Any = None) -> None:
        """Write the sum or mean along dims that include the rows' in place of the current call."""
        options = {} if dtype is None else {"dtype": dtype}
        total = self._emit(aten.sum.dim_IntList, self._chosen(x), dims, keepdim, **options)
        if of_mean:
            rest = math.prod(n for d, n in enumerate(x.meta["val"].shape) if d in dims and d != self.dims[x])
            number = self._emit(aten.mul.Scalar, self._emit(aten.sum.default, self.masks[x]), rest)
            total = self._emit(aten.div.Tensor, total, number)
            self.means.add(total)
        self._replace(total)

    def _replace(self, value: fx.Node) -> None:
        self.node.replace_all_uses_with(value)
        self.graph.erase_node(self.node)

    def _put(self, mask: fx.Node) -> None:
        """Rewrite `x[...] = value`: row i goes to row i of a mask, or to the row that an index names (only once)."""
        x, indices, value, accumulate = (*self.node.args, False)[:4]
        places: Any = indices
        size = x.meta["val"].shape
        grid, rest = size[: len(places)], size[len(places) :]
        if x in self.masks or any(i not in self.masks or i.meta["val"].dim() != 1 for i in places):
            raise self._unfit("they are written to places of another form")
        written: Any = value
        if written not in self.masks:
            if written.meta["val"].dim() > len(rest) and written.meta["val"].shape[0] != 1:
                raise self._unfit("their places are filled with a tensor of fixed size")
        elif self.dims[written]:
            raise self._unfit("they are written to other rows")
        straight = _in_order(places, x, mask)
        if not straight and len(places) != 1:
            raise self._unfit("they are written to places of another form")
        added = written if accumulate else self._added(x, places, written, straight)
        in_place = mutates(self.node)
        if added is not None and not straight:
            add = aten.index_add_.default if in_place else aten.index_add.default
            return self._replace(self._emit(add, x, 0, places[0], self._chosen(added)))
        written = written if added is None else added
        if straight:
            over = self._emit(aten.reshape.default, mask, [*grid, *[1] * len(rest)])
            if written in self.masks and len(grid) > 1:
                own = written.meta["val"].shape[1:]
                written = self._emit(aten.reshape.default, written, [*grid, *own])
            if added is not None:
                add = aten.add_.Tensor if in_place else aten.add.Tensor
                return self._replace(self._emit(add, x, self._emit(aten.where.ScalarOther, over, written, 0)))
            new = self._emit(aten.where.self, over, written, x)
        else:
            shaped = self._emit(aten.expand.default, written, [mask.meta["val"].shape[0], *rest])
            self.masks[shaped], self.dims[shaped] = mask, 0
            zeros = self._emit(aten.zeros_like.default, x)
            new = self._emit(aten.index_add.default, zeros, 0, places[0], self._chosen(shaped))
            none = self._emit(aten.zeros.default, [grid[0]], dtype=torch.int64)
            counts = self._emit(aten._to_copy.default, mask, dtype=torch.int64)
            hits = self._emit(aten.index_add.default, none, 0, places[0], counts)
            hit = self._emit(aten.reshape.default, self._emit(aten.gt.Scalar, hits, 0), [-1, *[1] * len(rest)])
            new = self._emit(aten.where.self, hit, new, x)
        return self._replace(self._emit(aten.copy_.default, x, new) if in_place else new)

    def _added(self, x: Any, places: Any, value: Any, straight: bool) -> Any:
        """Return what is added in `x[i] += y`, if the rows of x that were read are written back; else None."""
        if value.target not in (aten.add.Tensor, aten.add_.Tensor) or value.kwargs or value not in self.masks:
            return None
        read, more = value.args
        if more not in self.masks or more.meta["val"].shape != value.meta["val"].shape:
            return None
        same = read.target is aten.index.Tensor and read.args[0] is x and list(read.args[1]) == list(places)
        same |= read.target is ROWS and straight and _bare(read.args[0]) is x
        return more if same else None

    def _labels(self, targets: fx.Node, lengths: Any) -> fx.Node:
        """Write the labels that a mask of [rows, labels] keeps, moved to the front like padded ones, for CTC."""
        mask = _bare(lengths)
        mask = mask.args[0] if mask.target is aten.sum.dim_IntList and mask.args[1] in ([-1], [1]) else None
        size = mask.meta["val"].shape if mask is not None else ()
        if _bare(self.masks[targets]) is not mask or len(size) != 2 or targets.meta["val"].dim() != 1:
            raise self._unfit("their lengths are not their numbers in each row")
        last = self._emit(aten._to_copy.default, self._emit(aten.bitwise_not.default, mask), dtype=torch.int64)
        order = self._emit(operator.getitem, self._emit(aten.sort.stable, last, stable=True), 1)
        kept = self._emit(aten.where.ScalarOther, mask, self._emit(aten.reshape.default, targets, list(size)), 0)
        return self._emit(aten.gather.default, kept, 1, order)


def _in_order(places: Sequence[Any], x: Any, mask: fx.Node) -> bool:
    """Return whether indices with all rows are the places of a tensor's first dims, one after the other."""
    grid = x.meta["val"].shape[: len(places)]
    inner, n = [math.prod(grid[d + 1 :]) for d in range(len(grid))], math.prod(grid)
    ways = [(value_of_all(i), torch.arange(n) // k % size) for i, k, size in zip(places, inner, grid, strict=True)]
    return mask.meta["val"].shape[0] == n and all(i is not None and torch.equal(i, way) for i, way in ways)


def _bare(node: Any) -> Any:
    """Return what a node is made of by copies and views."""
    while values.op_name(node.target) in ("reshape", "clone", "to", "_to_copy"):
        node = node.args[0]
    return node


# --- the rules know what works on each row separately -----------------------------------------------------------------


def follow(calls: Sequence[fx.Node], rows: dict[fx.Node, int]) -> None:
    """Check that calls work on each row separately. rows: along which dim each node has rows.

    Raises Unfit for an op that mixes rows, by the rule of its canonical form: rows are one of the factors that may
    be split, in every operand that has rows, in no other one, and in every result.
    """
    graph = fx.Graph()
    for name in ("mesh", "rng"):
        graph.placeholder(name).meta["value"] = None
    env: dict[fx.Node, fx.Node] = {}
    inside = set(calls)
    given: dict[str, int | None] = {}
    for x in dict.fromkeys(x for n in calls for x in n.all_input_nodes if x not in inside):
        env[x] = graph.placeholder(f"given_{len(env)}")
        env[x].meta = {"value": values.typed(x.meta.get("val"), None, (), {})}
        given[env[x].name] = rows.get(x)
    results: list[fx.Node] = []
    for n in calls:
        env[n] = copy = graph.node_copy(n, env.__getitem__)
        _without_write(copy)
        kind = values.typed(n.meta.get("val"), copy.target, copy.args, {})
        copy.meta = {"source": source.of_node(n), "value": kind}
        if isinstance(kind, Value):
            results.append(n)
    graph.output(tuple(env[n] for n in results))
    canonical = rewritten(graph)
    for node, refused in canonical.refused.items():
        raise Unfit(str(refused), source_of(node))
    dims: dict[fx.Node, Any] = {}
    for n in canonical.graph.nodes:
        if n.op == "placeholder":
            dims[n] = given.get(n.name)
        elif n.target is operator.getitem:
            many = dims[n.args[0]]
            dims[n] = many[n.args[1]] if isinstance(many, tuple) else many
        elif n.op == "call_function":
            dims[n] = _through(n, dims)
    output: Any = canonical.graph.output_node().args[0]
    for n, out in zip(results, output, strict=True):
        if dims[out] not in (None, rows[n]):
            raise Unfit(f"{n.target} mixes them", source.of_node(n))


def _without_write(call: fx.Node) -> None:
    """Replace an in-place op by its functional twin."""
    if mutates(call):
        twin = twin_of(call.target)
        if twin is None or values.op_name(twin) in ("copy", "index_add", "scatter_add", "index_copy"):
            raise Unfit(f"{call.target} writes to them", source.of_node(call))
        call.args, call.kwargs = arguments_of(twin, call)
        call.target = twin


def _through(node: fx.Node, dims: dict[fx.Node, Any]) -> Any:
    """Return along which dim each result has its operands' rows; None: it does not depend on rows."""
    operands = operands_of(node)
    operand_dims = [dims[x] for x in operands]
    if all(d is None for d in operand_dims):
        return None
    rule = registry.find(node.target)
    if rule is None:
        raise Unfit(f"{node.target} has no rule", source_of(node))
    sig = rule.signature(call_of(node))
    (rows, *others) = {sig.inputs[i][d] for i, d in enumerate(operand_dims) if d is not None}
    elsewhere = (f for i, d in enumerate(operand_dims) for other, f in enumerate(sig.inputs[i]) if other != d)
    split = {*sig.summed, *sig.whole, *(name for f in elsewhere for name in f)}
    places = [[d for d, f in enumerate(out) if f == rows] for out in sig.outputs]
    if others or not rows or not split.isdisjoint(rows) or not all(places):
        raise Unfit(f"{node.target} mixes them", source_of(node))
    return tuple(p[0] for p in places) if isinstance(node.meta["value"], tuple) else places[0][0]
