"""What the graph in the making says of a tensor: its node, whether two tensors are computed alike, and whether a value
is made of whole numbers and masks only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture.masked_rows.unfit import Unfit
from shardc.ir import types as values
from shardc.torch_private import OpOverload, traced_node


def node_of(x: Tensor) -> fx.Node:
    node = traced_node(x)
    if node is None:
        raise Unfit("a tensor among them is not traced")
    return node


#: Ops that leave a mask what it is, row by row.
_SAME = {"reshape", "view", "_unsafe_view", "flatten", "clone", "contiguous", "to", "_to_copy", "squeeze", "unsqueeze"}


def key_of(x: Tensor) -> Any:
    """Equal for tensors that are computed in the same way, other views of the same rows included."""
    node = traced_node(x)
    return _structure(node) if node is not None else id(x)


def _structure(node: fx.Node) -> Any:
    while isinstance(node.target, OpOverload) and values.op_name(node.target) in _SAME:
        before = node.args[0]
        assert isinstance(before, fx.Node)
        if _bool(before) != _bool(node):
            break
        node = before
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return node
    if values.op_name(node.target) not in ("select", "slice", "eq", "ne", "gt", "any", "index", "bool", "to"):
        return node
    return (node.target, *map(_frozen, node.args), *((k, _frozen(v)) for k, v in node.kwargs.items()))


def counts(x: Any, mask: Tensor) -> bool:
    """Is it the number of true values in each row of a mask?"""
    node = traced_node(x) if isinstance(x, Tensor) else None
    if (
        node is None
        or node.target is not torch.ops.aten.sum.dim_IntList
        or node.args[1] not in ([-1], [mask.dim() - 1])
    ):
        return False
    summed = node.args[0]
    return isinstance(summed, fx.Node) and _structure(summed) == key_of(mask)


def _bool(node: fx.Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) == torch.bool


def _frozen(x: Any) -> Any:
    if isinstance(x, fx.Node):
        return _structure(x)
    return tuple(map(_frozen, x)) if isinstance(x, (tuple, list)) else (type(x), x)


def of_numbers(x: Tensor) -> bool:
    """Is a value a comparison, count or combination of whole numbers and masks?"""
    node = traced_node(x)
    if node is None:
        return False
    val = node.meta.get("val")
    whole = isinstance(val, Tensor) and not val.is_floating_point() and not val.is_complex()
    before = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    return whole and all(not n.meta["val"].is_floating_point() for n in before)
