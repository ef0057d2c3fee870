"""Loops over experts as the experts op: what shardc.capture.chosen_rows made of them, all experts on all rows, becomes
`torch.ops.shardc.experts`.

    before   y = zeros
             y = index_add(y, 0, t, where(m0, linear(silu(linear(x[t], up0)), down0) * w, 0))        one step an expert
             y = index_add(y, 0, t, where(m1, linear(silu(linear(x[t], up1)), down1) * w, 0))
    after    y = experts(x, index, w, stack([up0, up1]), stack([down0, down1]), None, None, "silu(x)", False)

A mixture of experts is several steps that add to (or fill) the same tensor and differ in their parameters and masks
only. The steps are laid on top of each other (`_Steps.unified`): what is the same in all is of the tokens, parameters
are stacked, and what else differs are weights of the choices. How the model writes it down does not matter: it is read
off what it computes. Whether masks exclude each other, and whether `index` says what they say, is tried on random
choices, as shardc.passes.canonical.grouped_mm does; and the whole is proven against eager as any captured graph is
(shardc.capture.compare_eager). What is not of this kind stays: slow, and right.

Rows that a model sorts by expert itself stay sorted here, each with one choice; that pass then takes the order away.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture.random_choices import draws, leaves, run, unrepeated
from shardc.errors import ShardcError
from shardc.ir import types as values
from shardc.ir.graph import copy_graph, source_of
from shardc.ir.program import Program, Value
from shardc.nn import text_of
from shardc.torch_private import OpOverload

aten = torch.ops.aten


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """`before` with rows written to it. adds: added; else put in the place of what was there. mask: bool [n], value: of
    these rows. to: to which row each goes, i64 [n]; None: each to its own."""

    node: fx.Node
    before: fx.Node | None
    adds: bool
    mask: fx.Node
    value: fx.Node
    to: Tensor | None


def _shape(node: Any) -> tuple[int, ...]:
    found: Value = node.meta["value"]
    return found.shape


def _numel(node: fx.Node) -> int:
    return torch.Size(_shape(node)).numel()


#: Ops whose result has the elements of the operand in their order.
_SAME = {"reshape", "view", "_unsafe_view", "flatten", "clone", "contiguous", "squeeze", "unsqueeze", "alias"}


def _bare(node: Any, *, rows: bool = False) -> Any:
    """What a value is without ops that change nothing. rows: without ones that only change its shape either."""
    while isinstance(node, fx.Node) and isinstance(node.target, OpOverload):
        name, x = values.op_name(node.target), node.args[0] if node.args else None
        if not isinstance(x, fx.Node) or not isinstance(x.meta.get("value"), Value):
            break
        if not isinstance(node.meta["value"], Value):
            break
        same = x.meta["value"].dtype == node.meta["value"].dtype
        shape = _shape(x) == _shape(node)
        none = name == "dropout" and (node.args[1] == 0 or not node.args[2])
        if not same or not (
            none or ((shape or (rows and name in _SAME)) and name in _SAME | {"to", "_to_copy", "expand"})
        ):
            break
        node = x
    return node


def _step(node: Any) -> Step | None:
    """The last thing that was written to a tensor, if it is rows chosen by a mask."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.index_add.default and node.args[1] == 0 and not node.kwargs:
        to = _constant(node.args[2])
        found = _masked(node.args[3])
        if to is not None and found is not None:
            return Step(node, node.args[0], True, *found, to)  # type: ignore[arg-type]
    elif node.target is aten.add.Tensor and not node.kwargs and isinstance(node.args[1], fx.Node):
        found = _masked(node.args[1])
        if found is not None and _shape(node.args[1]) == _shape(node):
            return Step(node, node.args[0], True, *found, None)  # type: ignore[arg-type]
    elif node.target is aten.where.self and isinstance(node.args[1], fx.Node) and _shape(node.args[1]) == _shape(node):
        mask = _mask(node.args[0], node)
        if mask is not None:
            return Step(node, node.args[2], False, mask, node.args[1], None)  # type: ignore[arg-type]
    elif (found := _masked(node)) is not None:  # the first of several that are added up
        return Step(node, None, True, *found, None)
    return None


def _masked(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """(mask, value) of `where(mask, value, 0)`."""
    node = _bare(node, rows=True)
    if not isinstance(node, fx.Node) or node.target is not aten.where.ScalarOther or node.args[2] != 0:
        return None
    mask = _mask(node.args[0], node)
    return None if mask is None else (mask, node.args[1])  # type: ignore[return-value]


def _mask(mask: Any, of: fx.Node) -> fx.Node | None:
    """The mask of rows, bool of any shape, that a mask of [rows, 1] is."""
    shape, rest = _shape(mask), _shape(of)
    cut = len([n for n in shape if n != 1]) and max(d for d, n in enumerate(shape) if n != 1) + 1
    if len(shape) != len(rest) or cut == len(rest) or shape[:cut] != rest[:cut] or not cut:
        return None
    found: fx.Node = _bare(mask, rows=True)
    return found


def _constant(node: Any) -> Tensor | None:
    """The value of a tensor that is made of nothing that is given."""
    if not isinstance(node, fx.Node) or any(n.op == "placeholder" for n in values.behind([node])):
        return None
    found: Tensor = run([node], {})[0]
    return found


# --- the same in several steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Same:
    """One value for all experts."""

    node: fx.Node


@dataclass(frozen=True)
class Stack:
    """Parameters of the experts: one each, or one of them all, [experts, ...]."""

    nodes: tuple[fx.Node, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return _shape(self.nodes[0])[1:] if len(self.nodes) == 1 else _shape(self.nodes[0])


@dataclass(frozen=True)
class Each:
    """A value for each expert."""

    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Op:
    """A call in each of the steps. nodes: those calls."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    nodes: tuple[fx.Node, ...]


@dataclass
class _Steps:
    """What several steps have in common. sums: {sum of masked rows: (masks, values)}: for rows of one expert, its value
    alone."""

    count: int
    masks: tuple[fx.Node, ...]
    sums: dict[fx.Node, tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]]
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def unified(self, given: Sequence[Any]) -> Any:
        nodes = tuple(_bare(n) for n in given)
        if nodes not in self.known:
            self.known[nodes] = self._unified(nodes)
        return self.known[nodes]

    def _unified(self, nodes: tuple[Any, ...]) -> Any:
        first = nodes[0]
        if not isinstance(first, fx.Node):
            return first if all(type(n) is type(first) and n == first for n in nodes) else None
        if first in self.sums and all(n is first for n in nodes) and self.sums[first][0] == self.masks:
            return self.unified(self.sums[first][1])
        one = all(n is first for n in nodes)
        if one and not any(s in self.sums and self.sums[s][0] == self.masks for s in values.behind([first])):
            return Same(first)
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
        drawn = isinstance(first.target, OpOverload) and torch.Tag.nondeterministic_seeded in first.target.tags
        if not drawn and not any(map(_has, (*args, *kwargs))):
            return Same(first)
        return Op(first.target, args, kwargs, nodes)

    def _arguments(self, many: Sequence[Any]) -> Any:
        """Arguments laid on top of each other; None where they differ in more than nodes."""
        first = many[0]
        if isinstance(first, (tuple, list)):
            if any(not isinstance(m, (tuple, list)) or len(m) != len(first) for m in many):
                return None
            parts = [self._arguments(p) for p in zip(*many, strict=True)]
            wrong = any(p is None and q is not None for p, q in zip(parts, first, strict=True))
            return None if wrong else tuple(parts)
        return self.unified(many)


def _has(x: Any) -> bool:
    """Is there anything of an expert in a template?"""
    if isinstance(x, tuple):
        return any(map(_has, x))
    return isinstance(x, (Stack, Each, Op))


def _parts(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The stack that these are the entries of, in order."""
    found = set()
    for e, n in enumerate(nodes):
        if n.target is aten.select.int and n.args[1] == 0 and n.args[2] == e:
            found.add(_bare(n.args[0]))
        elif n.target is operator.getitem and n.args[1] == e and n.args[0].target is aten.unbind.int:  # type: ignore[union-attr]
            found.add(_bare(n.args[0].args[0]))  # type: ignore[union-attr]
        else:
            return None
    (whole, *others) = found
    return whole if not others and _shape(whole)[0] == len(nodes) else None


# --- what an expert computes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """`x @ weight.T + bias`; transposed: `x @ weight + bias`."""

    x: Any
    weight: Stack
    bias: Stack | None
    transposed: bool


def _product(t: Any) -> Product | None:
    if not isinstance(t, Op):
        return None
    bias: Any = None
    if t.target is aten.linear.default:
        x, weight, *rest = t.args
        bias, transposed = (rest or [None])[0], False
    elif t.target in (aten.matmul.default, aten.mm.default):
        (x, weight), transposed = t.args, True
    elif t.target is aten.addmm.default and not t.kwargs:
        (bias, x, weight), transposed = t.args, True
    else:
        return None
    while isinstance(weight, Op) and weight.target in (aten.t.default, aten.transpose.int, aten.numpy_T.default):
        weight, transposed = weight.args[0], not transposed
    if not isinstance(weight, Stack) or len(weight.shape) != 2 or not (bias is None or isinstance(bias, Stack)):
        return None
    return Product(x, weight, bias, transposed)


def _cast(t: Any) -> Any:
    """A value before a change between floating-point types: an op on rows and weights does that by itself."""
    while isinstance(t, Op) and values.op_name(t.target) in ("to", "_to_copy"):
        t = t.args[0]
    return t


def _weighted(t: Any, width: int) -> tuple[list[Any], Any]:
    """(weights [n, 1] or numbers, the rest) of a product of both."""
    factors: list[Any] = []
    while isinstance(t := _cast(t), Op):
        if values.op_name(t.target) in _SAME and _rows_of(t.nodes[0]) == _rows_of(t.args[0]):
            t = t.args[0]
            continue
        if t.target not in (aten.mul.Tensor, aten.mul.Scalar):
            break
        sides = t.args
        at = [i for i, s in enumerate(sides) if _column(s, t.nodes[0])]
        if len(at) != 1:
            break
        factors.append(sides[at[0]])
        t = sides[1 - at[0]]
    return factors, t


def _rows_of(x: Any) -> tuple[int, int] | None:
    node = x.nodes[0] if isinstance(x, (Op, Each)) else x.node if isinstance(x, Same) else x
    if not isinstance(node, fx.Node) or not _shape(node):
        return None
    return _numel(node) // max(_shape(node)[-1], 1), _shape(node)[-1]


def _column(side: Any, out: fx.Node) -> bool:
    """Is it a number for each row of `out`, or for all?"""
    if isinstance(side, (int, float)):
        return True
    rows = _rows_of(side)
    return rows is not None and rows[1] == 1 and rows[0] in (1, _numel(out) // _shape(out)[-1])


# --- writing it -------------------------------------------------------------------------------------------------------


class _Stays(Exception):
    """Steps that are no mixture of experts of this form."""


def with_experts(program: Program) -> Program:
    """The program with its loops over experts as ops; notes for those that stay loops."""
    writer = _Writer(program)
    writer.run()
    return replace(program, graph=writer.graph, notes=(*program.notes, *writer.notes))


class _Writer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = copy_graph(program.graph)
        self.notes: list[str] = []
        self.sums: dict[fx.Node, tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]] = {}

    def run(self) -> None:
        chains = list(_chains(self.graph))
        for steps, base in chains:
            if base is None and all(s.adds for s in steps):
                self.sums[steps[-1].node] = tuple(s.mask for s in steps), tuple(s.value for s in steps)
        for steps, base in reversed(chains):
            if not steps[-1].node.users:
                continue  # it was part of another one
            try:
                self._mixture(steps, base)
            except _Stays as e:
                at = source_of(steps[-1].node)
                self.notes.append(
                    f"{at or 'a loop over experts'}: all {len(steps)} experts run on all rows, for the loop could not"
                    f" be made one op ({e}); `shardc.nn.experts` is one"
                )
            for n in reversed(self.graph.nodes):
                if n.op == "call_function" and not n.users and (not n.is_impure() or _bare(n) is not n):
                    self.graph.erase_node(n)

    def _mixture(self, steps: list[Step], base: fx.Node | None) -> None:
        count, last = len(steps), steps[-1].node
        first = steps[0]
        if any(s.adds != first.adds or not _equal(s.to, first.to) for s in steps):
            raise _Stays("its turns write in different ways")
        masks = tuple(s.mask for s in steps)
        self.here = last
        template = _Steps(count, masks, self.sums).unified([s.value for s in steps])
        width = _shape(first.value)[-1]
        n = _numel(first.value) // width
        if any(_numel(m) != n for m in masks):
            raise _Stays("masks are of other rows")
        factors, core = _weighted(template, width)
        x, up, down, up_bias, down_bias, text, transposed = self._expert(core)
        if _shape(x)[-1] != width:
            raise _Stays("its experts give rows of another width")

        trial = _Trial(masks, count)
        weights = [self._flat(f, n) for f in factors]
        if first.to is not None:
            index, share, x = self._pairs(trial, weights, first.to, x, n)
        elif trial.disjoint():
            index = self._call(aten.reshape.default, trial.index(torch.arange(n)) or self._chosen(masks, n), [n, 1])
            share = self._call(aten.reshape.default, self._share(weights, masks, n, x), [n, 1])
        else:
            index, share = self._several(trial, weights, masks, n, x)
        dtype = x.meta["value"].dtype
        rows = self._call(aten.reshape.default, x, [_numel(x) // width, width])
        typed = replace(
            rows.meta["value"], requires_grad=values.requires_grad(core.nodes[0]) or values.requires_grad(x)
        )
        typed = replace(typed, requires_grad=values.requires_grad(first.value))
        op = torch.ops.shardc.experts.default
        args = (rows, index, share, up, down, up_bias, down_bias, text, transposed)
        made = self._put(op, args, typed)
        shape, wanted = list(_shape(last)), last.meta["value"].dtype
        made = self._call(aten.reshape.default, made, shape)
        if dtype != wanted:
            made = self._call(aten._to_copy.default, made, dtype=wanted)
        if not first.adds and not _zeros(base):
            some = self._call(aten.ge.Scalar, index, 0)
            some = self._call(aten.reshape.default, self._call(aten.any.dim, some, -1), [*shape[:-1], 1])
            made = self._call(aten.where.self, some, made, base)
        elif base is not None and not _zeros(base):
            made = self._call(aten.add.Tensor, base, made)
        last.replace_all_uses_with(made)

    # --- the expert

    def _expert(self, core: Any) -> tuple[Any, ...]:
        """(tokens, up, down, biases, the activation's text, transposed) of what an expert computes."""
        second = _product(core)
        if second is None:
            raise _Stays("its experts do not end with a product with a parameter")
        firsts: list[Op] = []
        between: list[Op] = []

        def visit(t: Any) -> None:
            if isinstance(t, tuple):
                for part in t:
                    visit(part)
            elif isinstance(t, Op):
                if _product(t) is not None:
                    if t not in firsts:
                        firsts.append(t)
                elif t not in between:
                    visit(t.args)
                    visit(tuple(v for _, v in t.kwargs))
                    between.append(t)
            elif isinstance(t, (Same, Stack, Each)):
                raise _Stays("its experts are not two layers of products with elementwise ops in between")

        visit(second.x)
        ups = [p for t in firsts if (p := _product(t)) is not None]
        same = {(p.x, p.transposed, p.weight.shape, p.bias is None) for p in ups}
        if len(same) != 1 or not isinstance(ups[0].x, Same):
            raise _Stays("its experts do not begin with products of the rows")
        out = [_numel(t.nodes[0]) // _rows_of(t.nodes[0])[0] for t in firsts]  # type: ignore[index]
        m, i = sum(out), second.weight.shape[0 if second.transposed else 1]

        def activation(y: Tensor) -> Any:
            known: dict[int, Any] = {id(t): part for t, part in zip(firsts, y.split_with_sizes(out, -1), strict=True)}

            def value(t: Any) -> Any:
                if isinstance(t, tuple):
                    return [value(part) for part in t]
                return known[id(t)] if isinstance(t, Op) else t

            for t in between:
                known[id(t)] = t.target(*value(t.args), **{k: value(v) for k, v in t.kwargs})
            return known[id(second.x)]

        try:
            text = text_of(activation, m, i)
        except (ShardcError, KeyError, RuntimeError, TypeError) as e:
            raise _Stays("its experts compute more than elementwise ops between two products") from e
        transposed = ups[0].transposed
        column = 2 if transposed else 1
        up = self._joined([self._stacked(p.weight) for p in ups], column)
        up_bias = None if ups[0].bias is None else self._joined([self._stacked(p.bias) for p in ups], 1)
        down = self._stacked(second.weight)
        if second.transposed != transposed:
            down = self._call(aten.transpose.int, down, 1, 2)
        down_bias = None if second.bias is None else self._stacked(second.bias)
        return ups[0].x.node, up, down, up_bias, down_bias, text, transposed

    def _stacked(self, s: Any) -> fx.Node:
        return s.nodes[0] if len(s.nodes) == 1 else self._call(aten.stack.default, list(s.nodes))

    def _joined(self, nodes: list[fx.Node], dim: int) -> fx.Node:
        return nodes[0] if len(nodes) == 1 else self._call(aten.cat.default, nodes, dim)

    # --- the choices

    def _flat(self, factor: Any, n: int) -> Any:
        """A weight of the choices: a number, a node [n] or [1], or one of these for each expert."""
        if isinstance(factor, (int, float)):
            return factor
        if isinstance(factor, Same):
            return self._call(aten.reshape.default, factor.node, [_numel(factor.node)])
        nodes = factor.nodes
        return tuple(self._call(aten.reshape.default, x, [_numel(x)]) for x in nodes)

    def _chosen(self, masks: Sequence[fx.Node], n: int) -> fx.Node:
        """i64 [n]: which mask is true; -1 for none."""
        all_ = self._masks(masks, n)
        number = self._call(aten.argmax.default, self._call(aten._to_copy.default, all_, dtype=torch.int64), 0)
        return self._call(aten.where.ScalarOther, self._call(aten.any.dim, all_, 0), number, -1)

    def _masks(self, masks: Sequence[fx.Node], n: int) -> fx.Node:
        flat = [self._call(aten.reshape.default, m, [n]) for m in masks]
        return self._call(aten.stack.default, flat)

    def _share(self, weights: list[Any], masks: Sequence[fx.Node], n: int, x: fx.Node) -> fx.Node:
        """f [n]: the weight of each row's choice."""
        found: Any = None
        for w in weights:
            if isinstance(w, tuple):
                each = self._call(aten.stack.default, [self._call(aten.expand.default, c, [n]) for c in w])
                masked = self._call(aten.where.ScalarOther, self._masks(masks, n), each, 0)
                w = self._call(aten.sum.dim_IntList, masked, [0])
            found = self._times(found, w)
        return self._ones(found, [n], x)

    def _times(self, a: Any, b: Any) -> Any:
        if a is None or (isinstance(b, fx.Node) and not isinstance(a, fx.Node)):
            a, b = b, a
        if b is None:
            return a
        return self._call(aten.mul.Tensor, a, b) if isinstance(a, fx.Node) else a * b

    def _ones(self, found: Any, shape: list[int], x: fx.Node) -> fx.Node:
        if isinstance(found, fx.Node):
            return self._call(aten.expand.default, found, shape)
        number = 1.0 if found is None else float(found)
        return self._call(aten.full.default, shape, number, dtype=x.meta["value"].dtype)

    def _pairs(
        self, trial: _Trial, weights: list[Any], to: Tensor, x: fx.Node, n: int
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Rows that are pairs of tokens and choices: the choices of each token, [tokens, choices]."""
        tokens, at = _taken(x)
        if at is None or not torch.equal(at, to) or not trial.disjoint():
            raise _Stays("rows are not added to the tokens that they are made of")
        t = int(_numel(tokens) // _shape(tokens)[-1])
        k, rest = divmod(n, t)
        inner = torch.equal(to, torch.arange(n) // max(k, 1))
        if rest or not (inner or torch.equal(to, torch.arange(n) % t)):
            raise _Stays("rows are not added to the tokens that they are made of")

        def placed(y: fx.Node) -> fx.Node:
            """[n] -> [t, k]"""
            if inner:
                return self._call(aten.reshape.default, y, [t, k])
            return self._call(aten.transpose.int, self._call(aten.reshape.default, y, [k, t]), 0, 1)

        order = torch.arange(n).view(t, k) if inner else torch.arange(n).view(k, t).t()
        index = trial.index(order)
        if index is not None:
            index = self._call(aten.reshape.default, index, [t, k])
        else:
            index = placed(self._chosen(trial.masks, n))
        shares: Any = None
        for w in weights:
            if isinstance(w, fx.Node) and _numel(w) == n:
                source, place = _moved(w)
                if place is not None and torch.equal(place[order.reshape(-1)], torch.arange(n)):
                    w = self._call(aten.reshape.default, source, [t, k])
                else:
                    w = placed(w)
            elif isinstance(w, tuple):
                w = placed(self._share([w], trial.masks, n, x))
            shares = self._times(shares, w)
        return index, self._ones(shares, [t, k], x), tokens

    def _several(
        self, trial: _Trial, weights: list[Any], masks: Sequence[fx.Node], n: int, x: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        """Tokens that several masks choose: of k numbers that have all of them, those whose mask is true."""
        count = len(masks)
        chosen = self._call(aten.transpose.int, self._masks(masks, n), 0, 1)  # [n, experts]
        index = trial.covering(n)
        if index is None:
            numbers = self._call(aten.arange.default, count)
            index = self._call(aten.expand.default, numbers, [n, count])
        else:
            index = self._call(aten.reshape.default, index, [n, _numel(index) // n])
        shares: Any = None
        for w in weights:
            if isinstance(w, tuple):
                each = [self._call(aten.expand.default, c, [n]) for c in w]
                w = self._call(aten.gather.default, self._call(aten.stack.default, each, 1), 1, index)
            elif isinstance(w, fx.Node):
                w = self._call(aten.reshape.default, w, [_numel(w), 1])
            shares = self._times(shares, w)
        inside = self._call(aten.gather.default, chosen, 1, index)
        number = self._call(aten.where.ScalarOther, inside, index, -1)
        return number, self._ones(shares, list(_shape(index)), x)

    # --- nodes

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if target in (aten.reshape.default, aten.expand.default) and list(_shape(args[0])) == list(args[1]):
            found: fx.Node = args[0]
            return found
        return self._put(target, args, values.infer(target, args, kwargs), kwargs)

    def _put(self, target: Any, args: tuple[Any, ...], value: Any, kwargs: dict[str, Any] | None = None) -> fx.Node:
        with self.graph.inserting_before(self.here):
            new = self.graph.call_function(target, args, kwargs or {})
        new.meta = {"value": value, "source": source_of(self.here)}
        return new


def _zeros(node: fx.Node | None) -> bool:
    if node is None:
        return True
    node = _bare(node, rows=True)
    name = values.op_name(node.target) if isinstance(node, fx.Node) and node.op == "call_function" else ""
    return name in ("zeros", "zeros_like", "new_zeros")


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _chains(graph: fx.Graph) -> Iterator[tuple[list[Step], fx.Node | None]]:
    """Steps that write to one tensor, one after the other, and what was there before; in the order of the graph."""
    steps: dict[fx.Node, Step] = {n: s for n in graph.nodes if n.op == "call_function" and (s := _step(n)) is not None}
    follows: dict[fx.Node, fx.Node] = {}
    for n, s in steps.items():
        before = _bare(s.before, rows=True)
        if before in steps and steps[before].adds == s.adds:
            follows[n] = before
    for n in steps:
        if n in follows.values():
            continue
        chain = [n]
        while chain[-1] in follows:
            chain.append(follows[chain[-1]])
        found = [steps[m] for m in reversed(chain)]
        if len(found) > 1:
            yield found, found[0].before


def _taken(x: fx.Node) -> tuple[fx.Node, Tensor | None]:
    """(y, which row of y each row of x is) of rows picked by a constant index."""
    node = _bare(x, rows=True)
    if node.target is aten.index.Tensor:
        where: Any = node.args[1]
        at = [d for d, i in enumerate(where) if i is not None]
        shape = _shape(node.args[0])
        if len(at) == 1 and at[0] == len(shape) - 2 and torch.Size(shape[: at[0]]).numel() == 1:
            return _bare(node.args[0], rows=True), _constant(where[at[0]])
    elif node.target is aten.index_select.default and node.args[1] == 0 and len(_shape(node.args[0])) == 2:
        return node.args[0], _constant(node.args[2])
    return node, None


_MOVES = _SAME | {"index", "transpose", "permute", "t", "expand", "select", "slice", "index_select", "gather"}


def _moved(node: fx.Node) -> tuple[fx.Node, Tensor | None]:
    """(y, position in flattened y of every element of a node) where it has y's elements in another order, all once."""
    path = [node]
    while True:
        n = path[-1]
        x = n.args[0] if n.args else None
        if (
            not isinstance(n.target, OpOverload)
            or values.op_name(n.target) not in _MOVES
            or not isinstance(x, fx.Node)
            or any(_constant(o) is None for o in n.all_input_nodes if o is not x)
        ):
            break
        path.append(x)
    for source in reversed(path[1:]):
        if _numel(source) == _numel(node):
            try:
                (found,) = run([node], {source: torch.arange(_numel(source)).view(_shape(source))})
            except RuntimeError:
                continue
            return source, found.reshape(-1)
    return node, None


# --- what is tried on random choices ----------------------------------------------------------------------------------


class _Trial:
    """Masks on random choices."""

    def __init__(self, masks: tuple[fx.Node, ...], count: int) -> None:
        self.masks, self.count = masks, count
        self.drawn = leaves(masks)
        self.known: list[dict[fx.Node, Any]] = []
        self.found: list[Tensor] = []  # [experts, n]
        for _, known in zip(range(3), draws(self.drawn, count), strict=False):
            try:
                results = run(masks, known)
            except (RuntimeError, IndexError, KeyError) as e:
                raise _Stays("its masks cannot be tried") from e
            self.known.append(known)
            self.found.append(torch.stack([m.reshape(-1).bool() for m in results]))

    def disjoint(self) -> bool:
        return all(bool((f.sum(0) <= 1).all()) for f in self.found)

    def _numbers(self, numel: int | None, n: int) -> Iterator[fx.Node]:
        for leaf in self.drawn:
            dtype = leaf.meta["value"].dtype
            fits = _numel(leaf) == numel or (numel is None and _numel(leaf) % n == 0)
            if fits and not dtype.is_floating_point and dtype != torch.bool:
                yield leaf

    def index(self, order: Tensor) -> fx.Node | None:
        """What says, in this order of the masks' rows, which of them is true."""
        numbers = torch.arange(self.count).view(-1, *[1] * order.dim())
        for leaf in self._numbers(order.numel(), 1):
            each = [(k[leaf].reshape(order.shape), f[:, order]) for k, f in zip(self.known, self.found, strict=True)]
            if all(torch.equal(v == numbers, f) for v, f in each):
                return leaf
        return None

    def covering(self, n: int) -> fx.Node | None:
        """Numbers of experts [n, k], none twice, among which are all whose mask is true."""
        numbers = torch.arange(self.count).view(-1, 1, 1)
        for leaf in self._numbers(None, n):
            has = [(k[leaf].reshape(n, -1) == numbers).any(-1) for k in self.known]
            more = any(bool((f & ~h).any()) for f, h in zip(self.found, has, strict=True))
            if not more and unrepeated(leaf) and _shape(leaf)[-1] == _numel(leaf) // n:
                return leaf
        return None
