"""Make the mesh of a rank that runs a program, with a process group per set of axes that it uses."""

from __future__ import annotations

from typing import Any

from shardc.ir.outputs import loss_axes, sum_axes
from shardc.ir.program import Program
from shardc.optional import registered
from shardc.runtime.mesh import TorchMesh
from shardc.runtime.ops.experts.parallel import experts_route
from shardc.runtime.stage.clip_grad_norm import norm_axes


def groups_of(program: Program) -> list[tuple[str, ...]]:
    """Return the sets of axes over which the program communicates; each needs a process group."""
    groups = [
        axes
        for b in program.buckets
        for axes in (b.axes, (b.shard,) if b.shard else (), tuple(a for a in b.axes if a != b.shard))
    ]
    groups += [(program.axis,)] if program.axis else []
    groups += [tuple(a for a, _ in p.layout.shards()) for p in program.params]
    groups += [norm_axes(program, p.name) for p in program.params]
    for stage in program.stages:
        groups += [n.meta["collective"].axes for n in stage.graph.nodes if "collective" in n.meta]
    groups += [sum_axes(program.outputs, program.mesh, program.axis), loss_axes(program)]
    groups += [(a,) for o in program.outputs for a, _ in o.layout.shards()]
    groups += [axes(program) for axes in registered("program", "axes", program.features)]
    if program.spec.precision.loss_scale is not None or any(
        s.graph.find_nodes(op="call_function", target=experts_route) for s in program.stages
    ):
        groups.append(program.mesh.names)  # all ranks skip the same steps; the loads of experts
    return [axes for axes in dict.fromkeys(groups) if axes]


def seen_as(mesh: Any, program: Program) -> Any:
    """Return the mesh of another program over the same ranks, with its process groups. Collective."""
    return mesh.seen_as(program.mesh, groups_of(program), lines=(program.axis,) if program.axis else ())


def runtime_mesh(program: Program, **options: Any) -> TorchMesh:
    """Return this rank's mesh in torch.distributed's world. options: TorchMesh's."""
    return TorchMesh(program.mesh, groups_of(program), lines=(program.axis,) if program.axis else (), **options)
