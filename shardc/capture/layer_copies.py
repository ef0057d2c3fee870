"""In the exported graph of a model whose equal layers were traced once, a copy of the first layer's ops takes the place
of every `equal_layer`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from shardc.capture.inline_regions import unchanged
from shardc.capture.inner_autograd import GRADIENT
from shardc.torch_private import HigherOrderOperator, OpOverload

torch.library.define(
    "shardc::equal_layer",
    "(int call, Tensor[] own, Tensor[] first, Tensor[] like) -> Tensor[]",
    tags=torch.Tag.flexible_layout,  # else the tracer keeps how every operand lies
)

#: (number of the call, tensors that the layer takes, those that the first layer took, what that one gave). The third is
#: empty but in the first call that stands for a copy of that layer.
EQUAL_LAYER = torch.ops.shardc.equal_layer.default


class UnlikeError(Exception):
    """Layers that were taken for equal are not: the model is traced whole."""


class Copied(NamedTuple):
    """The names of a layer that was traced, and of one that is equal to it."""

    first: str
    layer: str


@dataclass
class Copy:
    """What is to take the place of an `equal_layer`. operands: tensors that the first layer takes, and this one;
    results: those that the first one gives.
    """

    first: str
    layer: str
    operands: dict[fx.Node, fx.Node]
    results: list[fx.Node]


class Copies:
    """The copies to be made in a graph. stored: the placeholder of every parameter and buffer that it has, by its
    names. constants: their placeholders, which all copies of a layer share.

    Raises UnlikeError where a layer took or gave more than its arguments, weights and results.
    """

    def __init__(
        self,
        graph: fx.Graph,
        calls: Sequence[Copied],
        stored: Mapping[str, fx.Node],
        constants: Collection[fx.Node] = (),
    ) -> None:
        if any(n.target is GRADIENT for n in graph.nodes):
            raise UnlikeError("a gradient inside of forward looks at the graph while it is made")
        self._graph, self._calls, self._stored = graph, calls, stored
        self.constants = {x: x for x in constants}
        self.segments: dict[str, list[fx.Node]] = {}  # the ops of a layer that was traced
        self._operands: dict[str, list[fx.Node]] = {}
        self._results: dict[str, list[fx.Node]] = {}

    def unfold(self, cut: set[fx.Node]) -> None:
        """Write the copies into this graph. cut: see `equal_layers.unfold`."""
        graph, weights = self._graph, _Weights(self._stored)
        for call in graph.find_nodes(op="call_function", target=EQUAL_LAYER):
            copy = self.of(call)
            renamed = _renamer(f"model.{copy.first}", f"model.{copy.layer}")
            env = copy.operands | weights.of(copy.first, copy.layer) | self.constants
            with graph.inserting_before(call):
                for n in self.segments[copy.first]:
                    env[n] = graph.node_copy(n, env.__getitem__)
                    stack = n.meta["nn_module_stack"]
                    env[n].meta["nn_module_stack"] = {renamed(k): (renamed(v[0]), *v[1:]) for k, v in stack.items()}
                    if n in cut:
                        cut.add(env[n])
            for user in list(call.users):
                assert user.target is operator.getitem
                user.replace_all_uses_with(env[copy.results[int(user.args[1])]])
                graph.erase_node(user)
            graph.erase_node(call)

    def of(self, call: fx.Node) -> Copy:
        """What is to take the place of a call. The calls come in the order of the graph."""
        args: Any = call.args
        number, own, others, like = args
        first, layer = self._calls[number]
        if first not in self.segments:
            inside = dict.fromkeys(_segment(self._graph, first))
            self.segments[first] = list(inside)
            self._operands[first] = [_same_tensor(x, lambda n: n not in inside) for x in others]
            self._results[first] = [_same_tensor(x, inside.__contains__) for x in like]
            self._check(first, inside)
        taken: dict[fx.Node, fx.Node] = {}
        for x, y in zip(self._operands[first], own, strict=True):
            if taken.setdefault(x, y) is not y:
                raise UnlikeError("one operand of a layer is two of another")
        return Copy(first, layer, taken, self._results[first])

    def _check(self, first: str, inside: Mapping[fx.Node, Any]) -> None:
        given = set(self._results[first])
        weights = {n for name, n in self._stored.items() if name.startswith(f"{first}.")}
        taken = set(self._operands[first])
        if taken & weights:
            raise UnlikeError("a layer is given one of its own weights")
        taken |= self.constants.keys()
        for n in inside:
            leaves = any(u not in inside and (u.target is not EQUAL_LAYER or n in u.args[1]) for u in n.users)  # type: ignore[operator]
            if n.op != "call_function" or isinstance(n.target, HigherOrderOperator) or (leaves and n not in given):
                raise UnlikeError("a layer gives more than its results")
            if any(x not in inside and x not in taken and x not in weights for x in n.all_input_nodes):
                raise UnlikeError("a layer takes more than its arguments and weights")


def _segment(graph: fx.Graph, path: str) -> list[fx.Node]:
    """The nodes that a layer added."""
    full = f"model.{path}"
    return [n for n in graph.nodes if any(v[0] == full for v in (n.meta.get("nn_module_stack") or {}).values())]


def _same_tensor(node: fx.Node, fits: Callable[[fx.Node], bool]) -> fx.Node:
    """The name that a tensor had earlier: an op that gives its operand back, as `x.to(dtype)` of that dtype, or that
    writes into it, gives it a new one, by which it goes from then on.
    """
    before: Any = node
    while not fits(before):
        writes = isinstance(before.target, OpOverload) and before.target._schema.is_mutable
        before = before.args[0] if writes else unchanged(before) if before.op == "call_function" else None
        if before is None:
            raise UnlikeError("operands or results of a layer are none in the graph")
    found: fx.Node = before
    return found


class _Weights:
    """The placeholders of one layer -> those of another. stored: see `Copies`."""

    def __init__(self, stored: Mapping[str, fx.Node]) -> None:
        self._stored = stored
        self._of: dict[str, dict[str, fx.Node]] = {}  # by name in the layer

    def of(self, first: str, layer: str) -> dict[fx.Node, fx.Node]:
        if first not in self._of:
            begins = f"{first}."
            self._of[first] = {k.removeprefix(first): n for k, n in self._stored.items() if k.startswith(begins)}
        return {n: self._stored[layer + name] for name, n in self._of[first].items()}


def _renamer(first: str, layer: str) -> Callable[[str], str]:
    """A module's name in one layer -> in another."""
    begins, known = f"{first}.", dict[str, str]()

    def renamed(text: str) -> str:
        if text not in known:
            within = text == first or text.startswith(begins)
            known[text] = layer + text.removeprefix(first) if within else text
        return known[text]

    return renamed
