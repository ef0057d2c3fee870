"""Nodes that are written past fx's checks are those that fx makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.torch_private import add_node

aten = torch.ops.aten
NAMES = [
    "x",
    "x_3",
    "x",
    "relu",
    "relu_1_2",
    "relu_1",
    "relu",
    "_5",
    "5_a",
    "a.b",
    "len",
    "for",
    "y_0",
    "y_0",
    "é_1",
    "x_3",
]


def written(write: Any) -> list[Any]:
    graph = fx.Graph()
    last = graph.placeholder("x_in")
    for name in NAMES:
        last = write(graph, name, (last, [last, 2]), {"alpha": last})
    with graph.inserting_before(last):
        write(graph, "before", (2,), {})
    graph.call_function(aten.relu.default, (last,))  # a name of fx's own, after these
    graph.output(last)
    graph.lint()
    found = [(n.name, n.args, n.kwargs, type(n.kwargs), n.meta, sorted(u.name for u in n.users)) for n in graph.nodes]
    return [str(graph), str(found), [n.name for n in graph.find_nodes(op="call_function", target=aten.add.Tensor)]]


def test_a_node_is_what_fx_would_make() -> None:
    def by_fx(graph: fx.Graph, name: str, args: Any, kwargs: Any) -> fx.Node:
        node = graph.create_node("call_function", aten.add.Tensor, args, kwargs, name)
        node.meta["value"] = 1
        return node

    def by_us(graph: fx.Graph, name: str, args: Any, kwargs: Any) -> fx.Node:
        return add_node(graph, "call_function", aten.add.Tensor, args, kwargs, name=name, meta={"value": 1})

    assert written(by_us) == written(by_fx)
