"""Find which ops of a graph are drawn, and the source of each value through views and gathers."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from shardc.runtime import ops

#: Ops that compute nothing: their users are drawn as users of their operand.
_VIEWS = {
    "alias", "clone", "contiguous", "detach", "expand", "flatten", "getitem", "narrow", "permute", "reshape", "select",
    "slice", "split", "split_with_sizes", "squeeze", "swapaxes", "t", "to_partial", "transpose", "unflatten",
    "unsqueeze", "view", "chunk", "unbind",
}  # fmt: skip


def op_name(n: fx.Node) -> str:
    """Return the short name of an op: `linear` for `aten.linear.default`."""
    name = getattr(n.target, "__name__", str(n.target))
    return name.split(".")[0].lstrip("_")


def is_view(n: fx.Node) -> bool:
    return op_name(n) in _VIEWS


def traced(n: fx.Node) -> fx.Node:
    """Return the node that a value comes from, through views, waits, and gathers of a split parameter."""
    while n.op == "call_function":
        gathered = n.args[0] if n.target is operator.getitem else None
        of_bucket: Any = bucket_of(gathered)
        if of_bucket is not None:
            n = of_bucket.args[0][n.args[1]]
        elif is_view(n) or n.target is ops.wait or ("collective" in n.meta and of_parameter(n)):
            n = n.all_input_nodes[0]
        else:
            break
    return n


def bucket_of(n: object) -> fx.Node | None:
    """Return the op that starts on a bucket's parameters, for the op that returns them whole; else None."""
    if not isinstance(n, fx.Node) or n.target not in (ops.gather_wait, ops.updated):
        return None
    started: Any = n.args[0] if n.target is ops.gather_wait else n
    return started if isinstance(started, fx.Node) else None


def of_parameter(n: fx.Node) -> bool:
    """Return whether a collective is on a parameter, by the parameter's type."""
    source = n.all_input_nodes[0]
    value = source.meta.get("value")
    return source.op == "placeholder" and "collective" not in source.meta and bool(value and value.requires_grad)
