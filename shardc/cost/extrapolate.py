"""Models of many layers from models of few: repeated layers are alike, so that what a step takes is linear in their
number.

captured = shardc.capture.capture(model, batch)          126 layers
few, more = fewer(captured, 2), fewer(captured, 3)       compile and price these: quickly
of_layers(cost_few, cost_more, 2, 3, 126)                what the whole model takes

before   h.0   h.1   h.2   h.3   ...   h.95  ln_f(h.95)        after (2)    h.0   h.1   ln_f(h.1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from shardc.cost.replay import Memory
from shardc.cost.step import Cost, RankCost
from shardc.errors import ShardcError
from shardc.ir.layers import layer_of
from shardc.ir.program import Param, Program, Source


def layers(captured: Program) -> dict[str, list[str]]:
    """The model's lists of layers that repeat, by name, each with its layers' numbers in
    the order in which they run.
    """
    found: dict[str, dict[str, None]] = {}
    for n in captured.graph.nodes:
        if n.op == "call_function" and (at := _at(n)) is not None:
            found.setdefault(at[0], {})[at[1]] = None
    return {name: list(each) for name, each in found.items() if len(each) > 1}


def fewer(captured: Program, count: int) -> Program:
    """The captured program of the same model with `count` layers in every list of layers: those after them are left
    out.

    Raises ShardcError where layers are not alike, or something but the last one's successor uses what one of them
    makes."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(captured.graph, {}))
    for found, node in zip(captured.graph.nodes, copy.nodes, strict=True):
        node.meta = dict(found.meta)
    dropped: set[tuple[str, str]] = set()
    for name, numbers in layers(captured).items():
        if len(numbers) > count:
            _cut(copy, name, numbers, count)
            dropped |= {(name, n) for n in numbers[count:]}
    gone = {x.name for x in captured.stored if isinstance(x, Param) and _all_in((x.fqn, *x.aliases), dropped)}
    gone |= {b.name for b in captured.buffers if b.fqn and _all_in((b.fqn, *b.aliases), dropped)}
    updated = [b.name for b in captured.buffers if b.updated]
    output = copy.output_node()
    returned: Any = output.args[0]
    loss, news, *rest = returned
    output.args = ((loss, tuple(x for x, b in zip(news, updated, strict=True) if b not in gone), *rest),)
    for node in reversed(list(copy.nodes)):
        at = _at(node)
        if node.name in gone if node.op == "placeholder" else at is not None and at in dropped:
            if node.users:
                what = f"{next(iter(node.users)).name} uses {node.name} of a layer that would be left out"
                raise ShardcError(what, where=str(node.meta.get("source", "")), fix="price the whole model")
            copy.erase_node(node)
    copy.lint()
    params = tuple(p for p in captured.params if p.name not in gone)
    return replace(
        captured, graph=copy, params=params, buffers=tuple(b for b in captured.buffers if b.name not in gone)
    )


def _at(node: fx.Node) -> tuple[str, str] | None:
    source: Source = node.meta.get("source", Source())
    return layer_of(source.module)


def _all_in(names: tuple[str, ...], dropped: set[tuple[str, str]]) -> bool:
    return all(layer_of(n) in dropped for n in names)


def _cut(graph: fx.Graph, name: str, numbers: list[str], count: int) -> None:
    """What uses the last layer's results gets those of the last one that stays."""
    of: dict[str, list[fx.Node]] = {n: [] for n in numbers}
    for node in graph.nodes:
        if node.op == "call_function" and (at := _at(node)) is not None and at[0] == name:
            of[at[1]].append(node)
    last, stays = of[numbers[-1]], of[numbers[count - 1]]
    for node, instead in zip(last, stays, strict=False):
        outside = [u for u in node.users if _at(u) is None or _at(u)[0] != name]  # type: ignore[index]
        if outside and (len(last) != len(stays) or node.target != instead.target):
            what = (
                f"layers {numbers[-1]} and {numbers[count - 1]} of {name} are not alike: {len(last)} and"
                f" {len(stays)} ops"
            )
            raise ShardcError(what, where=name, fix="price the whole model")
        for u in outside:
            u.replace_input_with(node, instead)


def of_layers(few: Cost, more: Cost, layers_few: int, layers_more: int, number: int) -> RankCost:
    """What a rank takes of a model of `number` layers, given what it takes of two models of fewer. Costs without a
    pipeline.

    Memory by kind is that at the peak; curves are the larger model's own.
    """
    share = (number - layers_few) / (layers_more - layers_few)

    def line(one: float, other: float) -> float:
        return one + (other - one) * share

    def lines(one: Mapping[Any, int], other: Mapping[Any, int]) -> dict[Any, int]:
        return {k: round(line(one.get(k, 0), other.get(k, 0))) for k in {**one, **other}}

    a, b = few.ranks[0], more.ranks[0]
    kinds = lines(a.memory.kinds, b.memory.kinds)
    resident, host = lines(a.memory.resident, b.memory.resident), round(line(a.memory.host, b.memory.host))
    memory = Memory(kinds, b.memory.part, b.memory.op, resident, b.memory.curve, host)
    return RankCost(
        b.at,
        b.rank,
        memory,
        round(line(a.flops, b.flops)),
        lines(a.comm, b.comm),
        line(a.seconds, b.seconds),
        line(a.waited, b.waited),
    )
