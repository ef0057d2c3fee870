"""Build the graphs of the page: the model on one device, and the ranks' program, as boxes and edges.

Views and copies are left out. A run of layers that equal a shown one becomes one box: "layers 1–79, as layer 0".
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import fx

from shardc.artifact.emit import value_text
from shardc.ir.graph import source_of
from shardc.ir.program import Program
from shardc.ir.repeats import Repeats
from shardc.ir.types import op_name
from shardc.layer_names import enclosing_layers, ranges
from shardc.runtime import ops

#: Ops that compute nothing: their users are drawn as users of their operand.
_VIEWS = {
    "alias", "clone", "contiguous", "detach", "expand", "flatten", "getitem", "narrow", "permute", "reshape", "select",
    "slice", "split", "split_with_sizes", "squeeze", "swapaxes", "t", "to_partial", "transpose", "unflatten",
    "unsqueeze", "view", "chunk", "unbind",
}  # fmt: skip
#: Ops that only pass on the result of an op that was started.
_PLUMBING = (ops.wait, ops.gather_wait, ops.updated)


class Graph:
    """The boxes of a graph. params, messages: numbers by name of parameter and by node.

    A box is an op, an input, or a run of equal layers. name: in the program's line; op: what it calls; module, line,
    code: of the model; type: of its result; stage: -1 in the model's graph. uses: numbers of the boxes that it reads;
    params: of the parameters that it reads; message: number of a collective's message. Of a run, layers: its numbers;
    like: the layer that is shown.
    """

    def __init__(self, layers: Repeats, params: Mapping[str, int], messages: Mapping[fx.Node, int]) -> None:
        self.ops: list[dict[str, Any]] = []
        self._layers, self._params, self._messages = layers, params, messages
        self._box: dict[fx.Node, int] = {}
        self._run: dict[tuple[int, str], int] = {}  # of (stage, a layer that is left out): its box
        self._sent: dict[str, fx.Node] = {}  # the nodes that stages send to others

    def add(self, graph: fx.Graph, stage: int = -1, sends: Iterable[str] = ()) -> None:
        """Add the boxes of one graph. Stages must come in the order in which they use each other."""
        runs = dict(self._runs(graph))
        self._sent |= {n.name: n for n in graph.nodes if n.op != "placeholder" and n.name in sends}
        for n in graph.nodes:
            if n.op == "placeholder":
                self._placeholder(n, stage)
            elif n.op == "call_function" and not is_view(n) and n.target not in _PLUMBING:
                layer = self._layers.left_out(source_of(n).module)
                if layer:
                    self._left_out(n, layer, runs[layer], stage)
                else:
                    uses, params = self._operands(n)
                    message = self._messages.get(n) if "collective" in n.meta else None
                    self._add(n, _name(n), stage, uses=uses, params=params, message=message)

    def _add(self, n: fx.Node, op: str, stage: int, **more: Any) -> None:
        source = source_of(n)
        place = {"module": source.module, "line": source.line, "code": source.code}
        self._box[n] = len(self.ops)
        box = {"name": n.name, "op": op, **place, "type": value_text(n.meta.get("value")), "stage": stage}
        self.ops.append(box | more)

    def _placeholder(self, n: fx.Node, stage: int) -> None:
        if n.meta.get("value") is None or n.name in self._params:
            return
        if "collective" not in n.meta:
            self._add(n, "input", stage, module="", input=True)
            return
        maker = self._box.get(self._sent[n.name]) if n.name in self._sent else None  # from another stage
        # between layers that are one box each, it is in the graph around them
        place = {"module": ""} if self._layers.left_out(source_of(n).module) else {}
        uses = [] if maker is None else [maker]
        self._add(n, "receive", stage, uses=uses, message=self._messages.get(n), **place)

    def _left_out(self, n: fx.Node, layer: str, run: Sequence[str], stage: int) -> None:
        if (stage, layer) not in self._run:
            self._run |= {(stage, x): len(self.ops) for x in run}
            parent = layer.rpartition(".")[0]
            numbers = ranges(x.rpartition(".")[2] for x in run)
            like = self._layers.first[layer]
            self._add(n, "layers", stage, module=parent, line="", code="", uses=[], layers=numbers, like=like)
        self._box[n] = at = self._run[stage, layer]
        box = self.ops[at]
        box["uses"] += [x for x in self._operands(n)[0] if x != at and x not in box["uses"]]
        box["type"] = value_text(n.meta.get("value"))  # the last op of the run sets it last

    def _runs(self, graph: fx.Graph) -> Iterator[tuple[str, list[str]]]:
        """Yield (layer, the layers of its run) for layers left out: neighbours that equal the same one."""
        order: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for n in graph.nodes:
            if n.op == "call_function" and not is_view(n):
                module = source_of(n).module
                for layer in enclosing_layers(module):
                    order[layer.rpartition(".")[0]].setdefault(layer)
                    if layer in self._layers.first:
                        break
        for layers in order.values():
            for like, same in groupby(layers, self._layers.first.get):
                run = list(same)
                yield from ((layer, run) for layer in run if like is not None)

    def _operands(self, n: fx.Node) -> tuple[list[int], list[int]]:
        """Return (boxes, parameters) that an op reads."""
        made = [self._box.get(_drawn(x)) for x in n.all_input_nodes]
        stored = [_drawn(x, through_gathers=True) for x in n.all_input_nodes]
        params = [self._params[x.name] for x in stored if x.op == "placeholder" and x.name in self._params]
        return list(dict.fromkeys(x for x in made if x is not None)), list(dict.fromkeys(params))


def _drawn(n: fx.Node, *, through_gathers: bool = False) -> fx.Node:
    """Return the op that a value is drawn from, through views and waits; for a gathered parameter, the gather's start.

    through_gathers: for that, the parameter.
    """
    while n.op == "call_function":
        gather = _gather(n.args[0]) if n.target is operator.getitem else None
        if gather is not None and not through_gathers:
            return gather
        if gather is not None:
            n = gather.args[0][n.args[1]]  # type: ignore[index, assignment]
        elif is_view(n) or n.target is ops.wait or (through_gathers and "collective" in n.meta):
            n = n.all_input_nodes[0]
        else:
            break
    return n


def _gather(n: object) -> fx.Node | None:
    """Return the op that starts on a bucket's parameters, for the op that returns them whole; else None."""
    if not isinstance(n, fx.Node) or n.target not in (ops.gather_wait, ops.updated):
        return None
    started: Any = n.args[0] if n.target is ops.gather_wait else n
    return started if isinstance(started, fx.Node) else None


def is_view(n: fx.Node) -> bool:
    return _name(n) in _VIEWS


def _name(n: fx.Node) -> str:
    return op_name(n.target).lstrip("_")


def graphs(
    program: Program, layers: Repeats, params: Mapping[str, int], messages: Mapping[fx.Node, int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the graphs (before, after) the passes; after is empty for a program that is not compiled."""
    before, after = Graph(layers, params, {}), Graph(layers, params, messages)
    before.add(program.graph)
    if program.prologue is not None:
        after.add(program.prologue.graph, -1)
    for i, stage in enumerate(program.stages):
        after.add(stage.graph, i, stage.sends)
    return before.ops, after.ops
