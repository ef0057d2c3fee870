"""Context parallel: the dim of each input that `sequence` splits, beside the batch's.

    before   input_ids: i64[8@dp, 4096]              spec: sequence: {axis: cp}
    after    input_ids: i64[8@dp, 4096@cp]

The rest follows by the rules of ops, as it does for the batch: what works on tokens one by one goes on split; what
reads other tokens (keys and values of attention, a shift of labels, a sum over the sequence) is gathered or summed by
conversions, in the sequence's order; parameters' gradients are summed over the axis."""

from __future__ import annotations

from shardc.errors import Errors
from shardc.ir.mesh import Mesh
from shardc.ir.patterns import did_you_mean, match
from shardc.ir.placement import Layout
from shardc.ir.program import Input, Program
from shardc.passes.annotate.indivisible import indivisible_dim
from shardc.passes.annotate.padding import padded
from shardc.passes.annotate.spec_layouts import layout_of
from shardc.spec import DimShard, Spec


def sequence_dim(spec: Spec, x: Input, name: str) -> int | None:
    """The dim of an input that `sequence` splits; None of an input that has no such dim, or one of size 1 there, which
    all tokens share.
    """
    assert spec.sequence is not None
    dim = next((d for pattern, d in spec.sequence.dims.items() if match(pattern, name)), None)
    return dim if dim is not None and dim < len(x.shape) and x.shape[dim] > 1 else None


def split_sequence(
    spec: Spec, program: Program, mesh: Mesh, names: dict[str, str], layouts: dict[str, Layout], errors: Errors
) -> dict[str, str]:
    """Adds the split to the layouts of inputs. names: of inputs as a user writes them, by placeholder.

    Returns why, by placeholder. Errors are added for patterns that match nothing, sizes that the axis does not divide,
    and a dim that the batch's axes split."""
    sequence = spec.sequence
    if sequence is None or mesh.size(sequence.axis) == 1:
        return {}
    axis, where = sequence.axis, spec.where(("sequence", "axis"))
    for pattern in sequence.dims:
        if pattern != "*" and not any(match(pattern, n) for n in names.values()):
            known = f"the inputs are {', '.join(names.values())}"
            place = spec.where(("sequence", "dims", pattern))
            fix = did_you_mean(pattern, list(names.values()), known)
            errors.add(f"pattern {pattern!r} matches no input", where=place, fix=fix)
    causes: dict[str, str] = {}
    for x in program.inputs:
        name = names[x.name]
        dim = sequence_dim(spec, x, name)
        if dim is None:
            continue
        if layouts.get(x.name, Layout()).shards(dim):
            errors.add(
                f"input {name!r} of shape {list(x.shape)}: dim {dim} is the batch's and the sequence's",
                where=spec.where(("sequence", "dims")),
                fix=f"write which dim is the sequence's: sequence: {{dims: {{{name}: 1}}}}, or null for none",
            )
            continue
        layout = layout_of({dim: (DimShard(axis=axis),)}, mesh)
        if spec.uneven == "pad":
            layout = padded(layout, x.shape, mesh)
        if odd := indivisible_dim(layout, x.shape, mesh):
            errors.add(
                odd.what(mesh, f"input {name!r}: the sequence of {odd.size} (dim {dim})"),
                where=where,
                fix=f"{odd.fix(mesh, size='it')}; if dim {dim} is no sequence: sequence: {{dims: {{{name}: null}}}}",
            )
            continue
        layouts[x.name] = Layout.of({**dict(layouts.get(x.name, Layout()).items), **dict(layout.items)}, mesh)
        causes[x.name] = f"{where} sequence dim {dim} of {name!r}"
    if not causes and not errors.found:
        known = ", ".join(f"{names[x.name]} {list(x.shape)}" for x in program.inputs)
        errors.add(
            f"no input has a sequence that {axis} could split: {known}",
            where=where,
            fix="name the dim: sequence: {dims: {NAME: 1}}, or leave the section out",
        )
    return causes
