"""Find the ops of the parts that `parts` and `pipeline: {meshes: ...}` name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import fx

from shardc.errors import Errors
from shardc.features.parts import section
from shardc.ir.graph import source_of
from shardc.ir.patterns import enclosing
from shardc.ir.program import Program
from shardc.passes.annotate.mesh_parts import MeshPart
from shardc.passes.pipeline import cuts, stage_spec
from shardc.spec import Spec
from shardc.spec.model_names import Selector, select_modules


def mesh_parts(spec: Spec, program: Program, errors: Errors) -> Iterator[MeshPart]:
    """Yield the parts of a canonical graph: an op belongs to the first that names it, or else to its stage.

    Adds errors for patterns that match no module.
    """
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    taken: set[fx.Node] = set()
    mesh = stage_spec(spec).mesh
    parts = section.of(spec)
    if parts:
        names = sorted({m for n in nodes for m in enclosing(source_of(n).module)})
        patterns = [
            Selector(text, spec.where(("parts", name, "modules")))
            for name, part in parts.items()
            for text in part.modules
        ]
        selected = iter(select_modules(patterns, names, program.module_aliases, errors))
        for name, part in parts.items():
            modules = {m for _ in part.modules for m in next(selected)}
            inside = {n for n in nodes if not modules.isdisjoint(enclosing(source_of(n).module))} - taken
            taken |= inside
            where, sizes = spec.where(("parts", name)), section.resolved(part.mesh, mesh.world)
            yield MeshPart(f"part {name!r}", inside, sizes, where, f"{where} part {name!r}: {_text(sizes)}")
    if meshes := section.meshes(spec):
        starts = cuts.positions(nodes, spec, mesh)
        own = {a: n for a, n in mesh.axes if n > 1}
        for stage, (start, end) in enumerate(pairwise([0, *starts, len(nodes)])):
            sizes, where = section.resolved(meshes.get(stage, own), mesh.world), spec.where(("pipeline", "meshes"))
            cause = f"{where} stage {stage}: {_text(sizes)}"
            yield MeshPart(f"stage {stage}", {*nodes[start:end]} - taken, sizes, where, cause, is_stage=True)


def _text(sizes: object) -> str:
    assert isinstance(sizes, dict)
    return ", ".join(f"{axis}={n}" for axis, n in sizes.items())
