"""Find the equal layers of a program: its text and its page show one of each kind.

Layers of a list are equal if their parameters have the same types and the same ops run in them in the same order, on
the same types, with the same collectives, before and after the passes. The pipeline stage and the order of the layers
do not matter. Values from outside a layer are compared by type; by name if several layers take them, such as masks.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import fx

from shardc.errors import ShardcError
from shardc.ir.graph import copy_graph, source_of, values_of
from shardc.ir.metadata import Collective
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.ir.stored import Buffer, Param
from shardc.layer_names import blank, enclosing_layers, layer_of

#: A string argument of an op may name a bucket.
_BUCKET = re.compile(r"^bucket\d+$")
_NOWHERE = Source()


@dataclass(frozen=True)
class Repeats:
    """Equal layers. first: for each layer that is equal to an earlier one of its list, that one.

    same_layers: for each first layer, the numbers of all equal layers, its own included. ops: for each layer, its ops
    in the order in which they run. names: for each parameter's placeholder, the model's name of it.
    """

    first: Mapping[str, str] = field(default_factory=dict)
    same_layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ops: Mapping[str, Sequence[fx.Node]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def shown(self, name: str) -> str:
        """Return the name that a module or a parameter has in the layers that are shown."""
        depth = 0
        while depth < len(layers := enclosing_layers(name)):
            layer = layers[depth]
            if layer in self.first:
                name = self.first[layer] + name[len(layer) :]
            depth += 1
        return name

    def left_out(self, name: str) -> str:
        """Return the outermost layer around a module that is not shown; "" if all are."""
        return next((layer for layer in enclosing_layers(name) if layer in self.first), "")

    def same(self, node: fx.Node) -> fx.Node:
        """Return the shown op that represents an op of a layer that is not shown; else the op itself."""
        while layer := self.left_out(source_of(node).module):
            ops = self.ops[layer]
            node = self.ops[self.first[layer]][ops.index(node)]
        return node

    def modules(self, node: fx.Node) -> list[str]:
        """Return the modules that an op belongs to. Gathers of parameters belong to the parameters' modules."""
        if node.op == "placeholder":
            return [self.names.get(node.name, "")]
        if source_of(node) != _NOWHERE:
            return [source_of(node).module]
        names = [m for x in node.all_input_nodes for m in self.modules(x)]
        return [names[node.args[1]]] if node.target is operator.getitem else names  # type: ignore[index]


def repeats(program: Program) -> Repeats:
    """Find the equal layers of a program."""
    keys: defaultdict[str, list[Hashable]] = defaultdict(list)
    names = {p.name: (p.fqn, *p.aliases) for p in program.params}
    ops: Mapping[str, Sequence[fx.Node]] = {}
    for graphs in ([program.graph], [s.graph for s in program.stages]):
        if graphs:
            ops = _add_ops(keys, [n for g in graphs for n in g.nodes if n.op == "call_function"], names)
    for p in program.params:
        for layer in enclosing_layers(p.fqn):
            aliases = tuple(blank(a) for a in p.aliases)
            keys[layer].append((p.fqn[len(layer) :], aliases, str(p.value), p.reduce, p.requires_grad, p.bucket < 0))
    first: dict[str, str] = {}
    of_key: dict[Hashable, str] = {}
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for layer in sorted(keys, key=in_order):
        of, _, number = layer.rpartition(".")
        twin = of_key.setdefault((of, tuple(keys[layer])), layer)
        groups[twin].append(number)
        if twin != layer:
            first[layer] = twin
    return Repeats(first, {k: tuple(v) for k, v in groups.items()}, ops, {name: of[0] for name, of in names.items()})


def _add_ops(
    keys: dict[str, list[Hashable]], nodes: Sequence[fx.Node], names: Mapping[str, tuple[str, ...]]
) -> Mapping[str, Sequence[fx.Node]]:
    """Add a key of each op to its layers' keys; return the ops of each layer. names: by placeholder."""
    inside = {n: enclosing_layers(source_of(n).module) for n in nodes}
    taking: defaultdict[tuple[str, str], set[str]] = defaultdict(set)  # (value, list): the layers that take it
    for n in nodes:
        for layer in inside[n]:
            of = layer.rpartition(".")[0]
            for x in n.all_input_nodes:
                taking[x.name, of].add(layer)
    places: defaultdict[str, dict[fx.Node, int]] = defaultdict(dict)

    def value(a: fx.Node, layer: str) -> Hashable:
        if a in places[layer]:
            return places[layer][a]
        if a.name in names:
            path = next((n[len(layer) :] for n in names[a.name] if n.startswith(f"{layer}.")), None)
            return path or (names[a.name][0], *map(str, values_of(a)))
        of = layer.rpartition(".")[0]
        carried = any(each.rpartition(".")[0] == of for each in inside.get(a, ()))
        several = not carried and len(taking[a.name, of]) > 1
        return a.name if several else "", *map(str, values_of(a))

    for n in nodes:
        for layer in inside[n]:
            keys[layer].append(_key(n, layer, partial(value, layer=layer)))
            places[layer][n] = len(places[layer])
    return {layer: list(of) for layer, of in places.items()}


def graph_key(graph: fx.Graph) -> Hashable:
    """Return a key that is equal for stage graphs that run the same ops, on layers of other numbers."""
    places = {n: i for i, n in enumerate(graph.nodes)}
    return tuple((n.op, _key(n, "", places.__getitem__)) for n in graph.nodes if n.op != "output")


def _key(node: fx.Node, layer: str, value: Callable[[fx.Node], Hashable]) -> Hashable:
    """Return the key that an op shares with the same op of an equal layer. value: the key of another node."""
    source = source_of(node)
    sent: Collective | None = node.meta.get("collective")
    return (
        source.module[len(layer) :] if layer else blank(source.module),
        source.code,
        str(node.target) if node.op == "call_function" else "",
        tuple((str(v), v.requires_grad) for v in values_of(node)),
        sent and replace(sent, cause=blank(sent.cause)),
        blank(node.meta.get("region", "")),
        len(node.meta.get("kept", ())),
        node.meta.get("again", 0),
        _argument(node.args, value),
        _argument(node.kwargs, value),
    )


def _argument(a: Any, value: Callable[[fx.Node], Hashable]) -> Hashable:
    if isinstance(a, fx.Node):
        return value(a)
    if isinstance(a, (tuple, list)):
        return tuple(_argument(x, value) for x in a)
    if isinstance(a, Mapping):
        return tuple((k, _argument(v, value)) for k, v in a.items() if k != "tag")  # a tag is a name
    return _BUCKET.sub("bucket", a) if isinstance(a, str) else repr(a)


def in_order(layer: str) -> tuple[Any, ...]:
    """Return a sort key for layers by number: 2 before 10, a layer before the layers inside it."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in layer.split("."))


# --- models of few layers: the cost of a step is linear in the number of layers (shardc.plan.few_layers)


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
    stored: tuple[Param | Buffer, ...] = (*captured.params, *captured.buffers)
    gone = {x.name for x in stored if all(layer_of(n) in dropped for n in (x.fqn, *x.aliases))}
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
