"""Turn grouped products (torch._grouped_mm) of rows that the model sorts by expert into `experts`.

    before   order = argsort(index)                       the pairs (token, choice) sorted by expert, i64[t k]
             rows  = gather(x, 0, order // k)             f[t k, h]
             mid   = silu(grouped_mm(rows, w1, ends)) * grouped_mm(rows, w3, ends)
             y     = scatter_add(zeros, 0, order // k, grouped_mm(mid, w2, ends) * weights[order])
    after    pairs = reshape(expand(x, [t, k, h]), [t k, h])
             made  = experts(pairs, index, ones, cat(w1, w3), w2, "b, c = halves(x); a = silu(b); mul(a, c)")
             y     = zeros + sum(reshape(made * weights, [t, k, h]), 1)

A sort over the batch would need the whole batch on every rank. But a value in sorted order is V[order] for some V in
the order of the batch. An op that works row by row works on V as well; an op that puts rows back (the inverse order, a
sum into tokens) takes V. So the model's spelling does not matter. The pass tests on random choices, not by the ops,
whether `order` sorts the choices, and whether `ends` counts them. Other grouped products stay as they are.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx

from shardc.errors import ShardcError
from shardc.ir.graph import copy_graph, placeholders, source_of, value_of, values_of
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.nn import text_of
from shardc.passes.base import Pass
from shardc.passes.canonical.choices import draws, numel, run
from shardc.passes.canonical.rewrite import Args, Emit, Result, rewrite
from shardc.runtime import ops
from shardc.torch_private import OpOverload

aten = torch.ops.aten
_PRODUCT = aten._grouped_mm.default
_SORTS: set[Any] = {aten.argsort.default, aten.argsort.stable, aten.sort.default, aten.sort.stable}
#: Ops that split the columns of a row -> the position of the dim among their arguments.
_PARTS: dict[Any, int] = {
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.chunk.default: 2,
    aten.slice.Tensor: 1,
}
#: Elementwise ops that torch does not tag so.
_ELEMENTWISE = {aten.floor_divide.default, aten.floor_divide.Scalar}
#: Ops that keep the elements of each row if the first dim stays.
_VIEWS = {aten.reshape.default, aten.expand.default, aten.unsqueeze.default, aten._to_copy.default, aten.clone.default}


@rewrite("experts")
def experts(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite `torch.ops.shardc.experts` of a captured graph as the op that programs call."""
    return emit.typed(out, ops.experts, *a.named.values())


@dataclass(frozen=True)
class GroupedMM(Pass):
    """Turns a program's grouped products into `experts` if all of them have this form; else leaves them."""

    def applies(self, program: Program) -> bool:
        return bool(program.graph.find_nodes(op="call_function", target=_PRODUCT))

    def run(self, program: Program) -> Program:
        return replace(program, graph=with_experts(program.graph))


def with_experts(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a canonical graph with `experts` for grouped products.

    If some product does not have this form, the copy is unchanged.
    """
    new = copy_graph(graph)
    for order in [n for n in new.nodes if _is_order(n)]:
        _Writer(new, order).run()
    new.eliminate_dead_code()
    left = any(new.find_nodes(op="call_function", target=target) for target in (_PRODUCT, product))
    return copy_graph(graph) if left else new


def _is_order(node: fx.Node) -> bool:
    if node.target in (aten.argsort.default, aten.argsort.stable):
        return True
    sort: Any = node.args[0] if node.target is operator.getitem else None
    return sort is not None and sort.target in _SORTS and node.args[1:] == (1,)


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """Stand in for a grouped product of unsorted rows, until it is part of an `experts`."""
    raise NotImplementedError("never runs")


@dataclass
class _Writer:
    """Rewrites everything that has one order."""

    graph: fx.Graph
    order: fx.Node
    plain: dict[fx.Node, fx.Node] = field(default_factory=dict)  # a node in sorted order -> its V
    numbers: dict[fx.Node, Tensor] = field(
        default_factory=dict
    )  # the same for integers that depend on no data: V itself
    inverse: set[fx.Node] = field(default_factory=set)
    tried: dict[tuple[fx.Node, int], bool] = field(default_factory=dict)
    put: dict[str, fx.Node] = field(default_factory=dict)  # calls that were added to the graph

    def __post_init__(self) -> None:
        self.emit = Emit(self.graph, placeholders(self.graph)["rng"])

    def run(self) -> None:
        shape = value_of(self.order).shape
        if len(shape) != 1:
            return
        self.n = shape[0]
        self.index = _choices(self.order)
        if self.index is None or numel(self.index) != self.n:
            return
        self.numbers[self.order] = torch.arange(self.n)
        following = self.order
        while following.op != "output":
            following, node = following.next, following
            if node is not self.order and node.op == "call_function":
                self._node(node)
        for node in reversed(self.graph.find_nodes(op="call_function", target=product)):
            self._experts(node)

    def _node(self, node: fx.Node) -> None:
        args: Any = node.args
        taken = node.all_input_nodes
        self.here, self.emit.source = node, source_of(node)
        if node.target in (aten.argsort.default, aten.argsort.stable) and args[0] is self.order:
            self.inverse.add(node)
        elif node.target is _PRODUCT:
            if len(args) == 3 and args[0] in self.plain and self._counts(args[2], value_of(args[1]).shape[0]):
                self.plain[node] = self._put(product, self.plain[args[0]], args[1], value=value_of(node))
        elif node.target is aten.gather.default and args[1] == 0 and args[2] in self.numbers:
            self._picked(node, args[0], _column(self.numbers[args[2]]))
        elif node.target is aten.index.Tensor and len(args[1]) == 1:
            self._by(node, args[0], args[1][0])
        elif node.target is aten.index_select.default and args[1] == 0:
            self._by(node, args[0], args[2])
        elif (
            node.target in (aten.scatter_add.default, aten.index_add.default)
            and args[1] == 0
            and args[3] in self.plain
            and not node.kwargs
        ):
            self._summed(node, args[0], args[2], self.plain[args[3]])
        elif (
            node.target is aten.index_put.default and len(args[1]) == 1 and args[2] in self.plain and not any(args[3:])
        ):
            number = self.numbers.get(args[1][0])
            if (
                number is not None
                and torch.equal(number, torch.arange(self.n))
                and value_of(node).shape == value_of(args[2]).shape
            ):
                node.replace_all_uses_with(self.plain[args[2]])
        elif any(x in self.numbers for x in taken):
            if all(x in self.numbers for x in taken) and self._rowwise(node):
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: self.numbers[x])
                self.numbers[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        elif any(x in self.plain for x in taken) and (self._rowwise(node) or self._part(node)):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: self.plain.get(x, x))
            self.plain[node] = self._put(node.target, *args, value=node.meta["value"], **kwargs)

    def _rowwise(self, node: fx.Node) -> bool:
        """Return whether an op works on every row separately.

        Operands in sorted order have their rows first; others are the same for all rows.
        """
        if not isinstance(node.target, OpOverload) or isinstance(node.meta["value"], tuple):
            return False
        shape = value_of(node).shape
        if not shape or shape[0] != self.n:
            return False
        if node.target in _VIEWS:
            return value_of(node.all_input_nodes[0]).shape[0] == self.n
        if torch.Tag.pointwise not in node.target.tags and node.target not in _ELEMENTWISE:
            return False
        for x in node.all_input_nodes:
            x_shape = value_of(x).shape
            rows = len(x_shape) == len(shape) and x_shape[0] == self.n
            if rows != (x in self.plain or x in self.numbers):
                return False
        return True

    def _part(self, node: fx.Node) -> bool:
        """Return whether a node is a part of every row, or one of several results of an op."""
        rows: Any = next(iter(node.args), None)
        position = _PARTS.get(node.target, len(node.args))
        return node.target is operator.getitem or (
            position < len(node.args) and node.args[position] not in (0, -len(value_of(rows).shape))
        )

    def _by(self, node: fx.Node, x: fx.Node, index: Any) -> None:
        """Rewrite rows of x that an index picks."""
        if index in self.inverse and x in self.plain:
            node.replace_all_uses_with(self.plain[x])
        elif index in self.numbers and self.numbers[index].dim() == 1:
            self._picked(node, x, self.numbers[index])

    def _picked(self, node: fx.Node, x: fx.Node, index: Tensor | None) -> None:
        """Rewrite x[index[order]], where index counts rows 0, 0, 1, 1, ...: V has each row as often."""
        shape = value_of(x).shape
        k = self._times(index, shape[0]) if x not in self.plain and x not in self.numbers else 0
        if k == 1:
            self.plain[node] = x
        elif k:
            rest = list(shape[1:])
            per_token = self._put(aten.reshape.default, x, [shape[0], 1, *rest])
            repeated = self._put(aten.expand.default, per_token, [shape[0], k, *rest])
            self.plain[node] = self._put(aten.reshape.default, repeated, [self.n, *rest])

    def _summed(self, node: fx.Node, base: fx.Node, index: Any, rows: fx.Node) -> None:
        """Rewrite base with V[order] added in rows index[order]."""
        numbers, to = self.numbers.get(index), value_of(node)
        k = self._times(_column(numbers), to.shape[0]) if numbers is not None else 0
        if k and value_of(rows).shape[1:] == to.shape[1:]:
            terms = self._put(aten.reshape.default, rows, [to.shape[0], k, *to.shape[1:]])
            total = self._put(aten.sum.dim_IntList, terms, [1])
            node.replace_all_uses_with(self._put(aten.add.Tensor, base, total))

    def _times(self, index: Tensor | None, rows: int) -> int:
        """Return k, if index is arange(rows * k) // k; else 0."""
        k, rest = divmod(self.n, rows)
        return k if index is not None and not rest and torch.equal(index, torch.arange(self.n) // max(k, 1)) else 0

    # --- experts

    def _experts(self, down: fx.Node) -> None:
        """Write the op for a second product, the ops in between, and the first ones."""
        ups = self._products(down.args[0])
        rows: set[Any] = {up.args[0] for up in ups}
        if len(rows) != 1:
            return
        weights: list[Any] = [up.args[1] for up in ups]
        down_weight: Any = down.args[1]
        first, second = value_of(weights[0]).shape, value_of(down_weight).shape
        if any(value_of(w).shape != first for w in weights):
            return
        m, i = len(ups) * first[2], second[1]

        def activation(x: Tensor) -> Any:
            return run([down.args[0]], dict(zip(ups, x.chunk(len(ups), -1), strict=True)))[0]  # type: ignore[list-item]

        try:
            text = text_of(activation, m, i)
        except ShardcError:  # not elementwise
            return
        self.here, self.emit.source = down, source_of(down)
        (x,) = rows
        up = weights[0] if len(weights) == 1 else self._put(aten.cat.default, weights, 2)
        choice = self._put(aten.reshape.default, self.index, [self.n, 1])
        share = self._put(aten.full.default, [self.n, 1], 1.0, dtype=value_of(x).dtype)
        args = (x, choice, share, up, down_weight, None, None, text, True)
        down.replace_all_uses_with(self._put(ops.experts, *args, value=value_of(down)))

    def _products(self, node: Any) -> list[fx.Node]:
        """Return the products that make up a value, in order; [] if it depends on anything else."""
        plain, reached = set(self.plain.values()), dict[fx.Node, None]()

        def visit(n: fx.Node) -> bool:
            if (
                n not in reached
                and n.target is not product
                and not (n in plain and n.op == "call_function" and all(map(visit, n.all_input_nodes)))
            ):
                return False
            reached[n] = None
            return True

        return [n for n in reached if n.target is product] if visit(node) else []

    # --- tests on random choices

    def _counts(self, ends: Any, experts: int) -> bool:
        """Return whether `order` sorts choices among the experts, and `ends` is where each expert's rows end."""
        if (ends, experts) not in self.tried:
            self.tried[ends, experts] = all(self._right(ends, experts, skewed=s) for s in (False, True))
        return self.tried[ends, experts]

    def _right(self, ends: Any, experts: int, *, skewed: bool) -> bool:
        assert self.index is not None
        *_, known = islice(draws([self.index], experts), 1 + skewed)
        chosen = known[self.index]
        try:
            order, stops = run([self.order, ends], known)
        except (KeyError, RuntimeError, IndexError):  # it needs other data too, or fails for such numbers
            return False
        flat = chosen.flatten()
        whole = torch.equal(order.sort().values, torch.arange(self.n))
        return (
            whole
            and bool((flat[order].diff() >= 0).all())
            and torch.equal(stops.long(), flat.bincount(minlength=experts).cumsum(0))
        )

    def _put(self, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> fx.Node:
        """Add a call before `here`, or return an equal call that was added before (rows that are cast twice)."""
        key = repr((target, args, kwargs))
        if key not in self.put:
            with self.graph.inserting_before(self.here):
                new = self.emit.typed(value, target, *args, **kwargs) if value else self.emit(target, *args, **kwargs)
            self.put[key] = new
        return self.put[key]


def _choices(order: fx.Node) -> fx.Node | None:
    """Return the integers from which an order is computed: the first ones on the way from other values."""
    node = order
    while True:
        before = [
            x
            for x in node.all_input_nodes
            if x.op == "call_function" and not any(v.dtype.is_floating_point for v in values_of(x))
        ]
        if len(node.all_input_nodes) != 1 or not before:
            return node if node is not order and not isinstance(node.meta["value"], tuple) else None
        node = before[0]


def _column(index: Tensor | None) -> Tensor | None:
    """Return an index of rows, also from one that repeats it in every column."""
    if index is None or index.dim() == 1:
        return index
    return index[:, 0] if index.dim() == 2 and bool((index == index[:, :1]).all()) else None
