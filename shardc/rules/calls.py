"""The calls of a global graph, as rules see them: operands, results, types, and the choices that an op's rule gives."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from shardc.ir.program import Value
from shardc.ir.types import typed_key
from shardc.rules import registry
from shardc.rules.index import all_whole
from shardc.rules.registry import Call, Choices, Operand


def tensors(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a node, in the order of its arguments; a tensor used twice appears twice."""
    found: list[fx.Node] = []
    _collect(node.args, found)
    for name in sorted(node.kwargs):
        _collect(node.kwargs[name], found)
    return found


def _collect(x: Any, found: list[fx.Node]) -> None:  # placement asks very often: fx's own map is five times as slow
    if isinstance(x, fx.Node):
        if x.meta.get("value") is not None:
            found.append(x)
    elif isinstance(x, (tuple, list)):
        for item in x:
            _collect(item, found)
    elif isinstance(x, dict):
        for item in x.values():
            _collect(item, found)


def result(node: fx.Node) -> tuple[fx.Node, int]:
    """The op and the index of its result that a node stands for (getitem looks through)."""
    if node.target is operator.getitem:
        parent = node.args[0]
        assert isinstance(parent, fx.Node)
        assert isinstance(node.args[1], int)
        return parent, node.args[1]
    return node, 0


def values(node: fx.Node) -> tuple[Value, ...]:
    v = node.meta["value"]
    return v if isinstance(v, tuple) else (v,)


def call_of(node: fx.Node) -> Call:
    """The call without the graph."""
    operands: list[Value] = []

    def put(n: fx.Node) -> Any:
        v = n.meta.get("value")
        if v is None:
            return n.name
        operands.append(v)
        return Operand(len(operands) - 1)

    args = fx.node.map_arg(node.args, put)
    kwargs = fx.node.map_arg(dict(sorted(node.kwargs.items())), put)
    return Call(node.target, tuple(args), tuple(kwargs.items()), tuple(operands), values(node))


def choices_of(node: fx.Node, cache: dict[Any, Choices]) -> Choices:
    """The call's choices; calls that look alike (repeated layers) share them."""
    key = (node.target, typed_key(node.args), typed_key(dict(sorted(node.kwargs.items()))), node.meta["value"])
    if key not in cache:
        call = call_of(node)
        rule = registry.find(call.target)
        if rule is None:  # unknown_ops: replicate; `check_rules` has refused it otherwise
            rule = registry.Rule(call.target, all_whole)
        cache[key] = Choices(rule, call, rule.signature(call))
    return cache[key]
