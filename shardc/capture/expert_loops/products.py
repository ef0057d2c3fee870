"""What one expert computes, read off the template of all: products with its parameters, and weights of its choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.capture.expert_loops.steps import SAME_ELEMENTS, numel_of, shape_of
from shardc.capture.expert_loops.unify import Each, Op, Same, Stack
from shardc.ir import types as values

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """`x @ weight.T + bias`; transposed: `x @ weight + bias`."""

    x: Any
    weight: Stack
    bias: Stack | None
    transposed: bool


def product_of(t: Any) -> Product | None:
    if not isinstance(t, Op):
        return None
    bias: Any = None
    if t.target is aten.linear.default:
        x, weight, *rest = t.args
        bias, transposed = (rest or [None])[0], False
    elif t.target in (aten.matmul.default, aten.mm.default):
        (x, weight), transposed = t.args, True
    elif t.target is aten.addmm.default and not t.kwargs:
        (bias, x, weight), transposed = t.args, True
    else:
        return None
    while isinstance(weight, Op) and weight.target in (aten.t.default, aten.transpose.int, aten.numpy_T.default):
        weight, transposed = weight.args[0], not transposed
    if not isinstance(weight, Stack) or len(weight.shape) != 2 or not (bias is None or isinstance(bias, Stack)):
        return None
    return Product(x, weight, bias, transposed)


def _cast(t: Any) -> Any:
    """A value before a change between floating-point types: an op on rows and weights does that by itself."""
    while isinstance(t, Op) and values.op_name(t.target) in ("to", "_to_copy"):
        t = t.args[0]
    return t


def weighted(t: Any, width: int) -> tuple[list[Any], Any]:
    """(weights [n, 1] or numbers, the rest) of a product of both."""
    factors: list[Any] = []
    while isinstance(t := _cast(t), Op):
        if values.op_name(t.target) in SAME_ELEMENTS and rows_of(t.nodes[0]) == rows_of(t.args[0]):
            t = t.args[0]
            continue
        if t.target not in (aten.mul.Tensor, aten.mul.Scalar):
            break
        sides = t.args
        columns = [i for i, s in enumerate(sides) if _column(s, t.nodes[0])]
        if len(columns) != 1:
            break
        factors.append(sides[columns[0]])
        t = sides[1 - columns[0]]
    return factors, t


def rows_of(x: Any) -> tuple[int, int] | None:
    node = x.nodes[0] if isinstance(x, (Op, Each)) else x.node if isinstance(x, Same) else x
    if not isinstance(node, fx.Node) or not shape_of(node):
        return None
    return numel_of(node) // max(shape_of(node)[-1], 1), shape_of(node)[-1]


def _column(side: Any, out: fx.Node) -> bool:
    """Is it a number for each row of `out`, or for all?"""
    if isinstance(side, (int, float)):
        return True
    rows = rows_of(side)
    return rows is not None and rows[1] == 1 and rows[0] in (1, numel_of(out) // shape_of(out)[-1])
