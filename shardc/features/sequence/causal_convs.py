"""Write convolutions that keep the number of tokens as one op, so that a sequence can stay split.

    before   conv1d(x, w, b, [1], [3], [1], 64)[..., :16]      f32[8, 64, 19], then f32[8, 64, 16]
    after    ops.conv1d(x, w, b, 3, 1, 64)                     f32[8, 64, 16]: three places before each token are read

Models write a causal convolution with zeros on both ends, and cut off the results beyond the end, or they add zeros in
front. The sizes in between do not divide like the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.ir.graph import value_of
from shardc.rules.core.op_call import call_of
from shardc.runtime import ops

aten = torch.ops.aten


def use_conv1d(graph: fx.Graph) -> None:
    """Replace convolutions that keep the number of tokens by `ops.conv1d`."""
    for node in graph.find_nodes(op="call_function", target=aten.conv1d.default):
        _replace(graph, node)


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    """Replace one convolution, with the padding before it and the slice after it, if they keep the number of tokens."""
    call, x = call_of(node), node.args[0]
    stride, padding, dilation = (_one_number(call.arg(name)) for name in ("stride", "padding", "dilation"))
    if not isinstance(x, fx.Node) or node.kwargs or len(value_of(x).shape) != 3:
        return
    if stride != 1 or padding is None or dilation is None:
        return
    unpadded, front, behind = x, padding, padding  # zeros in front of the sequence, and behind it
    if x.target is aten.constant_pad_nd.default and padding == 0 and len(x.all_input_nodes) == 1:
        front, behind, *others = _pads(x)
        unpadded = x.all_input_nodes[0]
        if others or x.args[2:3] not in ((), (0,), (0.0,)) or min(front, behind) < 0:
            return
    n, results = value_of(unpadded).shape[2], value_of(node).shape[2]
    if results < n:
        return
    result = node
    if results != n:  # those beyond the end of the sequence are cut off
        (user, *more) = node.users
        if more or user.target is not aten.slice.Tensor or not _is_first(user, n):
            return
        result = user
        behind -= results - n
    if behind < 0 or result.meta.get("pin") is not None:
        return
    args: tuple[Any, ...] = (unpadded, node.args[1], node.args[2] if len(node.args) > 2 else None)
    args = (*args, front, dilation, call.arg("groups"))
    with graph.inserting_before(result):
        new = graph.call_function(ops.conv1d, args)
    new.meta = {**result.meta, "source": node.meta["source"]}
    result.replace_all_uses_with(new)
    for old in dict.fromkeys((result, node, x)):
        if not old.users and old.op == "call_function":
            graph.erase_node(old)


def _one_number(x: Any) -> int | None:
    """Return a number, also from a list of one number; else None."""
    x = x[0] if isinstance(x, (list, tuple)) and len(x) == 1 else x
    return x if isinstance(x, int) else None


def _pads(node: fx.Node) -> list[int]:
    """Return the padding of `constant_pad_nd` without zeros for outer dims: [front, behind] for the last dim alone."""
    pads: Any = node.args[1]
    while len(pads) > 2 and list(pads[-2:]) == [0, 0]:
        pads = pads[:-2]
    return list(pads)


def _is_first(node: fx.Node, n: int) -> bool:
    """Return whether a slice is the first n entries of dim 2."""
    rest: list[Any] = [*node.args[1:], *[None] * (4 - len(node.args))]
    dim, start, end, *step = rest
    return bool(dim in (2, -1) and start in (None, 0) and end == n and step in ([], [1], [None]) and not node.kwargs)
