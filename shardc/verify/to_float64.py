"""Convert a graph or a program to float64 and complex128, so that rounding hides no difference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.ir.fused_regions import without_fused_regions
from shardc.ir.graph import copy_graph, map_value
from shardc.ir.program import Program
from shardc.ir.stage import Joint
from shardc.ir.stored import Buffer


def _wide(x: Any) -> Any:
    if not isinstance(x, torch.dtype):
        return x
    return torch.float64 if x.is_floating_point else torch.complex128 if x.is_complex else x


def graph_to_float64(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph in float64 and complex128: casts, factories and the nodes' types."""
    new = copy_graph(graph)
    for node in new.nodes:
        node.args, node.kwargs = fx.node.map_aggregate(node.args, _wide), fx.node.map_aggregate(node.kwargs, _wide)
        if "value" in node.meta:
            node.meta["value"] = map_value(lambda v: replace(v, dtype=_wide(v.dtype)), node.meta["value"])
    return new


def to_float64(program: Program, *, compiled: bool = False) -> Program:
    """Return the program in float64 and complex128. compiled: keep its compiled regions."""

    def typed(x: Any) -> Any:
        return replace(x, dtype=_wide(x.dtype))

    def buffer(b: Buffer) -> Any:
        c = b.constant
        return replace(typed(b), constant=c.to(_wide(c.dtype)) if c is not None else c)

    first = program.prologue
    double = replace(
        program,
        graph=graph_to_float64(program.graph),
        stages=tuple(replace(s, graph=graph_to_float64(s.graph), joint=_joint(s.joint)) for s in program.stages),
        pairs=tuple(replace(p, graph=graph_to_float64(p.graph)) for p in program.pairs),
        prologue=first and replace(first, graph=graph_to_float64(first.graph)),
        params=tuple(map(typed, program.params)),
        buffers=tuple(map(buffer, program.buffers)),
        inputs=tuple(map(typed, program.inputs)),
        outputs=tuple(map(typed, program.outputs)),
        buckets=tuple(replace(typed(b), compute=None) for b in program.buckets),
    )
    return double if compiled else without_fused_regions(double)


def _joint(joint: Joint | None) -> Joint | None:
    return joint and Joint(*map(graph_to_float64, joint.graphs.values()))
