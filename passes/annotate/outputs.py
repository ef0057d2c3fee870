"""Read `outputs`: the layouts in which a program returns its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardc.errors import Errors
from shardc.ir.mesh import Mesh
from shardc.ir.outputs import Output
from shardc.ir.patterns import match
from shardc.ir.placement import Layout
from shardc.passes.annotate.padding import padded
from shardc.passes.annotate.spec_layouts import check_fits, dims_text, layout_of, quote
from shardc.spec import Spec


def wanted_outputs(
    spec: Spec, outputs: Sequence[Output], mesh: Mesh, errors: Errors, notes: list[str], *, all_named: bool
) -> tuple[Output, ...]:
    """Return the outputs with the layout of the first entry that names each.

    Adds an error for an entry that does not fit, and for one that matches no output: if all_named, else a note.
    """
    result = list(outputs)
    for rule in reversed(spec.outputs):  # the first match wins
        where, matched = spec.where(("outputs", rule.pattern)), False
        for i, o in enumerate(result):
            if not match(rule.pattern, o.name):
                continue
            matched, layout = True, Layout()
            if rule.dims is not None:
                layout = layout_of(rule.dims, mesh)
                layout = padded(layout, o.shape, mesh) if spec.uneven == "pad" else layout
                check_fits(layout, o.shape, mesh, f"output {o.name}", where, errors)
            cause = quote(spec, "outputs", rule.pattern, dims_text(rule.dims) if rule.dims is not None else "whole")
            no_effect = rule.dims is not None and not layout.items  # all its axes have one rank
            result[i] = replace(o, wanted=None if no_effect else layout, cause=cause)
        if not matched:
            known = f"the outputs are {', '.join(o.name for o in outputs) or 'the loss alone'}"
            fault = f"pattern {rule.pattern!r} matches no output"
            errors.add(fault, where=where, fix=known) if all_named else notes.append(f"{where}: {fault}: {known}")
    return tuple(result)
