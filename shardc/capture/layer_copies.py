"""Replace every `equal_layer` in an exported graph by a copy of the first layer's ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from shardc.capture.rewrite import replace_results
from shardc.capture.rewrite.inline_regions import unchanged
from shardc.capture.rewrite.inner_autograd import GRADIENT
from shardc.ir.graph import placeholders
from shardc.torch_private import HigherOrderOperator, OpOverload

torch.library.define(
    "shardc::equal_layer",
    "(int call, Tensor[] own, Tensor[] first, Tensor[] like) -> Tensor[]",
    tags=torch.Tag.flexible_layout,  # else the tracer fixes the strides of every operand
)

#: (number of the call, inputs of the layer, inputs of the first layer, results of that one). The third is
#: empty except in the first call that copies that layer.
EQUAL_LAYER = torch.ops.shardc.equal_layer.default


class UnlikeError(Exception):
    """Layers that seemed equal are not: the whole model is traced."""


@dataclass
class _First:
    """A layer that was traced. nodes: its ops.

    operands, results: its input and output tensors; weights: its parameters and buffers, by the end of their names.
    """

    nodes: list[fx.Node]
    operands: list[fx.Node]
    results: list[fx.Node]
    weights: dict[str, fx.Node]


def unfold(model: nn.Module, exported: ExportedProgram, calls: Sequence[tuple[str, str]], cut: set[fx.Node]) -> None:
    """Write the copies into a graph. Raises UnlikeError if a layer bypassed its arguments or results.

    calls: (name of a layer that was traced, name of an equal one), by the number of the `equal_layer`; cut: the nodes
    that were computed without gradients, to which their copies are added.
    """
    if not calls:
        return
    graph, nodes, specs = exported.graph, placeholders(exported.graph), exported.graph_signature.input_specs
    by_name = {str(s.target).removeprefix("model."): nodes[s.arg.name] for s in specs}
    tensors = {
        name: x for named in (model.named_parameters, model.named_buffers) for name, x in named(remove_duplicate=False)
    }
    by_tensor: dict[int, fx.Node] = {}
    for name, node in ((n, by_name[n]) for n in tensors if n in by_name):  # one of two names has two placeholders
        if (same := by_tensor.setdefault(id(tensors[name]), node)) is not node:
            node.replace_all_uses_with(same)
    stored = {name: by_tensor[id(x)] for name, x in tensors.items() if id(x) in by_tensor}
    constants = {nodes[s.arg.name] for s in specs if s.kind == InputKind.CONSTANT_TENSOR}  # all copies share them
    if any(n.target is GRADIENT for n in graph.nodes):
        raise UnlikeError("a gradient inside of forward looks at the graph while it is made")
    firsts: dict[str, _First] = {}
    for call in graph.find_nodes(op="call_function", target=EQUAL_LAYER):  # in the order of the graph
        number, inputs, others, like = call.args
        name, layer = calls[number]
        if name not in firsts:
            firsts[name] = _first(graph, name, others, like, stored, constants)
        first = firsts[name]
        env = {x: x for x in constants} | {n: stored[layer + end] for end, n in first.weights.items()}
        for x, y in zip(first.operands, inputs, strict=True):
            if env.setdefault(x, y) is not y:
                raise UnlikeError("one operand of a layer is two of another")
        renamed = _renamer(f"model.{name}", f"model.{layer}")
        with graph.inserting_before(call):
            for n in first.nodes:
                env[n] = graph.node_copy(n, env.__getitem__)
                stack = n.meta["nn_module_stack"]
                env[n].meta["nn_module_stack"] = {renamed(k): (renamed(v[0]), *v[1:]) for k, v in stack.items()}
                if n in cut:
                    cut.add(env[n])
        replace_results(call, [env[n] for n in first.results])


def _first(
    graph: fx.Graph,
    name: str,
    operands: Sequence[fx.Node],
    results: Sequence[fx.Node],
    stored: Mapping[str, fx.Node],
    constants: set[fx.Node],
) -> _First:
    inside = dict.fromkeys(_segment(graph, name))
    taken = [_same_tensor(x, lambda n: n not in inside) for x in operands]
    outputs = [_same_tensor(x, inside.__contains__) for x in results]
    weights = {k.removeprefix(name): n for k, n in stored.items() if k.startswith(f"{name}.")}
    if set(taken) & set(weights.values()):
        raise UnlikeError("a layer gets one of its own weights as an argument")
    known = {*taken, *constants, *weights.values()}
    for n in inside:
        leaves = any(u not in inside and (u.target is not EQUAL_LAYER or n in u.args[1]) for u in n.users)  # type: ignore[operator]
        if n.op != "call_function" or isinstance(n.target, HigherOrderOperator) or (leaves and n not in outputs):
            raise UnlikeError("a layer returns more than its results")
        if any(x not in inside and x not in known for x in n.all_input_nodes):
            raise UnlikeError("a layer takes more than its arguments and weights")
    return _First(list(inside), taken, outputs, weights)


def _segment(graph: fx.Graph, path: str) -> list[fx.Node]:
    """Return the nodes that a layer added."""
    full = f"model.{path}"
    return [n for n in graph.nodes if any(v[0] == full for v in (n.meta.get("nn_module_stack") or {}).values())]


def _same_tensor(node: fx.Node, fits: Callable[[fx.Node], bool]) -> fx.Node:
    """Return the earlier node of a tensor that `fits`.

    An op that returns its operand, such as `x.to(dtype)` of the same dtype, or that writes into it, makes a new node.
    """
    before: Any = node
    while not fits(before):
        writes = isinstance(before.target, OpOverload) and before.target._schema.is_mutable
        before = before.args[0] if writes else unchanged(before) if before.op == "call_function" else None
        if before is None:
            raise UnlikeError("operands or results of a layer are none in the graph")
    result: fx.Node = before
    return result


def _renamer(first: str, layer: str) -> Callable[[str], str]:
    """Return a function that maps a module's name in one layer to its name in another."""

    @cache
    def renamed(text: str) -> str:
        within = text == first or text.startswith(f"{first}.")
        return layer + text.removeprefix(first) if within else text

    return renamed
