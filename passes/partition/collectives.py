"""A conversion as a call: the arguments of its op, what it communicates, and which annotation that goes back to.

    linear_1_sum = ops.all_reduce(linear_1, mesh, ('tp',), ...)  # ... | all_reduce/none tp 1024 "spec.yaml:3:9 ..."
                                                                         Collective(kind, backward, axes, bytes, cause)

A sum is due to the op that makes the summands, a gather to the op that needs the value whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.ir.conversions import Conversion
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Collective, Value
from shardc.ir.placement import Layout, Partial, Shard
from shardc.rules.core.strategy import needs_sum_grad
from shardc.torch_private import OpOverload


def digit_arguments(mesh: Mesh, axis: str, old: Layout, new: Layout) -> tuple[Any, ...]:
    """The digits that a conversion joins and cuts, as its op takes them (shardc.runtime.ops.convert)."""
    sides = [(s, a, b) for a, b in ((old, new), (new, old)) if isinstance(s := a[axis], Shard)]
    digits = [arg for s, layout, _ in sides for arg in (s.dim, layout.local_split(axis, mesh))]
    sections = [s.sections for s, _, _ in sides[:1] if len(sides) == 1]
    padded = any(s.padding for s, _, _ in sides)
    paddings = [arg for s, _, other in sides if padded for arg in _padding(s, other)]
    return (*digits, *sections, *paddings)


def _padding(s: Shard, whole: Layout) -> tuple[int, int]:
    """The padding that a conversion puts on or takes off: none while another axis still splits the dim."""
    return (0, 1) if whole.shards(s.dim) else (s.padding, s.blocks)


def collective_of(
    mesh: Mesh,
    row: Conversion,
    axes: tuple[str, ...],
    old: Layout,
    new: Layout,
    v: Value,
    producer: fx.Node,
    user: fx.Node,
    asked: str,
) -> Collective | None:
    """What a conversion communicates, and why; None if it does not.

    old, new: layouts before and after. v: the global value. producer: the global node that it comes from; user: that
    needs it. asked: what asks for the layout, "" if it is the user's strategy.
    """
    forward, backward = row.collectives(gradient=needs_sum_grad(v))
    if forward == backward == "none":
        return None
    why = _cause(mesh, row, axes, producer, user) or asked
    whole = new if row.source is Shard else old  # the larger of the two
    nbytes = replace(v, layout=whole).nbytes(mesh)
    for s in old.paddings() or new.paddings():  # what is sent is padded
        if not whole.shards(s.dim):
            nbytes = nbytes // v.shape[s.dim] * s.padded(v.shape[s.dim])
    return Collective(forward, backward, axes, nbytes, why, not why)


def _cause(mesh: Mesh, row: Conversion, axes: tuple[str, ...], producer: fx.Node, user: fx.Node) -> str:
    """The annotations behind a conversion: for sums the producer's, for gathers the user's, for a pin its own."""
    if line := user.meta.get("spec_line"):  # an op that the spec inserted
        return str(line)
    first, second = (producer, user) if row.source is Partial else (user, producer)
    causes: list[str] = []
    for axis in (part for a in axes for part in mesh.parts(a)):
        strategy = user.meta.get("strategies", {}).get(axis)
        if row.forward == "all_gather" and (
            strategy is None or strategy.kind in ("replicate", "partial_grad", "partial")
        ):
            continue  # the op cannot be split: that goes back to no annotation
        for n in (first, second):
            why = n.meta.get("why", {}).get(axis, "")
            if why:
                causes.append(why)
                break
    return "; ".join(dict.fromkeys(causes))


def gather_note(v: Value, axis: str, user: fx.Node) -> str:
    """Says of a gather that goes back to no annotation why it is there."""
    return (
        f"{user.meta.get('source') or user.name}: {v} is gathered over {axis}, because {needing(user)}"
        f" needs it whole there, which no annotation implies{_in_parts(user, axis)}"
    )


def needing(user: fx.Node) -> str:
    """What needs a value: `aten.mm.default`, a function's name, or the step's end, which keeps new values of buffers as
    they are stored.
    """
    if user.op == "output":
        return "the buffer that it is the new value of, or the caller who gets it beside the loss,"
    target: Any = user.target
    return str(target) if isinstance(target, OpOverload) else str(target.__name__)


def _in_parts(user: fx.Node, axis: str) -> str:
    """What to write instead where a fused weight's result is taken apart: each part split."""
    if user.target is not torch.ops.aten.split_with_sizes.default or user.args[2:] in ((), (0,)):
        return ""  # along dim 0 are rows of the batch, no features
    sizes: Any = user.args[1]
    how = f"split: {len(sizes)}" if len(set(sizes)) == 1 else f"sections: {list(sizes)}"
    return (
        f"; of a fused weight each part can be split: {{0: {{axis: {axis.partition('.')[0]}, {how}}}}} instead of"
        " `column`"
    )
