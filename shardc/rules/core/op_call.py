"""Define the view of a node that a rule gets: op, types of operands and results, arguments; no graph."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import operands_of, values_of
from shardc.ir.metadata import Value
from shardc.rules.core.notation import Notation, Signature, parse
from shardc.torch_private import OpOverload


@lru_cache(maxsize=4096)
def arguments_of(op: Any) -> dict[str, tuple[int, Any]]:
    """Return the position and the default (None if there is none) of each argument of an op, by name."""
    if isinstance(op, OpOverload):
        return {a.name: (i, a.default_value) for i, a in enumerate(op._schema.arguments)}
    parameters = inspect.signature(op).parameters.values()
    return {p.name: (i, None if p.default is p.empty else p.default) for i, p in enumerate(parameters)}


@dataclass(frozen=True)
class Call:
    """One call of an op, without the graph: types of its tensor operands and results, and arguments.

    args, kwargs: the arguments, with `Operand(i)` in the place of the i-th tensor operand.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[Value, ...]
    results: tuple[Value, ...]

    def arg(self, name: str, otherwise: Any = None) -> Any:
        """Return an argument by the op's name for it, or its default; `otherwise` if the op has none of this name."""
        position, default = arguments_of(self.target).get(name, (len(self.args), otherwise))
        return self.args[position] if position < len(self.args) else dict(self.kwargs).get(name, default)

    def dim(self, d: int | str) -> int:
        """Return a dim of the first operand as a number >= 0. d: the dim, or the argument that names it."""
        d = self.arg(d) if isinstance(d, str) else d
        return d % max(len(self.operands[0].shape), 1)

    def dims(self) -> set[int]:
        """Return the dims of the first operand that `dim` or `dims` names: one, some, or all (None, [])."""
        named = self.arg("dim", self.arg("dims"))
        return set(map(self.dim, [named] if isinstance(named, int) else named or range(len(self.operands[0].shape))))

    def fit(
        self, notation: str | Sequence[Sequence[str]], outputs: Sequence[Sequence[str]] = (), **sizes: int
    ) -> Signature:
        """Bind a rule's notation to the call: a text, or dims of operands and of results, as in `Notation.of`.

        sizes: of factors, where shapes do not say them. Raises ValueError if they do not fit.
        """
        read = parse(notation) if isinstance(notation, str) else Notation.of(notation, outputs)
        return read.bind([v.shape for v in self.operands], [v.shape for v in self.results], sizes)


@dataclass(frozen=True)
class Operand:
    """Represents the i-th tensor operand in `Call.args`."""

    index: int


def rounds(node: fx.Node) -> bool:
    """Return whether the model's own call cuts off digits, as `.half()` does.

    On one device it rounds a sum, so it may not run on the summands. Casts of mixed precision may.
    """
    if "mixed" in node.meta:
        return False
    operands, results = (
        [torch.finfo(v.dtype) for v in values if v.dtype.is_floating_point or v.dtype.is_complex]
        for values in ([v for n in operands_of(node) for v in values_of(n)], values_of(node))
    )
    return any(y.eps > x.eps or y.max < x.max for x in operands for y in results)


def call_of(node: fx.Node) -> Call:
    """Return the call of a node, without the graph."""
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
