"""What a rule gets to see of a node: the op, the types of its operands and results, its arguments; not the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import operands_of, values_of
from shardc.ir.metadata import Value


@dataclass(frozen=True)
class Call:
    """One call of an op, without the graph: the types of its tensor operands and results, and its arguments.

    args, kwargs: the arguments, with `Operand(i)` in the place of the i-th tensor operand.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[Value, ...]
    results: tuple[Value, ...]

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default)

    def dim(self, d: int, operand: int = 0) -> int:
        """A dim >= 0 of an operand from one that may be negative."""
        return d % max(len(self.operands[operand].shape), 1)


@dataclass(frozen=True)
class Operand:
    """Stands for the i-th tensor operand in `Call.args`."""

    index: int


def rounds(node: fx.Node) -> bool:
    """Does a call of the model's cut off digits, as `.half()` does? On one device it rounds a sum, so it may not act on
    the summands. Casts of mixed precision may: what they cut off is not the model's.
    """
    if "mixed" in node.meta:
        return False
    operands, results = (
        [torch.finfo(v.dtype) for v in values if v.dtype.is_floating_point or v.dtype.is_complex]
        for values in ([v for n in operands_of(node) for v in values_of(n)], values_of(node))
    )
    return any(y.eps > x.eps or y.max < x.max for x in operands for y in results)


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
