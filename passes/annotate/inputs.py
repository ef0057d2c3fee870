"""Compute the layouts of the batch's tensors: the axes that split the rows, and each input's row dim."""

from __future__ import annotations

import math
from dataclasses import replace

from shardc.errors import Errors, ShardcError
from shardc.ir.graph import placeholders
from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.patterns import did_you_mean, match
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.stored import Input
from shardc.passes.annotate.indivisible import indivisible_dim
from shardc.passes.annotate.padding import padded
from shardc.passes.annotate.sequence import split_sequence
from shardc.passes.annotate.spec_layouts import check_fits, layout_of
from shardc.spec import DimShard, Spec


def with_microbatches(spec: Spec, program: Program) -> Spec:
    """Return the spec with the number of microbatches that `batch: {rows: r}` makes of the global batch.

    A rank has r rows in each microbatch. So fewer ranks have more microbatches, and the batch stays the same.
    """
    rows = spec.batch.rows
    if rows is None:
        return spec
    dims = [(x.shape, _batch_dim(spec, program, x)) for x in program.inputs]
    whole = max((shape[d] for shape, d in dims if d is not None and d < len(shape)), default=1)
    count = -(-whole // (spec.data_ranks * rows))
    return replace(spec, batch=spec.batch.model_copy(update={"rows": None, "microbatches": count}))


def widened(spec: Spec) -> Spec:
    """Return the spec with its microbatches as one more axis, the innermost of those that split the batch."""
    if spec.batch.microbatches == 1:
        return spec
    mesh = Mesh((*spec.mesh.axes, (MICROBATCH, spec.batch.microbatches)))
    return replace(spec, mesh=mesh, batch=spec.batch.model_copy(update={"axes": (*spec.data_axes, MICROBATCH)}))


def batch_axes(spec: Spec, program: Program, mesh: Mesh) -> tuple[list[str], list[str]]:
    """Return the axes that split the batch, and notes. Axes for experts only do if the batch divides."""
    axes = [a for a in spec.data_axes if mesh.size(a) > 1]
    of_experts = [a for a in axes if a in spec.expert_axes] if spec.batch.axes is None and spec.uneven != "pad" else []
    ranks = math.prod(mesh.size(a) for a in axes)
    dims = [(x.shape, _batch_dim(spec, program, x)) for x in program.inputs]
    odd = [shape[d] for shape, d in dims if d is not None and d < len(shape) and shape[d] % ranks]
    if not of_experts or not odd:
        return axes, []
    note = f"outside of experts the ranks of {', '.join(of_experts)} do the same"
    return [a for a in axes if a not in of_experts], [
        f"{spec.where(('experts',))}: the batch of {odd[0]} is not divisible by {ranks} ranks: {note}"
    ]


def _batch_dim(spec: Spec, program: Program, x: Input) -> int | None:
    """Return the dim of an input that the batch's axes split.

    None for an input of one row if others have more: all rows share it (positions i64[1, s]).
    """

    def named(x: Input) -> int | None:
        return next((d for pattern, d in spec.batch.dims.items() if match(pattern, _input_name(x))), 0)

    def rows(x: Input) -> int:
        return x.shape[d] if (d := named(x)) is not None and d < len(x.shape) else 0

    return None if rows(x) == 1 < max(map(rows, program.inputs)) else named(x)


def disagreements(spec: Spec, program: Program, without_rows: bool = False) -> dict[str, ShardcError]:
    """Return an error, by name, for each input whose row count differs from that of most inputs.

    Of inputs of which exactly one other dim has as many, such as positions of shape [3, rows, length].
    without_rows: also of those of which no dim has as many, such as a table of positions that all rows share.
    """
    sized = [(_input_name(x), x.shape, _batch_dim(spec, program, x)) for x in program.inputs]
    rows = {name: shape[d] for name, shape, d in sized if d is not None and d < len(shape)}
    most = max(rows.values(), key=lambda n: (list(rows.values()).count(n), n), default=0)

    def fix(name: str, shape: tuple[int, ...]) -> str:
        dim = shape.index(most) if most in shape else "null"
        condition = f"the rows of {name!r} are its dim {dim}" if most in shape else f"all rows share {name!r}"
        return f"if {condition}, write `batch: {{dims: {{{name}: {dim}}}}}`"

    return {
        name: ShardcError(
            f"{name!r} has {rows[name]} rows (dim {d}), but {next(n for n in rows if rows[n] == most)!r} has {most}",
            where=spec.where(("batch",)),
            fix=fix(name, shape),
        )
        for name, shape, d in sized
        if name in rows and rows[name] != most and (shape.count(most) == 1 or (without_rows and most not in shape))
    }


def _axis_place(spec: Spec, axis: str) -> str:
    """Return the place in the spec where an axis splits the batch: `batch: {axes: ...}`, else the mesh."""
    if axis == MICROBATCH:
        return spec.where(("batch", "microbatches"))
    return spec.where(("mesh", axis) if spec.batch.axes is None else ("batch", "axes"))


def input_layouts(spec: Spec, program: Program, mesh: Mesh, axes: list[str]) -> dict[str, Layout]:
    errors = Errors()
    layouts: dict[str, Layout] = {}
    names = [_input_name(i) for i in program.inputs]
    for key, pattern in [("dims", p) for p in spec.batch.dims] + [("pad", p) for p in spec.batch.pad]:
        if pattern != "*" and not any(match(pattern, n) for n in names):
            fix = did_you_mean(pattern, names, f"the inputs are {', '.join(names)}")
            errors.add(f"pattern {pattern!r} matches no input", where=spec.where(("batch", key, pattern)), fix=fix)
    nodes = placeholders(program.graph)
    wrong: dict[tuple[str, str, str], list[str]] = {}  # one error for all equal inputs
    for x, name in zip(program.inputs, names, strict=True):
        dim = _batch_dim(spec, program, x)
        if dim is None or not axes or not x.shape:
            continue
        layout = layout_of({dim: tuple(DimShard(axis=a) for a in axes)}, mesh)
        if spec.uneven == "pad":
            layout = padded(layout, x.shape, mesh)
        if odd := indivisible_dim(layout, x.shape, mesh):
            place = spec.where(("batch", "microbatches") if odd.axes[-1] == MICROBATCH else ("mesh", odd.axes[-1]))
            wrong.setdefault(
                (odd.what(mesh, f"the batch of {odd.size} (dim {dim})"), place, odd.fix(mesh, size="it")), []
            ).append(name)
        elif check_fits(
            layout, x.shape, mesh, f"input {name!r} (batch dim {dim})", spec.where(("batch", "dims")), errors
        ):
            layouts[x.name] = layout
            nodes[x.name].meta["cause"] = {a: f"{_axis_place(spec, a)} batch dim {dim} of {name!r}" for a in axes}
    disagree = disagreements(spec, program, without_rows=True)
    for (fault, place, fix), group in wrong.items():
        for error in (disagree[name] for name in group if name in disagree):
            fault, fix = f"{fault}: {error.what}", f"{error.fix}; else {fix}"
        errors.add(f"input {', '.join(map(repr, group))}: {fault}", where=place, fix=fix)
    by_name = {x.name: name for x, name in zip(program.inputs, names, strict=True)}
    for placeholder, why in split_sequence(spec, program, mesh, by_name, layouts, errors).items():
        assert spec.sequence is not None
        causes = nodes[placeholder].meta.setdefault("cause", {})
        causes |= dict.fromkeys((part for a in spec.sequence.axis for part in mesh.parts(a)), why)
    errors.raise_any()
    return layouts


def _input_name(x: Input) -> str:
    return ".".join(map(str, x.path)) or x.name
