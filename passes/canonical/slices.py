"""Slices that take a product's result apart are one split, so that every part can be split over ranks.

    before   qkv = linear(x, w); q = slice(qkv, 2, 0, 64); k = slice(qkv, 2, 64, 96); v = slice(qkv, 2, 96, 128)
    after    parts = split_with_sizes(qkv, [64, 32, 32], 2); q, k, v = parts[0], parts[1], parts[2]

A slice alone does not say what the rest of the dim is for; the three together say that the weight is three fused ones.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from shardc.ir.program import Value
from shardc.rules import registry

aten = torch.ops.aten


def join_slices(graph: fx.Graph) -> None:
    """Rewrite, in place, every product's result whose slices along one dim are its parts, one after the other, without
    a rest.
    """
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
