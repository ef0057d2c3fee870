"""Compile for another batch with the parameter layouts and buckets of an existing program.

Part of shardc.recompile. With few rows, every rank may repeat a cheap op. Then a weight's gradient is whole where it
is a partial sum in the other program:

    before   linear = aten.linear(x, w)              # w: f32[8, 8]         its gradient is whole on every rank
    after    w_once = ops.first_grad(w, mesh, 'dp')  # w: f32[8, 8] ~dp     the first rank's counts, the others' is zero
             linear = aten.linear(x, w_once)

So both programs run on the same parameters, buckets and optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from shardc.errors import Errors
from shardc.ir.graph import copy_graph
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Collective, Value
from shardc.ir.placement import PARTIAL_GRAD, Layout, PartialGrad
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.ir.stored import Buffer, Param
from shardc.passes.base import Pass
from shardc.runtime import ops


@dataclass(frozen=True)
class MatchRecompiled(Pass):
    """Takes parameters and buckets from `options.compatible_with`. Raises ShardcError if splits differ."""

    def applies(self, program: Program) -> bool:
        return self.options.compatible_with is not None

    def run(self, program: Program) -> Program:
        other, mesh = self.options.compatible_with, program.mesh
        assert other is not None
        program = replace(program, stages=tuple(replace(s, graph=copy_graph(s.graph)) for s in program.stages))
        errors = Errors()
        # in this program's digits: a batch of more rows has other ranks for rows and for tokens
        others = {n: replace(x, layout=Layout.of(dict(x.layout.items), mesh)) for n, x in _named(other).items()}
        for name, x in _named(program).items():
            # it may use a parameter on fewer stages, or on none; of a table that no step changes each stage has a copy
            if self.options.forward or (isinstance(x, Buffer) and not x.updated):
                used = tuple(i for i, stage in enumerate(program.stages) if x.name in stage.takes)
                x = replace(x, stages=others[name].stages) if set(used) <= set(others[name].stages) else x
            if not _fits(x, others[name]):
                errors.add(
                    f"for a batch of these sizes {name} would be {_shown(x)}, but in the running program it is"
                    f" {_shown(others[name])}",
                    where="engine.step",
                    fix=f"name {name} in the spec's `shard`, and the modules that begin a stage in `pipeline.cut`",
                )
        errors.raise_any()
        for stage in program.stages:
            nodes = {n.name: n for n in stage.graph.find_nodes(op="placeholder")}
            for p in program.params:
                if p.name in nodes and p.requires_grad:
                    _bring(stage.graph, nodes[p.name], nodes["mesh"], p, others[p.fqn].layout, mesh)
            stage.graph.lint()
        return replace(program, params=other.params, buckets=other.buckets)


def _named(program: Program) -> dict[str, Param | Buffer]:
    """Return the model's parameters and buffers by name, without graph constants and caches."""
    return {x.fqn: x for x in program.params_and_buffers if x.fqn and not (isinstance(x, Buffer) and x.cache)}


def _fits(one: Param | Buffer, other: Param | Buffer) -> bool:
    return (one.name, one.shape, one.dtype, one.stages, one.layout.shards()) == (
        other.name,
        other.shape,
        other.dtype,
        other.stages,
        other.layout.shards(),
    )


def _shown(x: Param | Buffer) -> str:
    return f"{x.value}{' on stages ' + ', '.join(map(str, x.stages)) if x.stages else ''}"


def _partial_grad_axes(layout: Layout) -> set[str]:
    return {a for a, placement in layout.items if isinstance(placement, PartialGrad)}


def _bring(graph: fx.Graph, node: fx.Node, mesh_node: fx.Node, p: Param, layout: Layout, mesh: Mesh) -> None:
    """Convert a parameter, or its cast, from the other program's layout to the one that this graph takes."""
    value = p.value
    node.meta["value"] = replace(value, layout=layout)
    missing = [a for a in mesh.names if a in _partial_grad_axes(layout) - _partial_grad_axes(p.layout)]
    extra = tuple(a for a in mesh.names if a in _partial_grad_axes(p.layout) - _partial_grad_axes(layout))
    if not (missing or extra):
        return
    casts = [u for u in node.users if u.target is torch.ops.aten._to_copy.default and len(u.kwargs) == 1]
    for x, users in [(node, [u for u in node.users if u not in casts]), *((c, list(c.users)) for c in casts)]:
        if not users:
            continue
        first = next(n for n in graph.nodes if n in users)
        typed = replace(value, dtype=x.meta["value"].dtype)
        if x is not node:
            x.meta["value"] = replace(typed, layout=layout)
        with graph.inserting_before(first):
            new, now = x, layout
            for axis in missing:
                now = Layout(tuple((a, q) for a, q in now.items if a != axis))
                new = _node(graph, ops.first_grad, (new, mesh_node, axis), f"{x.name}_once", replace(typed, layout=now))
            if extra:
                now = Layout.of({**dict(now.items), **dict.fromkeys(extra, PARTIAL_GRAD)}, mesh)
                new = _node(graph, ops.sum_grad, (new, mesh_node, extra), f"{x.name}_each", replace(typed, layout=now))
                new.meta["collective"] = Collective(
                    "none", "all_reduce", extra, typed.nbytes(mesh), "gradients, as of the compiled batch"
                )
        for u in users:
            u.replace_input_with(x, new)


def _node(graph: fx.Graph, target: object, args: tuple[object, ...], name: str, value: Value) -> fx.Node:
    node = graph.create_node("call_function", target, args, {}, name=name)  # type: ignore[arg-type]
    node.meta |= {"value": value, "source": Source()}
    if target is ops.sum_grad:
        node.kwargs = {"tag": node.name}
    return node
