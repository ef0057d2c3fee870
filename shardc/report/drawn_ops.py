"""Which ops of a graph are drawn, and what their lines come from: through views, and through gathers of parameters."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from shardc.runtime import ops

#: Ops that compute nothing: their operand's users are drawn as users of what it was made from.
_VIEWS = {
    "alias", "clone", "contiguous", "detach", "expand", "flatten", "getitem", "narrow", "permute", "reshape", "select",
    "slice", "split", "split_with_sizes", "squeeze", "swapaxes", "t", "to_partial", "transpose", "unflatten",
    "unsqueeze", "view", "chunk", "unbind",
}  # fmt: skip


def op_name(n: fx.Node) -> str:
    """`linear` of `aten.linear.default`."""
    name = getattr(n.target, "__name__", str(n.target))
    return name.split(".")[0].lstrip("_")


def is_view(n: fx.Node) -> bool:
    return op_name(n) in _VIEWS


def traced(n: fx.Node) -> fx.Node:
    """What a value was made from, through views, waiting, and the gather of a parameter of a split bucket."""
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
    """The op that takes a bucket's parameters, of the one that gives them whole; None for any other op."""
    if not isinstance(n, fx.Node) or n.target not in (ops.gather_wait, ops.updated):
        return None
    started: Any = n.args[0] if n.target is ops.gather_wait else n
    return started if isinstance(started, fx.Node) else None


def of_parameter(n: fx.Node) -> bool:
    """Whether a collective is on a parameter, by the parameter's own type."""
    source = n.all_input_nodes[0]
    value = source.meta.get("value")
    return source.op == "placeholder" and "collective" not in source.meta and bool(value and value.requires_grad)
