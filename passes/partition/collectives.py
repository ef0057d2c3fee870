"""Build a conversion's call: the arguments of its op, its collective, and the annotation behind it.

    linear_1_sum = ops.all_reduce(linear_1, mesh, ('tp',), ...)  # ... | all_reduce/none tp 1024 "spec.yaml:3:9 ..."
                                                                         Collective(kind, backward, axes, bytes, cause)

A sum is caused by the op that makes the partial sums, a gather by the op that needs the value whole.
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
from shardc.ir.types import full_op_name
from shardc.rules.core.strategy import needs_sum_grad


def digit_arguments(mesh: Mesh, axis: str, old: Layout, new: Layout) -> tuple[Any, ...]:
    """Return the digits of dims that a conversion joins and cuts (shardc.runtime.ops.convert).

    `dim, split` of the old and the new shard; `sections`, if only one of the two is a shard; `padding, blocks` of each,
    if padded: see Shard. all_gather of Shard(1, 3): (1, 3, ()); all_to_all, Shard(0) to Shard(1): (0, 1, 1, 1).
    """
    sides = [(s, a, b) for a, b in ((old, new), (new, old)) if isinstance(s := a[axis], Shard)]
    digits = [arg for s, layout, _ in sides for arg in (s.dim, layout.local_split(axis, mesh))]
    sections = [s.sections for s, _, _ in sides[:1] if len(sides) == 1]
    padded = any(s.padding for s, _, _ in sides)
    paddings = [arg for s, _, other in sides if padded for arg in _padding(s, other)]
    return (*digits, *sections, *paddings)


def _padding(s: Shard, whole: Layout) -> tuple[int, int]:
    """Return the padding that a conversion adds or removes: none while another axis still splits the dim."""
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
    cause: str,
) -> Collective | None:
    """Return the collective of a conversion with its cause; None if it does not communicate.

    old, new: layouts before and after. v: the global value. producer: the global node that it comes from. user: the
    node that needs it. cause: the spec line to name if the two nodes have none.
    """
    forward, backward = row.collectives(gradient=needs_sum_grad(v))
    if forward == backward == "none":
        return None
    cause = _cause(mesh, row, axes, producer, user) or cause
    whole = new if row.source is Shard else old  # the larger of the two
    nbytes = replace(v, layout=whole).nbytes(mesh)
    for s in old.paddings() or new.paddings():  # what is sent is padded
        if not whole.shards(s.dim):
            nbytes = nbytes // v.shape[s.dim] * s.padded(v.shape[s.dim])
    return Collective(forward, backward, axes, nbytes, cause, not cause)


def _cause(mesh: Mesh, row: Conversion, axes: tuple[str, ...], producer: fx.Node, user: fx.Node) -> str:
    """Return the annotations behind a conversion: the producer's for sums, else the user's; or the other's if none."""
    if line := user.meta.get("spec_line"):  # an op that the spec inserted
        return str(line)
    first, second = (producer, user) if row.source is Partial else (user, producer)
    causes: list[str] = []
    for axis in mesh.digits(*axes):
        strategy = user.meta.get("strategies", {}).get(axis)
        unsplit = strategy is None or strategy.kind in ("replicate", "partial_grad", "partial")
        if row.forward == "all_gather" and unsplit:
            continue  # the op cannot be split, so no annotation is the cause
        for n in (first, second):
            why = n.meta.get("why", {}).get(axis, "")
            if why:
                causes.append(why)
                break
    return "; ".join(dict.fromkeys(causes))


def gather_note(value: str, axis: str, user: fx.Node) -> str:
    """Return a note on why a gather without an annotation is there. value: its type, with a parameter's name."""
    return (
        f"{user.meta.get('source') or user.name}: {value} is gathered over {axis}, because {_user_name(user)}"
        f" needs it whole there, but no annotation implies this{_fused_weight_hint(user, axis)}"
    )


def _user_name(user: fx.Node) -> str:
    """Return the name of a value's user: an op such as `aten.mm.default`, or the use at the step's end."""
    if user.op == "output":
        return "the buffer that it updates, or the caller that receives it beside the loss,"
    return full_op_name(user.target)


def _fused_weight_hint(user: fx.Node, axis: str) -> str:
    """Return a hint on how to split the parts of a fused weight whose result is taken apart, or ""."""
    if user.target is not torch.ops.aten.split_with_sizes.default or user.args[2:] in ((), (0,)):
        return ""  # dim 0 has rows of the batch, not features
    sizes: Any = user.args[1]
    how = f"split: {len(sizes)}" if len(set(sizes)) == 1 else f"sections: {list(sizes)}"
    return (
        f"; if this is a fused weight, split each of its parts: {{0: {{axis: {axis.partition('.')[0]}, {how}}}}}"
        " instead of `column`"
    )
