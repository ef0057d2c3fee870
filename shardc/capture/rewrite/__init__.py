"""Rewrite the result of torch.export, and calls that it loses, as a graph can contain them.

autograd_function       custom autograd Functions keep their backward; inner_autograd: derivatives within forward
inline_regions          `with torch.no_grad()` in a graph, and the casts of autocast
inplace_ops             in-place ops become their functional_twins, also those that write through views
flex_attention          FlexAttention as ops
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx


def call_like(
    model: fx.Node, target: Any, *args: Any, val: Any = None, graph: fx.Graph | None = None, **kwargs: Any
) -> fx.Node:
    """Add a call at the insertion point of a graph (default: the model's), with the metadata of `model`.

    val: the result on fake tensors, if that is not the model's.
    """
    node = (graph or model.graph).call_function(target, args, kwargs)
    node.meta.update(model.meta)
    if val is not None:
        node.meta["val"] = val
    return node


def replace_results(call: fx.Node, results: Sequence[Any]) -> None:
    """Put other values in the place of a call's results, which `getitem`s pick; erase the call."""
    for user in list(call.users):
        assert user.target is operator.getitem, f"{user.format_node()} uses several results as a whole"
        user.replace_all_uses_with(results[int(user.args[1])])  # type: ignore[arg-type]
        user.graph.erase_node(user)
    call.graph.erase_node(call)
