"""Define small functions on fx graphs: copy one, list its placeholders and calls, read node metadata.

A *call* is a `call_function` node that runs an op. A `getitem` is not a call: it picks one result of an earlier call.
Functions here that look at an op's operands, results or users look through it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from shardc.ir.metadata import Value
from shardc.ir.source import Source
from shardc.torch_private import add_node

_NOWHERE = Source()


def copy_graph(graph: fx.Graph, env: dict[fx.Node, fx.Node] | None = None, into: fx.Graph | None = None) -> fx.Graph:
    """Copy a graph. Nodes keep their names, and each new node has its own metadata dict.

    env: maps old nodes to new ones. It is filled here; nodes that are already in it are not copied. into: the graph to
    append to; default: a new one.
    """
    new, env = fx.Graph() if into is None else into, {} if env is None else env
    for n in graph.nodes:
        if n.op == "output":
            new.output(fx.map_arg(n.args[0], env.__getitem__))
        elif n not in env:
            args, kwargs = (fx.map_arg(a, env.__getitem__) for a in (n.args, n.kwargs))
            env[n] = add_node(new, n.op, n.target, args, kwargs, name=n.name, meta=n.meta)
    return new


def reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Move calls to the end of a graph, in this order."""
    output = graph.output_node()
    for n in order:
        output.prepend(n)


def placeholders(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return the placeholders by name, in order."""
    return {n.name: n for n in graph.find_nodes(op="placeholder")}


def is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """Return the nodes that run an op, in order."""
    return filter(is_call, graph.nodes)


def source_of(node: fx.Node) -> Source:
    """Return where in the user's model a node came from; an empty `Source` for the compiler's own nodes."""
    source: Source = node.meta.get("source", _NOWHERE)
    return source


def values_of(node: fx.Node) -> tuple[Value, ...]:
    """Return the types of a node's results, one or several; () for `mesh` and `rng`."""
    value = node.meta.get("value")
    return value if isinstance(value, tuple) else () if value is None else (value,)


def value_of(node: fx.Node) -> Value:
    """Return the type of a node that has one result."""
    value = node.meta["value"]
    assert isinstance(value, Value), f"{node} has several results, or none"
    return value


def map_value(function: Callable[[Value], Any], value: Any) -> Any:
    """Apply `function` to a node's value, or to each value in a tuple; None stays None."""
    if isinstance(value, tuple):
        return tuple(v and function(v) for v in value)
    return value and function(value)


def producer_of(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the op that computed a value, and the index of the value among the op's results."""
    if node.target is operator.getitem:
        op, index = node.args
        assert isinstance(op, fx.Node)
        assert isinstance(index, int)
        return op, index
    return node, 0


def users_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that use a node's result, or one of its results."""
    return [u for user in node.users for u in (users_of(user) if user.target is operator.getitem else [user])]


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return a node's tensor operands, in the order of its arguments; a tensor used twice appears twice."""
    operands: list[fx.Node] = []
    _collect(node.args, operands)
    for name in sorted(node.kwargs):
        _collect(node.kwargs[name], operands)
    return operands


#: At most this many ops make one weight of several stored tensors. A value of more ops counts as an activation.
_MAKES = 64


def stored_alone(node: fx.Node) -> bool:
    """Return whether a value is computed only from stored tensors, such as a weight of numbers and scales."""
    todo, seen = [producer_of(node)[0]], set[fx.Node]()
    while todo:
        op = todo.pop()
        if op in seen:
            continue
        seen.add(op)
        if len(seen) > _MAKES or (op.op == "placeholder" and not op.meta.get("stored")):
            return False
        todo += [producer_of(x)[0] for x in operands_of(op)]
    return True


def enlarges(node: fx.Node) -> bool:
    """Return whether an op's results have more elements than its operands."""
    operands = (v for x in operands_of(node) for v in values_of(x))
    return sum(math.prod(v.shape) for v in values_of(node)) > sum(math.prod(v.shape) for v in operands)


def _collect(x: Any, operands: list[fx.Node]) -> None:  # placement calls it very often: fx's own map takes 5x as long
    if isinstance(x, fx.Node):
        if x.meta.get("value") is not None:
            operands.append(x)
    elif isinstance(x, (tuple, list)):
        for item in x:
            _collect(item, operands)
    elif isinstance(x, dict):
        for item in x.values():
            _collect(item, operands)
