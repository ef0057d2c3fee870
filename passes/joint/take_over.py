"""Let a gradient reuse its input's buffer when nobody else reads it, as autograd does."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardc.ir.metadata import Value
from shardc.passes.joint.derivatives.record import is_view
from shardc.runtime import ops
from shardc.torch_private import OpOverload

aten = torch.ops.aten

#: Ops that return the same numbers in another order, perhaps in the same memory.
_REARRANGES = {
    *(aten.reshape.default, aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default),
    *(aten.unsqueeze.default, aten.squeeze.dim),
}


def take_over_memory(graph: fx.Graph) -> None:
    """Let sums reuse an operand's memory, and `.grad` be the gradient itself, when nobody else reads it."""
    for n in graph.nodes:
        if n.target is ops.accumulate and _is_unshared(n.args[1]):
            n.kwargs = {"own": True}
        if n.target is not aten.add.Tensor or len(n.args) != 2 or n.kwargs:
            continue
        x, y = n.args
        both = isinstance(x, fx.Node) and isinstance(y, fx.Node)
        if both and x.meta["value"] == y.meta["value"] == n.meta["value"] and _is_unshared(x):
            n.target = ops.add_into


def _is_unshared(x: fx.Node | None) -> bool:
    """Return whether x is new memory made in backward that only its user reads.

    A call of forward that runs again does not count, because it may return its operand.
    """
    while isinstance(x, fx.Node) and x.op == "call_function" and len(x.users) == 1:
        if x.target is ops.add_into or _fresh(x):
            return True
        x = x.args[0] if x.target in _REARRANGES and not x.meta.get("repeats") else None  # type: ignore[assignment]
    return False


def _fresh(n: fx.Node) -> bool:
    """Return whether an op makes new memory that nothing else has. Each of several results has its own."""
    maker: Any = n.args[0] if n.target is operator.getitem else n
    makes = isinstance(maker.target, OpOverload) and not is_view(maker.target)
    makes = makes or (maker.target is ops.opaque_backward and n.meta["like"].fresh)
    return makes and not maker.meta.get("repeats") and isinstance(n.meta["value"], Value)
