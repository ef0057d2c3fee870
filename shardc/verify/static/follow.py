"""Claim lines that are no op of the model: their claims follow from their operands'.

    x_sum = ops.all_reduce(x, mesh, ('tp',))     x holds a summand over tp of some value: x_sum holds all of it
    x_part = ops.shard(x_sum, mesh, 'tp', 0, 1)  and this a slice

So do casts, fills of padding, and sums over microbatches and ranks that the prologue made.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shardc.ir.graph import value_of
from shardc.ir.mesh import MICROBATCH
from shardc.ir.metadata import Value
from shardc.ir.placement import REPLICATE, Layout, Partial
from shardc.optional import table
from shardc.runtime import ops
from shardc.verify.static import bucket_reads
from shardc.verify.static.conversion_types import ROWS, WrongError, converted
from shardc.verify.static.same_values import SAME, frozen, misreads
from shardc.verify.static.statement import Claim

if TYPE_CHECKING:
    from shardc.verify.static.text import Text

aten = torch.ops.aten


def follow(text: Text, user: fx.Node, x: fx.Node, claim: Claim | None) -> None:
    """Claim a line that reads x (with this claim): a conversion, a cast, a sum, or a read of a parameter."""
    target = user.target
    if misreads(user):
        text.unfit[user] = "it reads bytes of 8-bit numbers, or statistics of a loss, as values"
    elif target is ops.total:
        _total(text, user)
    elif target in (ops.gather_start, ops.updated, ops.gather_wait):
        if bucket_reads.fetch(text, user):
            for reader in user.users:
                follow(text, reader, user, None)
    elif target is operator.getitem and user.args[0] in text.fetched:
        bucket_reads.parameter(text, user)
    elif target is aten.full.default:
        _number(text, user)
    elif claim is None or user.op != "call_function" or not user.args or user.args[0] is not x:
        return
    elif target in ROWS:
        try:
            text.claim(user, converted(user, claim, value_of(claim.of), text.mesh))
        except WrongError as e:
            text.unfit[user] = str(e)
    elif target in SAME:
        text.claim(user, claim)
    elif target is ops.all_reduce_max:
        _maximum(text, user, claim)
    elif target is ops.fill_padding:
        _fill(text, user, claim)
    elif target in table("proof", "FOLLOWED"):
        table("proof", "FOLLOWED")[target](text, user, claim)
    elif target is ops.cast_once:
        cast = text.model.cast(claim.of, user.args[2])
        if cast is not None:
            text.claim(user, replace(claim, of=cast))
    elif target is ops.summed:
        if claim.layout[MICROBATCH] == Partial():
            text.claim(user, _summed(text, claim, [MICROBATCH]))
        else:
            text.unfit[user] = "it adds up over microbatches what is no summand of them"
    elif target is aten._to_copy.default:
        _counted(text, user, claim)


def _fill(text: Text, node: fx.Node, claim: Claim) -> None:
    """Claim `fill_padding(x, mesh, dim, digits, size, padding, blocks, fill)` if all but `fill` fit x."""
    dim: Any = node.args[2]
    number: Any = node.args[7] if len(node.args) > 7 else 0.0
    shards = claim.layout.shards(dim)
    if shards:
        s, size = shards[0][1], value_of(claim.of).shape[dim]
        right = (tuple((a, t.signed) for a, t in shards), size, s.padding, s.blocks)
        if frozen(node.args[3:7], {}) == frozen(right, {}):
            fills = {(d, x) for d, x in claim.fills if d != dim} | {(dim, float(number))}
            text.claim(node, replace(claim, fills=frozenset(fills)))
            return
    text.unfit[node] = f"it fills the padding of another part than {claim.layout or 'the whole'}"


def _maximum(text: Text, node: fx.Node, claim: Claim) -> None:
    axes: Any = node.args[2]
    parts = text.mesh.digits(*axes)
    if all(claim.layout[p] == Partial("max") for p in parts):
        text.claim(node, _summed(text, claim, parts))


def _summed(text: Text, claim: Claim, axes: Sequence[str]) -> Claim:
    """Return the claim of what ranks or microbatches hold after a sum or maximum over these axes."""
    return replace(claim, layout=Layout.of(dict(claim.layout.items) | dict.fromkeys(axes, REPLICATE), text.mesh))


def _total(text: Text, node: fx.Node) -> None:
    """Claim a sum of the prologue over all microbatches, and over the axes that the line names."""
    number: Any = node.args[1]
    over: Any = node.args[2] if len(node.args) > 2 else ()
    if not isinstance(number, int) or number >= len(text.totals):
        text.wrong[node] = f"the prologue has no sum {number}"
        return
    for claim in text.totals[number]:
        parts = (MICROBATCH, *text.mesh.digits(*over))
        if late := [p for p in parts if claim.layout[p] != Partial()]:
            text.wrong[node] = f"over {', '.join(late)} it adds up what is no summand there"
        else:
            text.claim(node, _summed(text, claim, parts))


def _counted(text: Text, node: fx.Node, claim: Claim) -> None:
    """Claim a cast of truth values to numbers (so that a sum can add them among zeros), and a cast back."""
    value, dtype = value_of(claim.of), node.kwargs.get("dtype")
    back = {of: key[1] for key, of in text.model.others.items() if key[0] == "counted"}
    if value.dtype == torch.bool and dtype == torch.uint8 and text.model.cast(claim.of, dtype) is None:
        counted = text.model.stand_in(("counted", claim.of), replace(value, dtype=torch.uint8))
        text.claim(node, replace(claim, of=counted))
    elif claim.of in back and dtype == torch.bool:
        text.claim(node, replace(claim, of=back[claim.of]))


def _number(text: Text, node: fx.Node) -> None:
    """Claim a scalar constant, such as the number that is added to a sum of microbatches once."""
    dtype = node.kwargs.get("dtype")
    if isinstance(dtype, torch.dtype) and not node.args[0]:
        of = text.model.stand_in(("number", frozen(node.args[1], {})), Value((), dtype))
        text.claim(node, Claim(of, Layout()))
