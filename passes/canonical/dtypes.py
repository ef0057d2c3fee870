"""Floats made of integers: their dtype is written down.

    before   half = mul(positions, 0.5)                                   positions: i64[16]      half: f32[16]
    after    half = mul(_to_copy(positions, dtype=torch.float32), 0.5)

torch makes such floats in the default dtype of the process, which is not for the program's ranks to choose.
"""

from __future__ import annotations

import torch
from torch import fx

from shardc.ir import types as values
from shardc.ir.program import Value
from shardc.torch_private import OpOverload

aten = torch.ops.aten
#: Choices between numbers: the condition stays as it is.
_CHOICES = {aten.where.ScalarSelf: (2,), aten.where.ScalarOther: (1,), aten.where.Scalar: ()}


def cast_integers(graph: fx.Graph) -> None:
    """Cast, in place, the operands of every elementwise op that makes floats and has none among its operands."""
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        out = node.meta.get("value")
        if (
            not isinstance(node.target, OpOverload)
            or not isinstance(out, Value)
            or not _real(out)
            or "dtype" in node.kwargs
        ):
            continue
        if torch.Tag.pointwise not in node.target.tags and node.target not in _CHOICES:
            continue
        if any(_real(n.meta["value"]) for n in node.all_input_nodes):
            continue
        with graph.inserting_before(node):
            if node.target is aten.where.Scalar:
                numbers = [_put(graph, node, aten.full.default, ([], x), out.dtype) for x in node.args[1:]]
                node.target, node.args = aten.where.self, (node.args[0], *numbers)
                continue
            for x in [node.args[i] for i in _CHOICES[node.target]] if node.target in _CHOICES else node.all_input_nodes:
                if (x, out.dtype) not in casts:
                    casts[x, out.dtype] = _put(graph, node, aten._to_copy.default, (x,), out.dtype)
                node.replace_input_with(x, casts[x, out.dtype])


def _real(v: Value) -> bool:
    return v.dtype.is_floating_point or v.dtype.is_complex


def _put(graph: fx.Graph, node: fx.Node, op: OpOverload, args: tuple[object, ...], dtype: torch.dtype) -> fx.Node:
    new = graph.call_function(op, args, {"dtype": dtype})  # type: ignore[arg-type]
    new.meta = {"source": node.meta["source"], "value": values.infer(op, args, {"dtype": dtype})}
    return new
