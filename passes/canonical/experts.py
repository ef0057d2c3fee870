"""Rewrite the experts op of a captured graph as the op that programs call."""

from __future__ import annotations

from shardc.ir.metadata import Value
from shardc.passes.canonical.rewrite import Args, Emit, Result, rewrite
from shardc.runtime import ops


@rewrite("experts")
def experts(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite `torch.ops.shardc.experts` of a captured graph."""
    args = (a.x, a.index, a.weights, a.up, a.down, a.up_bias, a.down_bias, a.activation, a.transposed)
    return emit.typed(out, ops.experts, *args)
