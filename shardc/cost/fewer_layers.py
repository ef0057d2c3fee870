"""Leave out repeated layers of a captured model, to price it from models of two and three layers.

The cost of a step is linear in the number of layers (shardc.plan.few_layers).

before   h.0   h.1   h.2   h.3   ...   h.95  ln_f(h.95)        after (2)    h.0   h.1   ln_f(h.1)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from shardc.errors import ShardcError
from shardc.ir.graph import copy_graph, source_of
from shardc.ir.program import Program
from shardc.ir.stored import Param
from shardc.layer_names import layer_of


def layer_lists(captured: Program) -> dict[str, list[str]]:
    """Return the lists of repeated layers, by name, each with its layers' numbers in execution order."""
    lists: dict[str, dict[str, None]] = {}
    for n in captured.graph.nodes:
        if n.op == "call_function" and (layer := _layer(n)) is not None:
            lists.setdefault(layer[0], {})[layer[1]] = None
    return {name: list(numbers) for name, numbers in lists.items() if len(numbers) > 1}


def with_layers(captured: Program, count: int) -> Program:
    """Return the captured program of the same model with only the first `count` layers of every list.

    Raises ShardcError if layers differ, or if anything but the last layer's successor uses a result of a removed layer.
    """
    copy = copy_graph(captured.graph)
    dropped: set[tuple[str, str]] = set()
    for name, numbers in layer_lists(captured).items():
        if len(numbers) > count:
            _cut(copy, name, numbers, count)
            dropped |= {(name, n) for n in numbers[count:]}
    gone = {x.name for x in captured.stored if isinstance(x, Param) and _all_in((x.fqn, *x.aliases), dropped)}
    gone |= {b.name for b in captured.buffers if b.fqn and _all_in((b.fqn, *b.aliases), dropped)}
    updated = [b.name for b in captured.buffers if b.updated]
    output = copy.output_node()
    returned: Any = output.args[0]
    loss, news, *rest = returned
    kept = tuple(x for x, b in zip(news, updated, strict=False) if b not in gone)
    output.args = ((loss, (*kept, *news[len(updated) :]), *rest),)
    for node in reversed(list(copy.nodes)):
        if node.name in gone if node.op == "placeholder" else _layer(node) in dropped:
            if node.users:
                fault = f"{next(iter(node.users)).name} uses {node.name}, of a layer that would be left out"
                raise ShardcError(fault, where=str(node.meta.get("source", "")), fix="price the whole model")
            copy.erase_node(node)
    copy.lint()
    params = tuple(p for p in captured.params if p.name not in gone)
    return replace(
        captured, graph=copy, params=params, buffers=tuple(b for b in captured.buffers if b.name not in gone)
    )


def _layer(node: fx.Node) -> tuple[str, str] | None:
    return layer_of(source_of(node).module)


def _all_in(names: tuple[str, ...], dropped: set[tuple[str, str]]) -> bool:
    return all(layer_of(n) in dropped for n in names)


def _cut(graph: fx.Graph, name: str, numbers: list[str], count: int) -> None:
    """Make users of the last layer's results use those of the last layer that is kept."""
    nodes: dict[str, list[fx.Node]] = {n: [] for n in numbers}
    for node in graph.nodes:
        if node.op == "call_function" and (layer := _layer(node)) is not None and layer[0] == name:
            nodes[layer[1]].append(node)
    last, kept = nodes[numbers[-1]], nodes[numbers[count - 1]]
    for node, other in zip(last, kept, strict=False):
        outside = [u for u in node.users if (layer := _layer(u)) is None or layer[0] != name]
        if outside and (len(last) != len(kept) or node.target != other.target):
            fault = (
                f"layers {numbers[-1]} and {numbers[count - 1]} of {name} are not the same: {len(last)} and"
                f" {len(kept)} ops"
            )
            raise ShardcError(fault, where=name, fix="price the whole model")
        for u in outside:
            u.replace_input_with(node, other)
