"""Backward in two: the gradients of a stage's inputs first, which other stages wait for, those of its weights when
there
is time (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").

In a stage, what depends on parameters alone (the parameters, casts of them) meets what depends on data in some ops:

    y = linear(x, w)          becomes          w_1 = alias(w);  y = linear(x, w_1)          and the stage also returns (y, (w_1,))

What a stage hands on though it depends on parameters alone meets nothing there: it is a meeting of its own.
The first half asks autograd for the gradients of the inputs *and* of every such y: no product with a weight's gradient
runs. The second half asks, op by op, for the gradient of w_1 alone from that of y, and then goes on from all w_1 to the
parameters."""  # noqa: E501 (a table)

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge

from shardc.ir import types as values
from shardc.ir.program import Stage

aten = torch.ops.aten


def split(stage: Stage, params: set[str], inputs: set[str]) -> Stage:
    """The stage whose graph returns, as a further result, ((y...), (aliases...)) of every op where data and weights
    meet.

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
    meetings = []
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
            meetings.append((tuple(results), tuple(aliases)))
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
        meetings.append(((result,), (use,)))
    returned = fx.map_arg(returned, lambda n: handed_on.get(n, n))
    graph.output((*returned, tuple(meetings)))
    return replace(stage, graph=graph)


def _grad(node: fx.Node) -> bool:
    value = node.meta.get("value")
    return (
        any(v.requires_grad for v in value) if isinstance(value, tuple) else value is not None and value.requires_grad
    )


class Split:
    """One run's backward in two. meetings: what `split` made the stage return; of their results only the place in
    autograd's graph is kept.
    """

    def __init__(self, meetings: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
        self._meetings = [
            ([get_gradient_edge(y) for y in ys if y.requires_grad], [w for w in ws if w.requires_grad])
            for ys, ws in meetings
        ]
        self._grads: list[Tensor | None] = []  # of all results, in order

    def inputs(
        self, tensors: Sequence[Any], begin: Sequence[Tensor | None], leaves: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradients of the leaves, from these tensors' gradients; those of the meetings' results are kept."""
        results: list[Any] = [y for ys, _ in self._meetings for y in ys]
        if not tensors or not (leaves or results):
            self._meetings = []
            return [None] * len(leaves)
        found = torch.autograd.grad(tensors, [*leaves, *results], begin, retain_graph=True, allow_unused=True)
        self._grads = list(found[len(leaves) :])
        return list(found[: len(leaves)])

    def weights(self) -> None:
        """Bring the parameters' gradients."""
        uses: list[Tensor] = []
        grads: list[Tensor] = []
        known = iter(self._grads)
        self._grads = []
        for ys, ws in self._meetings:
            there = [(y, g) for y in ys if (g := next(known)) is not None]
            if there and ws:
                found = torch.autograd.grad([y for y, _ in there], ws, [g for _, g in there], allow_unused=True)
                for w, g in zip(ws, found, strict=True):
                    if g is not None:
                        uses.append(w)
                        grads.append(g)
        if uses:
            torch.autograd.backward(uses, grads)
        self._meetings = []
