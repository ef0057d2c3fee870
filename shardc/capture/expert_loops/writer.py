"""Writes the experts op in place of the turns of a loop, or notes why the loop stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture.expert_loops.products import product_of, rows_of, weighted
from shardc.capture.expert_loops.steps import Step, bare, chains, numel_of, shape_of
from shardc.capture.expert_loops.trial import StaysLoop, Trial, moved, taken
from shardc.capture.expert_loops.unify import Each, Op, Same, Stack, Unifier
from shardc.errors import ShardcError
from shardc.ir import types as values
from shardc.ir.graph import copy_graph, source_of
from shardc.ir.program import Program
from shardc.nn import text_of

aten = torch.ops.aten


class Writer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = copy_graph(program.graph)
        self.notes: list[str] = []
        self.sums: dict[fx.Node, tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]] = {}

    def run(self) -> None:
        loops = list(chains(self.graph))
        for steps, base in loops:
            if base is None and all(s.adds for s in steps):
                self.sums[steps[-1].node] = tuple(s.mask for s in steps), tuple(s.value for s in steps)
        for steps, base in reversed(loops):
            if not steps[-1].node.users:
                continue  # it was part of another one
            try:
                self._mixture(steps, base)
            except StaysLoop as e:
                place = source_of(steps[-1].node)
                self.notes.append(
                    f"{place or 'a loop over experts'}: all {len(steps)} experts run on all rows, for the loop could"
                    f" not be made one op ({e}); `shardc.nn.experts` is one"
                )
            for n in reversed(self.graph.nodes):
                if n.op == "call_function" and not n.users and (not n.is_impure() or bare(n) is not n):
                    self.graph.erase_node(n)

    def _mixture(self, steps: list[Step], base: fx.Node | None) -> None:
        count, last = len(steps), steps[-1].node
        first = steps[0]
        if any(s.adds != first.adds or not _equal(s.to, first.to) for s in steps):
            raise StaysLoop("its turns write in different ways")
        masks = tuple(s.mask for s in steps)
        self.here = last
        template = Unifier(count, masks, self.sums).unified([s.value for s in steps])
        width = shape_of(first.value)[-1]
        n = numel_of(first.value) // width
        if any(numel_of(m) != n for m in masks):
            raise StaysLoop("masks are of other rows")
        factors, core = weighted(template, width)
        x, up, down, up_bias, down_bias, text, transposed = self._expert(core)
        if shape_of(x)[-1] != width:
            raise StaysLoop("its experts give rows of another width")

        trial = Trial(masks, count)
        weights = [self._flat(f, n) for f in factors]
        if first.to is not None:
            index, share, x = self._pairs(trial, weights, first.to, x, n)
        elif trial.disjoint():
            index = self._call(aten.reshape.default, trial.index(torch.arange(n)) or self._chosen(masks, n), [n, 1])
            share = self._call(aten.reshape.default, self._share(weights, masks, n, x), [n, 1])
        else:
            index, share = self._several(trial, weights, masks, n, x)
        dtype = x.meta["value"].dtype
        rows = self._call(aten.reshape.default, x, [numel_of(x) // width, width])
        typed = replace(
            rows.meta["value"], requires_grad=values.requires_grad(core.nodes[0]) or values.requires_grad(x)
        )
        typed = replace(typed, requires_grad=values.requires_grad(first.value))
        op = torch.ops.shardc.experts.default
        args = (rows, index, share, up, down, up_bias, down_bias, text, transposed)
        result = self._put(op, args, typed)
        shape, wanted = list(shape_of(last)), last.meta["value"].dtype
        result = self._call(aten.reshape.default, result, shape)
        if dtype != wanted:
            result = self._call(aten._to_copy.default, result, dtype=wanted)
        if not first.adds and not is_zeros(base):
            some = self._call(aten.ge.Scalar, index, 0)
            some = self._call(aten.reshape.default, self._call(aten.any.dim, some, -1), [*shape[:-1], 1])
            result = self._call(aten.where.self, some, result, base)
        elif base is not None and not is_zeros(base):
            result = self._call(aten.add.Tensor, base, result)
        last.replace_all_uses_with(result)

    # --- the expert

    def _expert(self, core: Any) -> tuple[Any, ...]:
        """(tokens, up, down, biases, the activation's text, transposed) of what an expert computes."""
        second = product_of(core)
        if second is None:
            raise StaysLoop("its experts do not end with a product with a parameter")
        firsts: list[Op] = []
        between: list[Op] = []

        def visit(t: Any) -> None:
            if isinstance(t, tuple):
                for part in t:
                    visit(part)
            elif isinstance(t, Op):
                if product_of(t) is not None:
                    if t not in firsts:
                        firsts.append(t)
                elif t not in between:
                    visit(t.args)
                    visit(tuple(v for _, v in t.kwargs))
                    between.append(t)
            elif isinstance(t, (Same, Stack, Each)):
                raise StaysLoop("its experts are not two layers of products with elementwise ops in between")

        visit(second.x)
        ups = [p for t in firsts if (p := product_of(t)) is not None]
        same = {(p.x, p.transposed, p.weight.shape, p.bias is None) for p in ups}
        if len(same) != 1 or not isinstance(ups[0].x, Same):
            raise StaysLoop("its experts do not begin with products of the rows")
        out = [numel_of(t.nodes[0]) // rows_of(t.nodes[0])[0] for t in firsts]  # type: ignore[index]
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
            raise StaysLoop("its experts compute more than elementwise ops between two products") from e
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
            return self._call(aten.reshape.default, factor.node, [numel_of(factor.node)])
        nodes = factor.nodes
        return tuple(self._call(aten.reshape.default, x, [numel_of(x)]) for x in nodes)

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
        share: Any = None
        for w in weights:
            if isinstance(w, tuple):
                each = self._call(aten.stack.default, [self._call(aten.expand.default, c, [n]) for c in w])
                masked = self._call(aten.where.ScalarOther, self._masks(masks, n), each, 0)
                w = self._call(aten.sum.dim_IntList, masked, [0])
            share = self._times(share, w)
        return self._ones(share, [n], x)

    def _times(self, a: Any, b: Any) -> Any:
        if a is None or (isinstance(b, fx.Node) and not isinstance(a, fx.Node)):
            a, b = b, a
        if b is None:
            return a
        return self._call(aten.mul.Tensor, a, b) if isinstance(a, fx.Node) else a * b

    def _ones(self, share: Any, shape: list[int], x: fx.Node) -> fx.Node:
        if isinstance(share, fx.Node):
            return self._call(aten.expand.default, share, shape)
        number = 1.0 if share is None else float(share)
        return self._call(aten.full.default, shape, number, dtype=x.meta["value"].dtype)

    def _pairs(
        self, trial: Trial, weights: list[Any], to: Tensor, x: fx.Node, n: int
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Rows that are pairs of tokens and choices: the choices of each token, [tokens, choices]."""
        tokens, rows = taken(x)
        if rows is None or not torch.equal(rows, to) or not trial.disjoint():
            raise StaysLoop("rows are not added to the tokens that they are made of")
        t = int(numel_of(tokens) // shape_of(tokens)[-1])
        k, rest = divmod(n, t)
        inner = torch.equal(to, torch.arange(n) // max(k, 1))
        if rest or not (inner or torch.equal(to, torch.arange(n) % t)):
            raise StaysLoop("rows are not added to the tokens that they are made of")

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
            if isinstance(w, fx.Node) and numel_of(w) == n:
                source, place = moved(w)
                if place is not None and torch.equal(place[order.reshape(-1)], torch.arange(n)):
                    w = self._call(aten.reshape.default, source, [t, k])
                else:
                    w = placed(w)
            elif isinstance(w, tuple):
                w = placed(self._share([w], trial.masks, n, x))
            shares = self._times(shares, w)
        return index, self._ones(shares, [t, k], x), tokens

    def _several(
        self, trial: Trial, weights: list[Any], masks: Sequence[fx.Node], n: int, x: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        """Tokens that several masks choose: of k numbers that have all of them, those whose mask is true."""
        count = len(masks)
        chosen = self._call(aten.transpose.int, self._masks(masks, n), 0, 1)  # [n, experts]
        index = trial.covering(n)
        if index is None:
            numbers = self._call(aten.arange.default, count)
            index = self._call(aten.expand.default, numbers, [n, count])
        else:
            index = self._call(aten.reshape.default, index, [n, numel_of(index) // n])
        shares: Any = None
        for w in weights:
            if isinstance(w, tuple):
                each = [self._call(aten.expand.default, c, [n]) for c in w]
                w = self._call(aten.gather.default, self._call(aten.stack.default, each, 1), 1, index)
            elif isinstance(w, fx.Node):
                w = self._call(aten.reshape.default, w, [numel_of(w), 1])
            shares = self._times(shares, w)
        inside = self._call(aten.gather.default, chosen, 1, index)
        number = self._call(aten.where.ScalarOther, inside, index, -1)
        return number, self._ones(shares, list(shape_of(index)), x)

    # --- nodes

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if target in (aten.reshape.default, aten.expand.default) and list(shape_of(args[0])) == list(args[1]):
            same: fx.Node = args[0]
            return same
        return self._put(target, args, values.infer(target, args, kwargs), kwargs)

    def _put(self, target: Any, args: tuple[Any, ...], value: Any, kwargs: dict[str, Any] | None = None) -> fx.Node:
        with self.graph.inserting_before(self.here):
            new = self.graph.call_function(target, args, kwargs or {})
        new.meta = {"value": value, "source": source_of(self.here)}
        return new


def is_zeros(node: fx.Node | None) -> bool:
    if node is None:
        return True
    node = bare(node, rows=True)
    name = values.op_name(node.target) if isinstance(node, fx.Node) and node.op == "call_function" else ""
    return name in ("zeros", "zeros_like", "new_zeros")


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
