"""WeightCasts: microbatches in flight share one copy of each weight in the dtype of products.

    before   w_bf16 = _to_copy(w, dtype=bfloat16)                       a copy for each microbatch, until its backward
    after    w_bf16 = cast_once(w, mesh, bfloat16, tag='w_bf16')        one copy, made once a step

Casts in a recomputed region stay: backward computes them again, and no microbatch keeps them. A sharded bucket whose
ops all read one other dtype has no casts: its flat buffer has that dtype (shardc.passes.gradient_buckets).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch import fx

from shardc.ir.graph import calls, copy_graph
from shardc.ir.program import Program
from shardc.passes.base import Pass
from shardc.runtime import ops

_CAST = torch.ops.aten._to_copy.default
#: Ops that return the parameters of a sharded bucket.
_WHOLE = {ops.updated, ops.gather_wait}


@dataclass(frozen=True)
class WeightCasts(Pass):
    """Writes casts of parameters as `ops.cast_once`, in programs of several microbatches."""

    def applies(self, program: Program) -> bool:
        return program.microbatches > 1 and any(_casts(s.graph, program) for s in program.stages)

    def run(self, program: Program) -> Program:
        stages = []
        for stage in program.stages:
            graph = copy_graph(stage.graph)
            mesh = next(n for n in graph.nodes if n.name == "mesh")
            for n in _casts(graph, program):
                n.args, n.kwargs = (n.args[0], mesh, n.kwargs["dtype"]), {"tag": n.name}
                n.target = ops.cast_once
            stages.append(replace(stage, graph=graph))
        return replace(program, stages=tuple(stages))


def _casts(graph: fx.Graph, program: Program) -> list[fx.Node]:
    """Return the casts of parameters whose results are kept for backward."""
    params = {p.name for p in program.params}
    parents = {r.name: r.parent for r in program.regions}
    return [
        n
        for n in calls(graph)
        if n.target is _CAST and set(n.kwargs) == {"dtype"} and _is_weight(n.args[0], params) and _kept(n, parents)
    ]


def _is_weight(x: object, params: set[str]) -> bool:
    """Return whether a node is a parameter, or a whole parameter that comes from a sharded bucket."""
    assert isinstance(x, fx.Node)
    if x.op == "placeholder":
        return x.name in params
    return x.target is operator.getitem and isinstance(x.args[0], fx.Node) and x.args[0].target in _WHOLE


def _kept(n: fx.Node, parents: dict[str, str]) -> bool:
    """Return whether no region around a node recomputes it. parents: each region's outer region."""
    region = n.meta.get("region", "")
    while region and region in n.meta.get("kept", ()):
        region = parents[region]
    return not region
