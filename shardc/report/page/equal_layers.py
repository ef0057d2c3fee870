"""Which layers of a program are equal, so that the page has one of each kind: 80 layers are one, 40 times two are two.

Layers of a list are equal if their parameters have the same types and the same ops run in them in the same order, on
the same types, with the same collectives, before and after the passes. Unlike shardc.artifact.repeated_layers, which
leaves out what follows its like in a text, a layer is compared with all of its list, wherever it runs: in whichever
stage of a pipeline, in whichever order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardc.ir.graph import source_of, values_of
from shardc.ir.layers import layers_of
from shardc.ir.metadata import Collective
from shardc.ir.program import Program

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class EqualLayers:
    """first: of each layer that is equal to an earlier one of its list, that one. alike: of the first ones, the numbers
    of all that are equal, with their own. ops: of each layer, its ops in the order in which they run.
    """

    first: Mapping[str, str]
    alike: Mapping[str, tuple[str, ...]]
    ops: Mapping[str, Sequence[fx.Node]]

    def shown(self, name: str) -> str:
        """The name, of a module or a parameter, in the layers that are shown."""
        depth = 0
        while depth < len(found := prefixes(name)):
            layer = found[depth]
            if layer in self.first:
                name = self.first[layer] + name[len(layer) :]
            depth += 1
        return name

    def left_out(self, name: str) -> str:
        """The outermost layer around a module that is not shown; "" if all are."""
        return next((layer for layer in prefixes(name) if layer in self.first), "")

    def same(self, node: fx.Node) -> fx.Node:
        """The op that stands for an op of a layer that is not shown; itself for any other."""
        while layer := self.left_out(source_of(node).module):
            mine = self.ops[layer]
            node = self.ops[self.first[layer]][mine.index(node)]
        return node


def equal_layers(program: Program, *, full: bool = False) -> EqualLayers:
    """full: as if no two layers were equal."""
    inputs = {x.name for x in program.inputs}  # to a layer, what any other values from outside are
    ops: defaultdict[str, list[fx.Node]] = defaultdict(list)
    keys: defaultdict[str, list[Hashable]] = defaultdict(list)
    for i, graphs in enumerate(([program.graph], [s.graph for s in program.stages])):
        places: defaultdict[str, dict[fx.Node, int]] = defaultdict(dict)
        for node in (n for graph in graphs for n in graph.nodes if n.op == "call_function"):
            for layer in prefixes(source_of(node).module):
                mine = places[layer]
                mine[node] = len(mine)
                keys[layer].append((i, *_key(node, layer, mine, inputs)))
                if i == len(program.stages[:1]):  # of the program's stages; of the graph where there are none
                    ops[layer].append(node)
    for p in program.params:
        for layer in prefixes(p.fqn):
            aliases = tuple(map(_blank, p.aliases))
            keys[layer].append((p.fqn[len(layer) :], aliases, str(p.value), p.reduce, p.requires_grad, p.bucket < 0))
    first: dict[str, str] = {}
    of_key: dict[Hashable, str] = {}
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for layer in sorted(keys, key=_in_order):
        parent = layer.rpartition(".")[0]
        key = (parent, tuple(keys[layer])) if not full else layer
        one = of_key.setdefault(key, layer)
        alike[one].append(layer.rpartition(".")[2])
        if one != layer:
            first[layer] = one
    return EqualLayers(first, {k: tuple(v) for k, v in alike.items()}, ops)


def ranges(numbers: Iterable[str]) -> str:
    """Numbers in words.

    >>> ranges(["0", "1", "2", "5"])
    '0–2, 5'
    """
    runs: list[list[int]] = []
    for n in map(int, numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def prefixes(name: str) -> list[str]:
    """The layers that a module or a parameter is in, outermost first: `h.3`, `h.3.attn.2`."""
    return [f"{of}.{number}" if of else number for of, number in layers_of(name)]


def _in_order(layer: str) -> tuple[Any, ...]:
    """Layers by number: 2 before 10, a layer before those in it."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in layer.split("."))


def _blank(text: str) -> str:
    return _NUMBER.sub("#", text)


def _key(node: fx.Node, layer: str, places: Mapping[fx.Node, int], inputs: Collection[str]) -> tuple[Hashable, ...]:
    """What an op has to share with its like in another layer."""
    source = source_of(node)
    sent: Collective | None = node.meta.get("collective")
    return (
        source.module[len(layer) :],
        source.code,
        str(node.target),
        tuple((str(v), v.requires_grad) for v in values_of(node)),
        sent and (sent.kind, sent.backward, sent.axes, sent.bytes, sent.packed, _blank(sent.cause)),
        _blank(node.meta.get("region", "")),
        len(node.meta.get("kept", ())),
        node.meta.get("again", 0),
        _argument(node.args, places, inputs),
        _argument({k: v for k, v in node.kwargs.items() if k != "tag"}, places, inputs),  # a tag is a name
    )


def _argument(a: Any, places: Mapping[fx.Node, int], inputs: Collection[str]) -> Hashable:
    if isinstance(a, fx.Node):
        if a in places:
            return places[a]
        stored = a.op == "placeholder" and "collective" not in a.meta and a.name not in inputs
        return _blank(a.name) if stored else "", tuple(map(str, values_of(a)))
    if isinstance(a, (tuple, list)):
        return tuple(_argument(x, places, inputs) for x in a)
    if isinstance(a, Mapping):
        return tuple((k, _argument(v, places, inputs)) for k, v in a.items())
    return _blank(a) if isinstance(a, str) else repr(a)
