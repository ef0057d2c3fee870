"""Decide how ranks hold a step's outputs: split like the batch, summed over its axes later, or whole."""

from __future__ import annotations

from collections.abc import Mapping

from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.metadata import Value
from shardc.ir.outputs import Output, is_small
from shardc.ir.placement import REPLICATE, Layout, Partial, Placement, Shard
from shardc.spec import Spec


def batch_axes(spec: Spec, mesh: Mesh) -> frozenset[str]:
    """Return the axes, or digits of axes, that the spec sets for the batch, including the microbatch axis."""
    names = {n.partition(".")[0] for n in mesh.names}
    return frozenset(part for a in (*spec.data_axes, MICROBATCH) if a in names for part in mesh.digits(a))


def layout_of(
    output: Output, value: Value, placements: Mapping[str, Placement], batch: frozenset[str], mesh: Mesh
) -> Layout:
    """Return the layout in which ranks hold an output that is produced in these placements.

    The spec's choice comes first. Else rows and small partial sums stay as they are, and the rest is made whole.
    """
    small = is_small(value.shape) and not any(isinstance(p, Shard) for p in placements.values())
    wanted = output.wanted

    def kept(axis: str, p: Placement) -> bool:
        if wanted is not None and not wanted.items and axis != MICROBATCH:
            return False  # the spec wants it whole
        if isinstance(p, Partial):
            return p.op == "sum" and (small or axis == MICROBATCH)
        return isinstance(p, Shard) and (axis in batch or (output.as_made and not p.padding))

    placed = {a: p if kept(a, p) else REPLICATE for a, p in placements.items()}
    return Layout.of({**placed, **dict(wanted.items if wanted is not None else ())}, mesh)
