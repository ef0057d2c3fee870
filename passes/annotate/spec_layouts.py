"""Turn what the spec writes about a tensor into a layout, checked against a shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardc.errors import Errors
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout, Placement, Shard
from shardc.passes.annotate.indivisible import indivisible_dim
from shardc.passes.annotate.padding import padded
from shardc.spec import DimShard, Spec


def quote(spec: Spec, section: str, key: str, text: object) -> str:
    """Return an entry of the spec with its place, as causes cite it: "spec.yaml:7:3 '*.o_proj': row"."""
    return f"{spec.where((section, key))} {key!r}: {text}"


def layout_of(
    dims: dict[int, tuple[DimShard, ...]], mesh: Mesh, digits: Callable[[str], Iterable[str]] | None = None
) -> Layout:
    """Return the layout of {dim: axes} in the spec; the first axis of a dim has the outermost digit.

    digits: what an axis of the spec means on this mesh, if not the axis of that name.
    """
    placements: dict[str, Placement] = {}
    for dim, shards in dims.items():
        digit = 1
        for s in shards:
            for axis in digits(s.axis) if digits is not None else (s.axis,):
                placements[axis] = Shard(dim, s.split * digit, s.sections)
                digit *= mesh.size(axis)
    return Layout.of({a: p for a, p in placements.items() if mesh.size(a) > 1}, mesh)


def dims_text(dims: dict[int, tuple[DimShard, ...]]) -> str:
    """Return the dims as the spec writes them: "{0: tp, 1: dp+ep}"."""

    def one(s: DimShard) -> str:
        return s.axis + (f"/{s.split}" if s.split > 1 else "") + (f"{list(s.sections)}" if s.sections else "")

    return "{" + ", ".join(f"{d}: {'+'.join(map(one, s))}" for d, s in dims.items()) + "}"


def check_fits(
    layout: Layout, shape: tuple[int, ...], mesh: Mesh, name: str, where: str, errors: Errors, *, pad: bool = False
) -> bool:
    """Return whether a shape can have a layout; if not, add an error with the nearest sizes that fit.

    pad: sizes that only need padding fit.
    """
    layout = padded(layout, shape, mesh) if pad else layout
    problem = layout.problem(shape, mesh)
    if not problem:
        return True
    if uneven := indivisible_dim(layout, shape, mesh):
        errors.add(f"{name} of shape {list(shape)}: {uneven.fault(mesh)}", where=where, fix=uneven.fix(mesh))
        return False
    fix = f"its dims are 0 to {len(shape) - 1}" if shape else "it is one number: leave it whole"
    if any(s.sections and s.dim < len(shape) for _, s in layout.shards()):
        fix = "list the sizes of the parts"
    errors.add(f"{name} of shape {list(shape)}: {problem}", where=where, fix=fix)
    return False
