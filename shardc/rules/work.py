"""Seconds of a call on the machine that passes assume (shardc.machine.assumed), from its rule and its types alone."""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Value
from shardc.machine.assumed import work_seconds
from shardc.rules import registry
from shardc.rules.op_call import Call, call_of


def flops(call: Call) -> int:
    """Count what its rule counts; 0 of an op without products."""
    rule = registry.find(call.target)
    return rule.flops(call) if rule is not None and rule.flops is not None else 0


def seconds(call: Call) -> float:
    """Of an op that is large: of its products, or of what it reads and writes."""
    return work_seconds(flops(call), sum(v.nbytes() for v in (*call.operands, *call.results)))


def rank_seconds(node: fx.Node, mesh: Mesh) -> float:
    """Of a node, on one rank of a mesh. To pick one of several results takes nothing."""
    if node.target is operator.getitem:
        return 0.0
    call = call_of(node)

    def local(v: Value) -> Value:
        return Value(v.local_shape(mesh), v.dtype, v.requires_grad)

    return seconds(replace(call, operands=tuple(map(local, call.operands)), results=tuple(map(local, call.results))))
