"""Define the products of an input and a weight, and which of their arguments is which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardc.optional import table

aten = torch.ops.aten

#: Products of an input and a weight: op -> the places of (input, weight, bias) among its arguments. The weight is
#: [out, in] for linear, [in, out] else. Optional features add theirs.
PRODUCTS: dict[Any, tuple[int, int, int]] = {
    aten.linear.default: (0, 1, 2),
    aten.addmm.default: (1, 2, 0),
    aten.mm.default: (0, 1, -1),
    aten.matmul.default: (0, 1, -1),
    **table("ops", "PRODUCTS"),
}


def factors(target: Any, args: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return (input, weight, bias or None) among a product's arguments."""
    x, weight, bias = PRODUCTS[target]
    return args[x], args[weight], args[bias] if 0 <= bias < len(args) else None


def multiplies(op: fx.Node, x: fx.Node) -> bool:
    """Return whether an op of a program is a product with x as its input."""
    return op.target in PRODUCTS and not op.kwargs and factors(op.target, op.args)[0] is x


def of_matrices(x: int, weight: int, bias: int | None) -> bool:
    """Return whether factors with these dims are rows and a matrix, with gradients that are such products."""
    return x >= 2 and weight == 2 and bias in (None, 1)
