"""Find calls that have the same value, by keys, in the model's graph and in the texts of ranks.

    a = aten.mul.Tensor(x, y)
    b = aten.mul.Tensor(x, y)     one value: `Model.one` has {a: a, b: a}
    c = aten.alias.default(b)     and so {c: a}

Arguments that only name a call (`tag`) or say when it runs (`overlap`) do not change its value.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import calls, producer_of, value_of
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.ir.types import typed_key
from shardc.optional import table
from shardc.rules.core.choices import Choices, choices_of
from shardc.verify.static import op_strategies
from shardc.verify.static.statement import mesh_of

aten = torch.ops.aten
#: Keyword arguments that do not change the result.
_ASIDE = {"tag", "overlap"}
#: Ops that return their operand.
SAME = {aten.alias.default}


class Model:
    """The model's graph and its equal values: two calls of one op on the same values are one value."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph, self.mesh = program, program.graph, mesh_of(program)
        self.weights = op_strategies.weight_like(program.graph, {p.name for p in program.params})
        inputs = {x.name for x in program.inputs}
        self.inputs = {n for n in program.graph.nodes if n.op == "placeholder" and n.name in inputs}
        self.choices: dict[Any, Choices] = {}
        self.one: dict[fx.Node, fx.Node] = {}
        self.by_call: dict[Any, fx.Node] = {}
        self.items: dict[tuple[fx.Node, int], fx.Node] = {}
        #: Truth values as numbers, where the model does not cast them.
        self.counts: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            self.one[node] = node
            if node.op != "call_function":
                continue
            if node.target in SAME:
                self.one[node] = self.one[node.args[0]]
                continue
            key = call_key(node.target, node.args, node.kwargs, self.one)
            self.one[node] = self.by_call.setdefault(key, node)
            if node.target is operator.getitem:
                op, i = producer_of(node)
                self.items[self.one[op], i] = self.one[node]
        self.calls = [n for n in calls(self.graph) if self.one[n] is n and n.target not in SAME]
        #: All names of one value.
        self.names: dict[fx.Node, set[str]] = {}
        for node, one in self.one.items():
            self.names.setdefault(one, set()).add(node.name)

    def choices_of(self, node: fx.Node) -> Choices:
        return choices_of(node, self.choices)

    def added(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Value, of: fx.Node | None = None
    ) -> fx.Node:
        """Return a call that the model does not have. of: the call of the model that has its value, if one has."""
        node = fx.Node(fx.Graph(), f"added{len(self.one)}", "call_function", target, args, kwargs)
        node.meta["value"], self.one[node] = value, of or node
        for x in node.all_input_nodes:
            del x.users[node]  # the model's graph stays as it is
        return node

    def cast(self, of: fx.Node, dtype: Any) -> fx.Node | None:
        """Return a value in a dtype: itself, or the model's cast of it; None if the model has no cast."""
        if value_of(of).dtype == dtype:
            return of
        key = call_key(aten._to_copy.default, (of,), {"dtype": dtype}, self.one)
        return self.by_call.get(key)


def frozen(x: Any, one: Mapping[fx.Node, fx.Node]) -> Any:
    """Return an argument as a key, with each node's equal one in its place."""
    return typed_key(x, lambda n: one.get(n, n))


def call_key(target: Any, args: Any, kwargs: Mapping[str, Any], one: Mapping[fx.Node, fx.Node]) -> Any:
    named = {k: v for k, v in kwargs.items() if k not in _ASIDE}
    if target in (forms := table("proof", "SAME_CALL")):
        args = forms[target](args, one)
    return target, frozen(args, one), frozen(named, one)


def misreads(node: fx.Node) -> bool:
    """Return whether an op reads bytes of 8-bit numbers as values."""
    read = [x for x in node.all_input_nodes if x.target in table("proof", "BYTES")]
    at = table("proof", "READS_BYTES").get(node.target) if read else None
    return any(at is None or x not in node.args[at : at + 1] for x in read)
