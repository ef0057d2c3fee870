"""Note the mesh axes that nothing is sharded over: their ranks do redundant work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardc.ir.mesh import axes_of_spec
from shardc.ir.placement import REPLICATE, Layout
from shardc.ir.program import Program
from shardc.passes.base import Pass
from shardc.spec import Spec


@dataclass(frozen=True)
class UnusedAxes(Pass):
    """Adds a note for each axis that nothing uses: its spec line, and what could use it."""

    def run(self, program: Program) -> Program:
        unused = {axis: size for axis, size in self.spec.mesh.axes if size > 1}
        for axis in _used(program):
            for name in axes_of_spec(axis):
                unused.pop(name, None)
            if not unused:
                return program
        return replace(
            program, notes=(*program.notes, *(_note(self.spec, axis, size) for axis, size in unused.items()))
        )


def _used(program: Program) -> Iterator[str]:
    """Yield the axes that a program uses, including digits and parts of axes."""
    yield program.axis
    for x in program.stored:
        yield from _split(x.layout)
    for b in program.buckets:
        yield from (*b.axes, b.shard)
    for stage in program.stages:
        for node in stage.graph.nodes:
            if (c := node.meta.get("collective")) is not None:
                yield from c.axes
            value = node.meta.get("value")
            for v in value if isinstance(value, tuple) else (value,):
                if v is not None:
                    yield from _split(v.layout)


def _split(layout: Layout) -> Iterator[str]:
    return (axis for axis, placement in layout.items if placement != REPLICATE)


def _note(spec: Spec, axis: str, size: int) -> str:
    use = "structure" if axis == "tp" else f"{{plan: structure, axis: {axis}}}"
    return (
        f"{spec.where(('mesh', axis))}: {axis}={size} splits nothing: its {size} ranks all compute the same. Use it for"
        f" weights (shard: {{use: {use}}}, or entries by name), the batch (data: {{axis: {axis}}}), a pipeline"
        f" (pipeline: {{axis: {axis}, stages: {size}}}) or experts (experts: [{{match: ..., axis: {axis}}}]), or leave"
        " it out"
    )
