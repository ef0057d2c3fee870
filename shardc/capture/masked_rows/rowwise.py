"""Check that calls work on each row separately: by the rules, rows are a factor that may be split."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from shardc.capture.masked_rows.rows import Unfit
from shardc.capture.rewrite.functional_twins import arguments_of, mutates, twin_of
from shardc.ir import types as values
from shardc.ir.graph import operands_of
from shardc.ir.metadata import Value
from shardc.ir.source import Source
from shardc.passes.canonical import rewritten
from shardc.rules.core import registry
from shardc.rules.core.op_call import call_of


def follow(new: Sequence[fx.Node], rows: dict[fx.Node, int]) -> dict[fx.Node, int | None]:
    """Return along which dim each call has its operands' rows; None: it does not depend on rows.

    Raises Unfit for an op that mixes rows, by the rule of its canonical form: rows are one of the factors that may
    be split, in every operand that has rows, in no other one, and in every result.
    """
    graph = fx.Graph()
    for name in ("mesh", "rng"):
        graph.placeholder(name).meta["value"] = None
    env: dict[fx.Node, fx.Node] = {}
    for x in dict.fromkeys(x for n in new for x in (*n.all_input_nodes, n)):
        if x not in new or x.op == "get_attr":
            env[x] = graph.placeholder(f"given_{len(env)}")
            env[x].meta = {"value": values.typed(x.meta.get("val"), None, (), {})}
    given = {env[n].name: d for n, d in rows.items() if n in env}
    results: list[fx.Node] = []
    for n in new:
        if n in env:
            continue
        if n.op != "call_function":
            raise Unfit(f"{n.op} {n.target}")
        copy = graph.node_copy(n, env.__getitem__)
        _without_write(copy)
        copy.meta = {"source": Source(), "value": values.typed(n.meta.get("val"), copy.target, copy.args, {})}
        env[n] = copy
        if isinstance(copy.meta["value"], Value):
            results.append(n)
    graph.output(tuple(env[n] for n in results))
    canonical = rewritten(graph)
    if canonical.refused:
        raise Unfit(str(next(iter(canonical.refused.values()))))
    dims: dict[fx.Node, Any] = {}
    for n in canonical.graph.nodes:
        if n.op == "placeholder":
            dims[n] = given.get(n.name)
        elif n.target is operator.getitem:
            many = dims[n.args[0]]
            dims[n] = many[n.args[1]] if isinstance(many, tuple) else many
        elif n.op == "call_function":
            dims[n] = _through(n, dims)
    output: Any = canonical.graph.output_node().args[0]
    return {n: dims[out] for n, out in zip(results, output, strict=True)}


def _without_write(call: fx.Node) -> None:
    """Replace an in-place op by its functional twin."""
    if mutates(call):
        twin = twin_of(call.target)
        if twin is None or values.op_name(twin) in ("copy", "index_add", "scatter_add", "index_copy"):
            raise Unfit(f"{call.target} writes to them")
        call.args, call.kwargs = arguments_of(twin, call)
        call.target = twin


def _through(node: fx.Node, dims: dict[fx.Node, Any]) -> Any:
    operands = operands_of(node)
    operand_dims = [dims[x] for x in operands]
    if all(d is None for d in operand_dims):
        return None
    rule = registry.find(node.target)
    if rule is None:
        raise Unfit(f"{node.target} has no rule")
    sig = rule.signature(call_of(node))
    (rows, *others) = {sig.inputs[i][d] for i, d in enumerate(operand_dims) if d is not None}
    elsewhere = (f for i, d in enumerate(operand_dims) for other, f in enumerate(sig.inputs[i]) if other != d)
    split = {*sig.summed, *sig.whole, *(name for f in elsewhere for name in f)}
    places = [[d for d, f in enumerate(out) if f == rows] for out in sig.outputs]
    if others or not rows or not split.isdisjoint(rows) or not all(places):
        raise Unfit(f"{node.target} mixes them")
    return tuple(p[0] for p in places) if isinstance(node.meta["value"], tuple) else places[0][0]
