"""Parse and run an expert's activation, a text of elementwise ops on the first product's result.

    "a, b = halves(x); c = silu(a); mul(c, b)"                 a gated layer: columns [gate | up]
    "a, b = stripes(x); c = clamp(a, None, 7.0); ..."          columns gate0, up0, gate1, up1, ...
    "relu(x)"                                                  not gated

The first statement may take the columns of x apart. Every other one calls an elementwise op of torch by its name in
`torch.ops.aten`. The last one is the result. So a program that holds the text can be split along the columns.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

#: How columns are taken apart: {word: function to the parts}.
PARTS: dict[str, Callable[[Tensor, int], tuple[Tensor, ...]]] = {
    "halves": lambda x, n: x.chunk(n, -1),
    "stripes": lambda x, n: tuple(x[..., p::n] for p in range(n)),
}


@dataclass(frozen=True)
class Activation:
    """A parsed text. parts: number of parts of the columns; word: "halves", "stripes", or "" for one part."""

    parts: int
    word: str
    names: tuple[str, ...]
    steps: tuple[tuple[str, Any, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the activation: [n, parts * i] -> [n, i]."""
        known = dict(zip(self.names, PARTS[self.word](x, self.parts) if self.word else (x,), strict=True))
        for name, op, args, kwargs in self.steps:
            known[name] = op(*(_value(a, known) for a in args), **{k: _value(a, known) for k, a in kwargs})
        return known[""]


@dataclass(frozen=True)
class _Name:
    name: str


def _value(a: Any, known: dict[str, Tensor]) -> Any:
    return known[a.name] if isinstance(a, _Name) else a


@lru_cache(maxsize=64)
def read(text: str) -> Activation:
    """Parse an activation. Raises ValueError for anything but statements of elementwise ops."""
    try:
        statements = ast.parse(text).body
    except SyntaxError as e:
        raise ValueError(f"{text!r} is not Python statements: {e.msg}") from None
    names: tuple[str, ...] = ("x",)
    word, steps = "", []
    for i, s in enumerate(statements):
        last = i == len(statements) - 1
        match s:
            case ast.Assign(
                targets=[ast.Tuple(elts=elts)], value=ast.Call(func=ast.Name(id=how), args=[ast.Name(id="x")])
            ) if not i and how in PARTS:
                names, word = tuple(ast.unparse(e) for e in elts), how
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if not last:
                steps.append((name, *_call(call)))
            case ast.Expr(value=ast.Call() as call) if last:
                steps.append(("", *_call(call)))
            case _:
                raise ValueError(f"{ast.unparse(s)!r} is not a statement of an activation")
    if not steps:
        raise ValueError(f"{text!r} computes nothing")
    return Activation(len(names), word, names, tuple(steps))


def _call(call: ast.Call) -> tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    op = getattr(torch.ops.aten, call.func.id, None) if isinstance(call.func, ast.Name) else None
    if op is None or not elementwise(op):
        raise ValueError(f"{ast.unparse(call.func)} is not an elementwise op of torch")
    return op, tuple(map(_arg, call.args)), tuple((str(k.arg), _arg(k.value)) for k in call.keywords)


def elementwise(op: Any) -> bool:
    """Return whether an op of torch.ops.aten treats every element separately."""
    return any(torch.Tag.pointwise in getattr(op, name).tags for name in op.overloads())


def _arg(a: ast.expr) -> Any:
    if isinstance(a, ast.Name):
        return _Name(a.id)
    return ast.literal_eval(a)
