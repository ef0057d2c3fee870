"""The turns of a loop over experts: what was written to one tensor, rows chosen by a mask, one turn after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture.random_choices import run
from shardc.ir import types as values
from shardc.ir.metadata import Value
from shardc.torch_private import OpOverload

aten = torch.ops.aten


def shape_of(node: Any) -> tuple[int, ...]:
    value: Value = node.meta["value"]
    return value.shape


def numel_of(node: fx.Node) -> int:
    return torch.Size(shape_of(node)).numel()


#: Ops whose result has the elements of the operand in their order.
SAME_ELEMENTS = {"reshape", "view", "_unsafe_view", "flatten", "clone", "contiguous", "squeeze", "unsqueeze", "alias"}


def bare(node: Any, *, rows: bool = False) -> Any:
    """What a value is without ops that change nothing. rows: without ones that only change its shape either."""
    while isinstance(node, fx.Node) and isinstance(node.target, OpOverload):
        name, x = values.op_name(node.target), node.args[0] if node.args else None
        if not isinstance(x, fx.Node) or not isinstance(x.meta.get("value"), Value):
            break
        if not isinstance(node.meta["value"], Value):
            break
        same = x.meta["value"].dtype == node.meta["value"].dtype
        shape = shape_of(x) == shape_of(node)
        none = name == "dropout" and (node.args[1] == 0 or not node.args[2])
        if not same or not (
            none
            or ((shape or (rows and name in SAME_ELEMENTS)) and name in SAME_ELEMENTS | {"to", "_to_copy", "expand"})
        ):
            break
        node = x
    return node


def constant_of(node: Any) -> Tensor | None:
    """The value of a tensor that is made of nothing that is given."""
    if not isinstance(node, fx.Node) or any(n.op == "placeholder" for n in values.behind([node])):
        return None
    value: Tensor = run([node], {})[0]
    return value


@dataclass(frozen=True)
class Step:
    """`before` with rows written to it. adds: added; else put in the place of what was there. mask: bool [n], value: of
    these rows. to: to which row each goes, i64 [n]; None: each to its own."""

    node: fx.Node
    before: fx.Node | None
    adds: bool
    mask: fx.Node
    value: fx.Node
    to: Tensor | None


def _step(node: Any) -> Step | None:
    """The last thing that was written to a tensor, if it is rows chosen by a mask."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.index_add.default and node.args[1] == 0 and not node.kwargs:
        to = constant_of(node.args[2])
        masked = _masked(node.args[3])
        if to is not None and masked is not None:
            return Step(node, node.args[0], True, *masked, to)  # type: ignore[arg-type]
    elif node.target is aten.add.Tensor and not node.kwargs and isinstance(node.args[1], fx.Node):
        masked = _masked(node.args[1])
        if masked is not None and shape_of(node.args[1]) == shape_of(node):
            return Step(node, node.args[0], True, *masked, None)  # type: ignore[arg-type]
    elif (
        node.target is aten.where.self
        and isinstance(node.args[1], fx.Node)
        and shape_of(node.args[1]) == shape_of(node)
    ):
        mask = _mask(node.args[0], node)
        if mask is not None:
            return Step(node, node.args[2], False, mask, node.args[1], None)  # type: ignore[arg-type]
    elif (masked := _masked(node)) is not None:  # the first of several that are added up
        return Step(node, None, True, *masked, None)
    return None


def _masked(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """(mask, value) of `where(mask, value, 0)`."""
    node = bare(node, rows=True)
    if not isinstance(node, fx.Node) or node.target is not aten.where.ScalarOther or node.args[2] != 0:
        return None
    mask = _mask(node.args[0], node)
    return None if mask is None else (mask, node.args[1])  # type: ignore[return-value]


def _mask(mask: Any, of: fx.Node) -> fx.Node | None:
    """The mask of rows, bool of any shape, that a mask of [rows, 1] is."""
    shape, rest = shape_of(mask), shape_of(of)
    cut = len([n for n in shape if n != 1]) and max(d for d, n in enumerate(shape) if n != 1) + 1
    if len(shape) != len(rest) or cut == len(rest) or shape[:cut] != rest[:cut] or not cut:
        return None
    rows: fx.Node = bare(mask, rows=True)
    return rows


def chains(graph: fx.Graph) -> Iterator[tuple[list[Step], fx.Node | None]]:
    """Steps that write to one tensor, one after the other, and what was there before; in the order of the graph."""
    steps: dict[fx.Node, Step] = {n: s for n in graph.nodes if n.op == "call_function" and (s := _step(n)) is not None}
    follows: dict[fx.Node, fx.Node] = {}
    for n, s in steps.items():
        before = bare(s.before, rows=True)
        if before in steps and steps[before].adds == s.adds:
            follows[n] = before
    for n in steps:
        if n in follows.values():
            continue
        chain = [n]
        while chain[-1] in follows:
            chain.append(follows[chain[-1]])
        turns = [steps[m] for m in reversed(chain)]
        if len(turns) > 1:
            yield turns, turns[0].before
