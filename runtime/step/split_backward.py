"""Backward in two halves: first the gradients of a stage's inputs, which other stages wait for; those of its weights
when there is time (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").

In a stage, what depends on parameters alone (the parameters, casts of them) and what depends on data *join* in ops:

    y = linear(x, w)      becomes      w_1 = alias(w)
                                       y = linear(x, w_1)      and the stage also returns the join (y, (w_1,))

A value that depends on parameters alone, and that the stage hands on, joins no data here: it is a join of its own.
The first half asks autograd for the gradients of the inputs *and* of every such y: no product with a weight's gradient
runs. The second half asks, join by join, for the gradient of w_1 from that of y, and then continues from all w_1 to the
parameters."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge

from shardc.ir import types as values
from shardc.ir.stage import Stage

aten = torch.ops.aten


def split_stage(stage: Stage, params: set[str], inputs: set[str]) -> Stage:
    """The stage whose graph returns, as a further result, ((y...), (aliases...)) of every join of data and weights.

    params, inputs: names of placeholders.
    """
    graph = fx.Graph()
    returned = graph.graph_copy(stage.graph, {})
    data: set[fx.Node] = set()
    weights: set[fx.Node] = set()
    for n in graph.nodes:
        if (
            n.name in inputs
            or (n.op == "placeholder" and "collective" in n.meta)
            or not data.isdisjoint(n.all_input_nodes)
        ):
            data.add(n)
        elif n.name in params or not weights.isdisjoint(n.all_input_nodes):
            weights.add(n)
    joins = []
    for n in [n for n in graph.nodes if n in data and n.op == "call_function"]:
        used = dict.fromkeys(x for x in n.all_input_nodes if x in weights and _grad(x))
        results = (
            [n] if not isinstance(n.meta.get("value"), tuple) else [u for u in n.users if u.target is operator.getitem]
        )
        results = [y for y in results if _grad(y)]
        if used and results:
            aliases = []
            for w in used:
                with graph.inserting_before(n):
                    alias = graph.create_node("call_function", aten.alias.default, (w,), {}, name=f"{w.name}_use")
                alias.meta = dict(w.meta)
                n.replace_input_with(w, alias)
                aliases.append(alias)
            joins.append((tuple(results), tuple(aliases)))
    assert isinstance(returned, tuple)
    handed_on: dict[fx.Node, fx.Node] = {}
    for w in dict.fromkeys(
        n for n in values.nodes_in(returned) if n in weights and _grad(n)
    ):  # learned queries: other stages' data
        use, result = (
            graph.create_node("call_function", aten.alias.default, (x,), {}, name=f"{w.name}_{y}")
            for x, y in ((w, "use"), (w, "out"))
        )
        result.args = (use,)
        use.meta, result.meta = dict(w.meta), dict(w.meta)
        handed_on[w] = result
        joins.append(((result,), (use,)))
    returned = fx.map_arg(returned, lambda n: handed_on.get(n, n))
    graph.output((*returned, tuple(joins)))
    return replace(stage, graph=graph)


def _grad(node: fx.Node) -> bool:
    value = node.meta.get("value")
    return (
        any(v.requires_grad for v in value) if isinstance(value, tuple) else value is not None and value.requires_grad
    )


class SplitBackward:
    """One run's backward in two. joins: what `split_stage` made the stage return; of their results only the place in
    autograd's graph is kept.
    """

    def __init__(self, joins: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
        self._joins = [
            ([get_gradient_edge(y) for y in ys if y.requires_grad], [w for w in ws if w.requires_grad])
            for ys, ws in joins
        ]
        self._grads: list[Tensor | None] = []  # of all results, in order

    def inputs(
        self, tensors: Sequence[Any], begin: Sequence[Tensor | None], leaves: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradients of the leaves, from these tensors' gradients; those of the joins' results are kept."""
        results: list[Any] = [y for ys, _ in self._joins for y in ys]
        if not tensors or not (leaves or results):
            self._joins = []
            return [None] * len(leaves)
        grads = torch.autograd.grad(tensors, [*leaves, *results], begin, retain_graph=True, allow_unused=True)
        self._grads = list(grads[len(leaves) :])
        return list(grads[: len(leaves)])

    def weights(self) -> None:
        """Accumulate the parameters' gradients."""
        uses: list[Tensor] = []
        grads: list[Tensor] = []
        known = iter(self._grads)
        self._grads = []
        for ys, ws in self._joins:
            with_grad = [(y, g) for y in ys if (g := next(known)) is not None]
            if with_grad and ws:
                ours, begin = zip(*with_grad, strict=True)
                for w, g in zip(ws, torch.autograd.grad(ours, ws, begin, allow_unused=True), strict=True):
                    if g is not None:
                        uses.append(w)
                        grads.append(g)
        if uses:
            torch.autograd.backward(uses, grads)
        self._joins = []
