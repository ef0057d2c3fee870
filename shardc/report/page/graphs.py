"""Build the graphs of the page: the model on one device, and the ranks' program, as boxes and edges.

Views and copies are left out. A run of layers that equal a shown one becomes one box: "layers 1–79, as layer 0".
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardc.artifact.emit import value_text
from shardc.ir.graph import source_of
from shardc.ir.program import Program
from shardc.ir.repeats import Repeats
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


@dataclass
class Op:
    """A box of a graph.

    name: in the program's line; op: what it calls; module, line, code: of the model; type: of its result. uses: numbers
    of the boxes that it reads. params: numbers of the parameters that it reads. message: number of a collective's
    message. stage: -1 in the model's graph. layers: the numbers of a run of equal layers, like: the one that is shown.
    """

    name: str
    op: str
    module: str
    type: str = ""
    line: str = ""
    code: str = ""
    stage: int = -1
    uses: list[int] = field(default_factory=list)
    params: list[int] = field(default_factory=list)
    message: int | None = None
    layers: str = ""
    like: str = ""
    input: bool = False


class Graph:
    """The boxes of a graph. params, messages: numbers by name of parameter and by node."""

    def __init__(self, layers: Repeats, params: Mapping[str, int], messages: Mapping[fx.Node, int]) -> None:
        self.ops: list[Op] = []
        self._layers, self._params, self._messages = layers, params, messages
        self._box: dict[fx.Node, int] = {}
        self._run: dict[tuple[int, str], int] = {}  # of (stage, a layer that is left out): its box
        self._sent: dict[str, fx.Node] = {}  # the nodes that stages send to others

    def add(self, graph: fx.Graph, stage: int = -1, sends: Iterable[str] = ()) -> None:
        """Add the boxes of one graph. Stages must come in the order in which they use each other."""
        names = set(sends)
        runs = dict(self._runs(graph))
        for n in graph.nodes:
            if n.name in names and n.op != "placeholder":
                self._sent[n.name] = n
            if n.op == "placeholder":
                self._placeholder(n, stage)
            elif n.op == "call_function" and not is_view(n) and n.target not in _PLUMBING:
                layer = self._layers.left_out(source_of(n).module)
                if layer:
                    self._left_out(n, layer, runs[layer], stage)
                else:
                    self._op(n, stage)

    def _placeholder(self, n: fx.Node, stage: int) -> None:
        if n.meta.get("value") is None or n.name in self._params:
            return
        box = Op(n.name, "input", "", value_text(n.meta["value"]), stage=stage, input=True)
        if "collective" in n.meta:  # from another stage
            maker = self._sent.get(n.name)
            source = source_of(n)
            box = Op(n.name, "receive", source.module, box.type, source.line, source.code, stage)
            box.uses = [self._box[maker]] if maker in self._box else []
            box.message = self._messages.get(n)
            if self._layers.left_out(box.module):
                box.module = ""  # between layers that are one box each
        self._box[n] = len(self.ops)
        self.ops.append(box)

    def _op(self, n: fx.Node, stage: int) -> None:
        source = source_of(n)
        box = Op(n.name, op_name(n), source.module, value_text(n.meta.get("value")), source.line, source.code, stage)
        box.message = self._messages.get(n) if "collective" in n.meta else None
        box.uses, box.params = self._operands(n)
        self._box[n] = len(self.ops)
        self.ops.append(box)

    def _left_out(self, n: fx.Node, layer: str, run: Sequence[str], stage: int) -> None:
        at = self._run.get((stage, layer))
        if at is None:
            at = len(self.ops)
            parent = layer.rpartition(".")[0]
            numbers = ranges(x.rpartition(".")[2] for x in run)
            like = self._layers.first[layer]
            self.ops.append(Op(n.name, "layers", parent, stage=stage, layers=numbers, like=like))
            self._run |= {(stage, x): at for x in run}
        self._box[n] = at
        box = self.ops[at]
        box.uses += [x for x in self._operands(n)[0] if x != at and x not in box.uses]
        box.type = value_text(n.meta.get("value"))  # the last op of the run sets it last

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
            run: list[str] = []
            for layer in layers:
                like = self._layers.first.get(layer)
                if run and self._layers.first.get(run[0]) != like:
                    run = []
                if like is not None:
                    run.append(layer)
                    yield layer, run

    def _operands(self, n: fx.Node) -> tuple[list[int], list[int]]:
        """Return (boxes, parameters) that an op reads."""
        uses: dict[int, None] = {}
        params: dict[int, None] = {}
        for operand in n.all_input_nodes:
            x, weight = drawn(operand), drawn(operand, through_gathers=True)
            if weight.op == "placeholder" and weight.name in self._params:
                params.setdefault(self._params[weight.name])
            if x in self._box:
                uses.setdefault(self._box[x])
        return list(uses), list(params)


def drawn(n: fx.Node, *, through_gathers: bool = False) -> fx.Node:
    """Return the op that a value is drawn from, through views and waits; for a gathered parameter, the gather's start.

    through_gathers: for that, the parameter.
    """
    while n.op == "call_function":
        gather = _gather(n.args[0]) if n.target is operator.getitem else None
        if gather is not None and not through_gathers:
            return gather
        if gather is not None:
            n = gather.args[0][n.args[1]]  # type: ignore[index, assignment]
        elif is_view(n) or n.target is ops.wait or (through_gathers and "collective" in n.meta and of_parameter(n)):
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


def of_parameter(n: fx.Node) -> bool:
    """Return whether a collective is on a parameter, by the parameter's type."""
    source = n.all_input_nodes[0]
    value = source.meta.get("value")
    return source.op == "placeholder" and "collective" not in source.meta and bool(value and value.requires_grad)


def op_name(n: fx.Node) -> str:
    """Return the short name of an op: `linear` for `aten.linear.default`."""
    name = getattr(n.target, "__name__", str(n.target))
    return name.split(".")[0].lstrip("_")


def is_view(n: fx.Node) -> bool:
    return op_name(n) in _VIEWS


def graphs(
    program: Program, layers: Repeats, params: Mapping[str, int], messages: Mapping[fx.Node, int]
) -> tuple[list[Op], list[Op]]:
    """Return the graphs (before, after) the passes; after is empty for a program that is not compiled."""
    before, after = Graph(layers, params, {}), Graph(layers, params, messages)
    before.add(program.graph)
    if program.prologue is not None:
        after.add(program.prologue.graph, -1)
    for i, stage in enumerate(program.stages):
        after.add(stage.graph, i, stage.sends)
    return before.ops, after.ops
