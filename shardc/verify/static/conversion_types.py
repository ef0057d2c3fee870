"""Compute the claim of a conversion's result from its row of the table, its axes and its digits."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

from torch import fx

from shardc.ir.conversions import BY_OP, Conversion
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Value
from shardc.ir.placement import PARTIAL, PARTIAL_GRAD, REPLICATE, Layout, Partial, PartialGrad, Placement, Shard
from shardc.optional import table
from shardc.runtime import ops
from shardc.verify.static.statement import NAMES, Claim, normal, on_axis

#: Row of the table, by the conversion's function.
ROWS: dict[Any, Conversion] = {getattr(ops, row.op): row for row in BY_OP.values()}
_PLAIN: dict[type, Placement] = {type(p): p for p in (REPLICATE, PARTIAL, PARTIAL_GRAD)}


class WrongError(Exception):
    """A conversion does not fit its operand."""


def converted(node: fx.Node, claim: Claim, value: Value, mesh: Mesh) -> Claim:
    """Return the claim of a conversion's result. Raises WrongError if the operand or digits do not fit.

    claim: of its operand; value: what the operand is a part of, with its global shape.
    """
    row, over, digits = ROWS[node.target], node.args[2], tuple(node.args[3:])
    sent: Any = node.kwargs.get("fp8")
    if sent is not None:
        packed = table("ops", "PACKED").get(claim.of.target)
        if row.forward != "all_gather" or packed is None or packed(*claim.of.args) != (sent[0], tuple(sent[1])):
            raise WrongError(f"{row.op} sends 8 bits of what is not rounded to {sent}")
    axes: Any = over if isinstance(over, tuple | list) else (over,)
    try:
        parts = mesh.digits(*axes)
    except KeyError:
        raise WrongError(f"the mesh has no axis {over!r}") from None
    for part in parts:
        p = claim.layout[part]
        no_gradient = row.source is PartialGrad and p == REPLICATE == on_axis(PARTIAL_GRAD, value)
        if not isinstance(p, row.source) and not no_gradient:
            raise WrongError(f"{row.op} over {part} takes {NAMES[row.source]}, and its operand is {NAMES[type(p)]}")
        if isinstance(p, Partial) and p.op != "sum":
            raise WrongError(f"{row.op} over {part} adds up what is to be a maximum")
    if row.source is not Shard and row.target is not Shard:
        if digits:
            raise WrongError(f"{row.op} cuts nothing, and names the digits {digits}")
        new = Layout.of(dict(claim.layout.items) | dict.fromkeys(parts, _PLAIN[row.target]), mesh)
        return replace(claim, layout=normal(new, value))
    (axis,) = axes
    for new in _candidates(row, axis, claim.layout, digits, mesh):
        if _digits(axis, claim.layout, new, mesh) == digits and not new.problem(value.shape, mesh):
            return Claim(claim.of, normal(new, value), _zeros(claim, new))
    raise WrongError(f"{row.op} names the digits {digits}: no part of a value that is {claim.layout or 'whole'}")


def _zeros(claim: Claim, new: Layout) -> frozenset[tuple[int, float]]:
    """Return what padding holds: zeros where a slice or scatter adds it, and as before on other dims."""
    before, padded = ({s.dim for s in layout.paddings()} for layout in (claim.layout, new))
    return frozenset({(d, x) for d, x in claim.fills if d in padded} | {(d, 0.0) for d in padded - before})


def _candidates(row: Conversion, axis: str, old: Layout, digits: Sequence[Any], mesh: Mesh) -> Iterator[Layout]:
    """Yield the layouts to which a conversion of one axis can lead."""
    if row.target is not Shard:
        yield old.replace(axis, _PLAIN[row.target], mesh)
        return
    at, rest = (2, digits[4:]) if row.source is Shard else (0, digits[3:])  # sections come before the rest
    if len(digits) < at + 2:
        return
    dim, split = digits[at : at + 2]
    sections = tuple(digits[2]) if at == 0 and len(digits) > 2 else ()
    without = old.replace(axis, REPLICATE, mesh)
    shards = sorted(without.shards(dim), key=lambda item: item[1].split)
    outer = accumulate((mesh.size(a) for a, _ in shards), operator.mul, initial=1)
    paddings = dict.fromkeys([tuple(rest[-2:]) or (0, 1), *((s.padding, s.blocks) for _, s in shards)])
    for (padding, blocks), parts in product(paddings, outer):
        yield without.replace(axis, Shard.of_signed(dim, split * parts, sections, padding, blocks), mesh)


def _digits(axis: str, old: Layout, new: Layout, mesh: Mesh) -> tuple[Any, ...]:
    """Return the arguments that name the digits which a conversion joins and cuts.

    (dim, split of the local tensor) for each side that is a shard; its sections if only one side is; (padding, blocks)
    that are added or removed, if any side is padded.
    """
    first = mesh.digits(axis)[0]
    sides = [(s, a, b) for a, b in ((old, new), (new, old)) if isinstance(s := a[first], Shard)]
    digits: list[Any] = [x for s, layout, _ in sides for x in (s.dim, layout.local_split(first, mesh))]
    digits += [s.sections for s, _, _ in sides if len(sides) == 1]
    for s, _, other in sides if any(s.padding for s, _, _ in sides) else ():
        still = any(a not in mesh.digits(axis) for a, _ in other.shards(s.dim))
        digits += [0, 1] if still else [s.padding, s.blocks]
    return tuple(digits)
