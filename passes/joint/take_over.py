"""Whose memory a gradient takes, where nothing else looks at it: as with autograd."""

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

#: What gives the same numbers in another order, perhaps in the same memory.
_REARRANGES = {
    *(aten.reshape.default, aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default),
    *(aten.unsqueeze.default, aten.squeeze.dim),
}


def take_over_memory(graph: fx.Graph) -> None:
    """As with autograd, where nothing else looks at a gradient's memory: a sum takes that of what it is added to, and a
    parameter's `.grad` is the gradient itself.
    """
    for n in graph.nodes:
        if n.target is ops.accumulate and _nobody_elses(n.args[1]):
            n.kwargs = {"own": True}
        if n.target is not aten.add.Tensor or len(n.args) != 2 or n.kwargs:
            continue
        x, y = n.args
        alike = isinstance(x, fx.Node) and isinstance(y, fx.Node)
        if alike and x.meta["value"] == y.meta["value"] == n.meta["value"] and _nobody_elses(x):
            n.target = ops.add_into


def _nobody_elses(x: fx.Node | None) -> bool:
    """Does the only user of x alone look at its memory? So it is where a line of backward made it, and each value on
    the way from there has one user. (A call of forward that runs again may give back what it was given.)
    """
    while isinstance(x, fx.Node) and x.op == "call_function" and len(x.users) == 1:
        if x.target is ops.add_into or (_fresh(x) and not x.meta.get("repeats")):
            return True
        x = x.args[0] if x.target in _REARRANGES and not x.meta.get("repeats") else None  # type: ignore[assignment]
    return False


def _fresh(n: fx.Node) -> bool:
    """Does the op make new memory, that nothing else has? Of several results, each has its own."""
    of: Any = n.args[0] if n.target is operator.getitem else n
    makes = isinstance(of.target, OpOverload) and not is_view(of.target)
    return makes and not of.meta.get("repeats") and isinstance(n.meta["value"], Value)
