"""Split a loop over experts into steps, each one write to a tensor, and unify the steps.

y = index_add(y, 0, t, where(m0, linear(x[t], up0), 0))
y = index_add(y, 0, t, where(m1, linear(x[t], up1), 0))      Steps that follow each other: masks m0, m1, and values
linear(x[t], up0), linear(x[t], up1)                         Op(linear, (x[t], Stack((up0, up1))))
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture.constants import is_random
from shardc.ir import types as values
from shardc.ir.metadata import Value
from shardc.passes.canonical.choices import numel, run
from shardc.passes.canonical.rewrite import shape
from shardc.torch_private import OpOverload

aten = torch.ops.aten


class StaysLoop(Exception):
    """Raised for steps that are no mixture of experts of this form."""


#: Ops whose result has the elements of the operand in their order.
SAME_ELEMENTS = {"reshape", "view", "_unsafe_view", "flatten", "clone", "contiguous", "squeeze", "unsqueeze", "alias"}


def bare(node: Any, *, rows: bool = False) -> Any:
    """Skip ops that change nothing. rows: also skip ops that only change the shape."""
    while isinstance(node, fx.Node) and isinstance(node.target, OpOverload) and node.args:
        name, x = values.op_name(node.target), node.args[0]
        old, new = (n.meta.get("value") if isinstance(n, fx.Node) else None for n in (x, node))
        if not isinstance(old, Value) or not isinstance(new, Value) or old.dtype != new.dtype:
            break
        off = name == "dropout" and (node.args[1] == 0 or not node.args[2])
        kept = name in SAME_ELEMENTS and rows
        kept |= name in SAME_ELEMENTS | {"to", "_to_copy", "expand"} and old.shape == new.shape
        if not off and not kept:
            break
        node = x
    return node


def constant_of(node: Any) -> Tensor | None:
    """Return the value of a tensor that depends on no placeholder, or None."""
    if not isinstance(node, fx.Node) or any(n.op == "placeholder" for n in values.behind([node])):
        return None
    value: Tensor = run([node], {})[0]
    return value


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """`before` with rows written to it.

    adds: whether rows are added, or replace the old ones. mask: bool [n]. value: these rows. to: i64 [n], the row that
    each is written to; None: its own row.
    """

    node: fx.Node
    before: fx.Node | None
    adds: bool
    mask: fx.Node
    value: fx.Node
    to: Tensor | None = None


def _step(node: Any) -> Step | None:
    """Return the last write to a tensor, if it is of rows selected by a mask."""
    args = node.args
    if node.target is aten.index_add.default and args[1] == 0 and not node.kwargs:
        to, masked = constant_of(args[2]), _masked(args[3])
        return Step(node, args[0], True, *masked, to) if to is not None and masked is not None else None
    if node.target is aten.add.Tensor and not node.kwargs and isinstance(args[1], fx.Node):
        masked = _masked(args[1])
        return Step(node, args[0], True, *masked) if masked is not None and shape(args[1]) == shape(node) else None
    if node.target is aten.where.self and isinstance(args[1], fx.Node) and shape(args[1]) == shape(node):
        mask = _mask(args[0], node)
        return Step(node, args[2], False, mask, args[1]) if mask is not None else None
    masked = _masked(node)  # the first of several that are added up
    return Step(node, None, True, *masked) if masked is not None else None


def _masked(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """Return (mask, value) of `where(mask, value, 0)`."""
    node = bare(node, rows=True)
    if not isinstance(node, fx.Node) or node.target is not aten.where.ScalarOther or node.args[2] != 0:
        return None
    mask = _mask(node.args[0], node)
    return None if mask is None else (mask, node.args[1])  # type: ignore[return-value]


def _mask(mask: Any, of: fx.Node) -> fx.Node | None:
    """Return the mask of rows, bool of any shape, behind a mask of [rows, 1]."""
    size, rest = shape(mask), shape(of)
    cut = max((d + 1 for d, n in enumerate(size) if n != 1), default=0)
    if len(size) != len(rest) or cut in (0, len(rest)) or size[:cut] != rest[:cut]:
        return None
    rows: fx.Node = bare(mask, rows=True)
    return rows


def chains(graph: fx.Graph) -> Iterator[list[Step]]:
    """Yield steps that write to one tensor, one after the other, in the order of the graph."""
    steps: dict[fx.Node, Step] = {n: s for n in graph.nodes if n.op == "call_function" and (s := _step(n)) is not None}
    follows: dict[fx.Node, fx.Node] = {}
    for n, s in steps.items():
        before = bare(s.before, rows=True)
        if before in steps and steps[before].adds == s.adds:
            follows[n] = before
    followed = set(follows.values())
    for n in [n for n in steps if n not in followed]:
        chain = [n]
        while chain[-1] in follows:
            chain.append(follows[chain[-1]])
        if len(chain) > 1:
            yield [steps[m] for m in reversed(chain)]


# --- unification ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """Parameters of the experts: one each, or a single one, [experts, ...]."""

    nodes: tuple[fx.Node, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return shape(self.nodes[0])[1:] if len(self.nodes) == 1 else shape(self.nodes[0])


@dataclass(frozen=True)
class Each:
    """A value for each expert."""

    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, eq=False)
class Op:
    """A call in each of the steps. nodes: those calls."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    nodes: tuple[fx.Node, ...]


@dataclass
class Unifier:
    """Finds the common structure of steps. A node is one value for all. sums: {sum of masked rows: (masks, values)}."""

    masks: tuple[fx.Node, ...]
    sums: dict[fx.Node, tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]]
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def unified(self, turns: Sequence[Any]) -> Any:
        nodes = tuple(bare(n) for n in turns)
        if nodes not in self.known:
            self.known[nodes] = self._unified(nodes)
        return self.known[nodes]

    def _has_masks(self, node: fx.Node) -> bool:
        return node in self.sums and self.sums[node][0] == self.masks

    def _unified(self, nodes: tuple[Any, ...]) -> Any:
        first = nodes[0]
        if not isinstance(first, fx.Node):
            return first if all(type(n) is type(first) and n == first for n in nodes) else None
        if all(n is first for n in nodes):
            if self._has_masks(first):
                return self.unified(self.sums[first][1])
            if not any(map(self._has_masks, values.behind([first]))):
                return first
        if not all(isinstance(n, fx.Node) and n.meta["value"] == first.meta["value"] for n in nodes):
            return None
        if all(n.op == "placeholder" for n in nodes):
            return Stack(nodes) if len(set(nodes)) == len(nodes) else Each(nodes)
        if (whole := _parts(nodes)) is not None:
            return Stack((whole,)) if whole.op == "placeholder" else Each(nodes)
        if not all(n.op == "call_function" and n.target == first.target for n in nodes):
            return Each(nodes)
        args = self._arguments([n.args for n in nodes])
        kwargs = self._arguments([tuple(sorted(n.kwargs.items())) for n in nodes])
        if args is None or kwargs is None:
            return Each(nodes)
        if not is_random(first) and not any(map(_differs, (*args, *kwargs))):
            return first
        return Op(first.target, args, kwargs, nodes)

    def _arguments(self, many: Sequence[Any]) -> Any:
        """Unify arguments; return None if they differ in more than nodes."""
        first = many[0]
        if isinstance(first, (tuple, list)):
            if any(not isinstance(m, (tuple, list)) or len(m) != len(first) for m in many):
                return None
            parts = [self._arguments(p) for p in zip(*many, strict=True)]
            wrong = any(p is None and q is not None for p, q in zip(parts, first, strict=True))
            return None if wrong else tuple(parts)
        return self.unified(many)


def _differs(x: Any) -> bool:
    """Return whether a template contains anything that differs between experts."""
    return any(map(_differs, x)) if isinstance(x, tuple) else isinstance(x, (Stack, Each, Op))


def _parts(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """Return the tensor whose entries these are, in order."""
    wholes = set()
    for e, n in enumerate(nodes):
        x: Any = n.args[0] if n.args else None
        if n.target is aten.select.int and n.args[1:] == (0, e):
            wholes.add(bare(x))
        elif n.target is operator.getitem and n.args[1] == e and x.target is aten.unbind.int:
            wholes.add(bare(x.args[0]))
        else:
            return None
    (whole, *others) = wholes
    return whole if not others and shape(whole)[0] == len(nodes) else None


# --- what one expert computes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """`x @ weight.T + bias`; transposed: `x @ weight + bias`."""

    x: Any
    weight: Stack
    bias: Stack | None
    transposed: bool


def product_of(t: Any) -> Product | None:
    """Return a product with parameters of the experts, or None."""
    if not isinstance(t, Op) or t.target not in (aten.linear.default, aten.matmul.default, aten.mm.default):
        return None
    x, weight, bias = (*t.args, None)[:3]
    transposed = t.target is not aten.linear.default
    while isinstance(weight, Op) and weight.target in (aten.t.default, aten.transpose.int, aten.numpy_T.default):
        weight, transposed = weight.args[0], not transposed
    if not isinstance(weight, Stack) or len(weight.shape) != 2 or not (bias is None or isinstance(bias, Stack)):
        return None
    return Product(x, weight, bias, transposed)


def products_in(t: Any) -> Iterator[Op]:
    """Yield the products that a value is made of."""
    if isinstance(t, tuple):
        for part in t:
            yield from products_in(part)
    elif isinstance(t, Op):
        yield from [t] if product_of(t) is not None else products_in((t.args, t.kwargs))
    elif isinstance(t, (fx.Node, Stack, Each)):
        raise StaysLoop("its experts are not two layers of products with elementwise ops in between")


def weighted(t: Any) -> tuple[list[Any], Any]:
    """Split a product into (weights [n, 1] or numbers, the rest), without casts: the op casts itself."""
    factors: list[Any] = []
    while isinstance(t, Op):
        name = values.op_name(t.target)
        if name in ("to", "_to_copy") or (name in SAME_ELEMENTS and rows_of(t) == rows_of(t.args[0])):
            t = t.args[0]
            continue
        columns = [i for i, side in enumerate(t.args) if _column(side, t)] if name == "mul" else []
        if len(columns) != 1:
            break
        factors.append(t.args[columns[0]])
        t = t.args[1 - columns[0]]
    return factors, t


def rows_of(x: Any) -> tuple[int, int] | None:
    """Return (rows, columns) of a value."""
    node = x.nodes[0] if isinstance(x, (Op, Each)) else x if isinstance(x, fx.Node) else None
    return (numel(node) // max(shape(node)[-1], 1), shape(node)[-1]) if node and shape(node) else None


def _column(side: Any, out: Op) -> bool:
    """Return whether it is a number for each row of `out`, or one for all."""
    rows, all_ = rows_of(side), rows_of(out)
    return isinstance(side, (int, float)) or (rows is not None and all_ is not None and rows in ((1, 1), (all_[0], 1)))
