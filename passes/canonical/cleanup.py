"""Finish the canonical graph: join slices, and write down the dtype of floats computed from integers.

    before   q = slice(qkv, 2, 0, 64); k = slice(qkv, 2, 64, 96); v = slice(qkv, 2, 96, 128)
    after    parts = split_with_sizes(qkv, [64, 32, 32], 2); q, k, v = parts[0], parts[1], parts[2]

A slice alone does not show what the rest of the dim is for; the three together show that the weight is three fused
ones.

    before   half = mul(positions, 0.5)                                   positions: i64[16]      half: f32[16]
    after    half = mul(_to_copy(positions, dtype=torch.float32), 0.5)

torch makes such floats in the default dtype of the process, which the program's ranks must not choose.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from shardc.ir import types as values
from shardc.ir.metadata import Value
from shardc.rules.core import registry
from shardc.torch_private import OpOverload

aten = torch.ops.aten
#: Choices between numbers: the condition stays as it is.
_CHOICES = {aten.where.ScalarSelf: (2,), aten.where.ScalarOther: (1,), aten.where.Scalar: ()}


def cast_integers(graph: fx.Graph) -> None:
    """Cast, in place, operands of elementwise ops that return floats and have no float operand."""
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        out = node.meta.get("value")
        if (
            not isinstance(node.target, OpOverload)
            or not isinstance(out, Value)
            or not values.continuous(out)
            or "dtype" in node.kwargs
        ):
            continue
        if torch.Tag.pointwise not in node.target.tags and node.target not in _CHOICES:
            continue
        if any(values.continuous(n.meta["value"]) for n in node.all_input_nodes):
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


def _put(graph: fx.Graph, node: fx.Node, op: OpOverload, args: tuple[object, ...], dtype: torch.dtype) -> fx.Node:
    new = graph.call_function(op, args, {"dtype": dtype})  # type: ignore[arg-type]
    new.meta = {"source": node.meta["source"], "value": values.infer(op, args, {"dtype": dtype})}
    return new


def join_slices(graph: fx.Graph) -> None:
    """Replace, in place, slices of a product that are all its parts along a dim, in order, by one split."""
    for node in list(graph.nodes):
        if node.op != "call_function" or (rule := registry.find(node.target)) is None or rule.flops is None:
            continue
        slices: dict[int, list[fx.Node]] = {}
        for user in node.users:
            if user.target is aten.slice.Tensor and len(user.args) == 4 and user.args[0] is node:
                slices.setdefault(int(user.args[1]), []).append(user)
        for d, cuts in slices.items():
            _join(graph, node, d, cuts)


def _join(graph: fx.Graph, node: fx.Node, d: int, cuts: list[fx.Node]) -> None:
    value: Value = node.meta["value"]
    spans = sorted({(int(c.args[2]), int(c.args[3])) for c in cuts})  # type: ignore[arg-type]
    edges = [0, *(stop for _, stop in spans)]
    if len(spans) < 2 or [start for start, _ in spans] != edges[:-1] or edges[-1] != value.shape[d]:
        return
    sizes = [stop - start for start, stop in spans]
    with graph.inserting_after(node):
        split = graph.call_function(aten.split_with_sizes.default, (node, sizes, d))
    by_span = {(int(c.args[2]), int(c.args[3])): c.meta["value"] for c in cuts}  # type: ignore[arg-type]
    split.meta = {"source": cuts[0].meta["source"], "value": tuple(by_span[s] for s in spans)}
    for cut in cuts:
        part = spans.index((int(cut.args[2]), int(cut.args[3])))  # type: ignore[arg-type]
        with graph.inserting_before(cut):
            item = graph.call_function(operator.getitem, (split, part))
        item.meta = dict(cut.meta)
        cut.replace_all_uses_with(item)
        graph.erase_node(cut)
