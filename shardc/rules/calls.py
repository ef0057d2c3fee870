"""What a rule is given of a node of a graph: the `Call`, without the graph, and the choices that its rule offers."""

from __future__ import annotations

from typing import Any

from torch import fx

from shardc.ir.graph import values_of
from shardc.ir.program import Value
from shardc.ir.types import typed_key
from shardc.rules import registry
from shardc.rules.index import all_whole
from shardc.rules.registry import Call, Choices, Operand


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
    return Call(node.target, tuple(args), tuple(kwargs.items()), tuple(operands), values_of(node))


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
