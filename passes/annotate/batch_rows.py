"""Compute the layouts of the batch's tensors: the axes that split the rows, and each input's row dim."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from itertools import accumulate

from shardc.errors import Errors, ShardcError
from shardc.ir.graph import placeholders
from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.patterns import match
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program
from shardc.ir.similar_names import did_you_mean
from shardc.ir.stored import Input
from shardc.passes.annotate.indivisible import indivisible_dim
from shardc.passes.annotate.padding import padded
from shardc.passes.annotate.spec_layouts import check_fits
from shardc.spec import Spec


def with_microbatches(spec: Spec, program: Program) -> Spec:
    """Return the spec with the number of microbatches that `batch: {rows: r}` makes of the global batch.

    A rank has r rows in each microbatch. So fewer ranks have more microbatches, and the batch stays the same.
    """
    if spec.batch.rows is None:
        return spec
    all_rows = max((n for _, n in _rows(spec, program).values()), default=1)
    count = -(-all_rows // (spec.data_ranks * spec.batch.rows))
    return replace(spec, batch=spec.batch.model_copy(update={"rows": None, "microbatches": count}))


def with_microbatch_axis(spec: Spec) -> Spec:
    """Return the spec with its microbatches as one more axis, the innermost of those that split the batch."""
    if spec.batch.microbatches == 1:
        return spec
    mesh = Mesh((*spec.mesh.axes, (MICROBATCH, spec.batch.microbatches)))
    return replace(spec, mesh=mesh, batch=spec.batch.model_copy(update={"axes": (*spec.data_axes, MICROBATCH)}))


def row_axes(spec: Spec, program: Program, mesh: Mesh) -> tuple[list[str], list[str]]:
    """Return the axes that split the batch's rows, and notes.

    They are those of the spec. But if their ranks do not divide the batch, axes for experts do not split it.
    """
    axes = [a for a in spec.data_axes if mesh.size(a) > 1]
    of_experts = [a for a in axes if a in spec.expert_axes] if spec.batch.axes is None and spec.uneven != "pad" else []
    ranks = math.prod(mesh.size(a) for a in axes)
    indivisible = [n for _, n in _rows(spec, program).values() if n % ranks]
    if not of_experts or not indivisible:
        return axes, []
    note = f"outside of experts the ranks of {', '.join(of_experts)} do the same"
    return [a for a in axes if a not in of_experts], [
        f"{spec.where(('experts',))}: the batch of {indivisible[0]} is not divisible by {ranks} ranks: {note}"
    ]


def batch_rows(spec: Spec, program: Program) -> tuple[int, frozenset[int]]:
    """Return the rows of most inputs (0 if none has any), and the lengths of rows: sizes of the dims after them."""
    counts = [n for _, n in _rows(spec, program).values()]
    most = max(counts, key=lambda n: (counts.count(n), n), default=0)
    dims = ((x, batch_dim(spec, program, x)) for x in program.inputs)
    lengths = (x.shape[d + 1] for x, d in dims if d is not None and d + 1 < len(x.shape) and x.shape[d] == most)
    return most, frozenset(n for n in lengths if n > 1)


def _rows(spec: Spec, program: Program) -> dict[str, tuple[int, int]]:
    """Return (dim, size) of the rows of each input that has rows, by its name."""
    dims = ((x, batch_dim(spec, program, x)) for x in program.inputs)
    return {input_name(x): (d, x.shape[d]) for x, d in dims if d is not None and d < len(x.shape)}


def batch_dim(spec: Spec, program: Program, x: Input) -> int | None:
    """Return the dim of an input that the batch's axes split.

    None for an input of one row if others have more: all rows share it (positions i64[1, s]).
    """

    def named(x: Input) -> int | None:
        if x.choice is not None:
            return x.choice.rows
        return next((d for pattern, d in spec.batch.dims.items() if match(pattern, input_name(x))), 0)

    def rows(x: Input) -> int:
        return x.shape[d] if (d := named(x)) is not None and d < len(x.shape) else 0

    return None if rows(x) == 1 < max(map(rows, program.inputs)) else named(x)


def disagreements(spec: Spec, program: Program, without_rows: bool = False) -> dict[str, ShardcError]:
    """Return an error, by name, for each input whose row count differs from that of most inputs.

    It has an error only if exactly one of its other dims has that size, as in positions of shape [3, rows, length].
    without_rows: it also has one if none of its dims has that size, as in a table of positions that all rows share.
    """
    rows, shapes = _rows(spec, program), {input_name(x): x.shape for x in program.inputs}
    counts = [n for _, n in rows.values()]
    most = max(counts, key=lambda n: (counts.count(n), n), default=0)

    def fix(name: str, shape: tuple[int, ...]) -> str:
        dim = shape.index(most) if most in shape else "null"
        condition = f"the rows of {name!r} are its dim {dim}" if most in shape else f"all rows share {name!r}"
        return f"if {condition}, write `batch: {{dims: {{{name}: {dim}}}}}`"

    other = next((name for name, (_, n) in rows.items() if n == most), "")
    return {
        name: ShardcError(
            f"{name!r} has {n} rows (dim {d}), but {other!r} has {most}",
            where=spec.where(("batch",)),
            fix=fix(name, shapes[name]),
        )
        for name, (d, n) in rows.items()
        if n != most and (shapes[name].count(most) == 1 or (without_rows and most not in shapes[name]))
    }


def _axis_place(spec: Spec, axis: str) -> str:
    """Return the place in the spec where an axis splits the batch: `batch: {axes: ...}`, else the mesh."""
    if axis == MICROBATCH:
        return spec.where(("batch", "microbatches"))
    return spec.where(("mesh", axis) if spec.batch.axes is None else ("batch", "axes"))


def input_layouts(spec: Spec, program: Program, mesh: Mesh, axes: list[str], multiple: int = 1) -> dict[str, Layout]:
    """Return the layouts of inputs: rows over the batch's axes. Adds their causes to nodes.

    multiple: of which the rows of a rank are, if they are padded.

    Raises ShardcError for all patterns that match no input, and for all sizes that ranks do not divide.
    """
    errors = Errors()
    names = {x.name: input_name(x) for x in program.inputs}
    for key, patterns in (("dims", spec.batch.dims), ("pad", spec.batch.pad)):
        for pattern in patterns:
            if pattern != "*" and not any(match(pattern, n) for n in names.values()):
                known = list(names.values())
                fix = did_you_mean(pattern, known, f"the inputs are {', '.join(known)}")
                errors.add(f"pattern {pattern!r} matches no input", where=spec.where(("batch", key, pattern)), fix=fix)
    for name, (dim, rows) in _rows(spec, program).items():
        if rows == 0:
            fix = "compile with a global batch of the size of a step"
            errors.add(f"input {name!r} has no rows (dim {dim})", where=spec.where(("batch",)), fix=fix)
    layouts = _split_rows(spec, program, mesh, axes, names, multiple, errors)
    errors.raise_any()
    return layouts


def _split_rows(
    spec: Spec,
    program: Program,
    mesh: Mesh,
    axes: list[str],
    names: dict[str, str],
    multiple: int,
    errors: Errors,
) -> dict[str, Layout]:
    """Return the layouts of inputs whose rows the axes split. Adds one error for all inputs of the same fault.

    names: of inputs as a user writes them, by placeholder.
    """
    layouts: dict[str, Layout] = {}
    nodes = placeholders(program.graph)
    faults: dict[tuple[str, str, str], list[str]] = {}  # (fault, place in the spec, fix) -> inputs
    for x in program.inputs:
        name = names[x.name]
        dim = batch_dim(spec, program, x)
        if dim is None or not axes or not x.shape:
            continue
        splits = accumulate((mesh.size(a) for a in axes[:-1]), operator.mul, initial=1)
        layout = Layout.of({a: Shard(dim, split) for a, split in zip(axes, splits, strict=True)}, mesh)
        if spec.uneven == "pad":
            layout = padded(layout, x.shape, mesh, multiple)
        if uneven := indivisible_dim(layout, x.shape, mesh):
            axis = uneven.axes[-1]
            place = spec.where(("batch", "microbatches") if axis == MICROBATCH else ("mesh", axis))
            fault = uneven.fault(mesh, f"the batch of {uneven.size} (dim {dim})")
            faults.setdefault((fault, place, uneven.fix(mesh, size="it")), []).append(name)
        elif check_fits(
            layout, x.shape, mesh, f"input {name!r} (batch dim {dim})", spec.where(("batch", "dims")), errors
        ):
            layouts[x.name] = layout
            nodes[x.name].meta["cause"] = {a: f"{_axis_place(spec, a)} batch dim {dim} of {name!r}" for a in axes}
    disagree = disagreements(spec, program, without_rows=True)
    for (fault, place, fix), group in faults.items():
        for error in (disagree[name] for name in group if name in disagree):
            fault, fix = f"{fault}: {error.what}", f"{error.fix}; else {fix}"
        errors.add(f"input {', '.join(map(repr, group))}: {fault}", where=place, fix=fix)
    return layouts


def input_name(x: Input) -> str:
    """Return an input's name as a user writes it: its path in the batch, such as `mask` or `0.mask`."""
    return ".".join(map(str, x.path)) or x.name
