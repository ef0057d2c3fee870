"""Claim lines that are no op of the model: their claims follow from their operands'.

    x_sum = ops.all_reduce(x, mesh, ('tp',))     x holds a summand over tp of some value: x_sum holds all of it
    x_part = ops.shard(x_sum, mesh, 'tp', 0, 1)  and this a slice

So do casts, fills of padding, sums over microbatches and ranks that the prologue made, and reads of buckets:

    g = ops.gather_start([w, b], 'bucket0', mesh)    ZeRO 3: the parts of all ranks
    t = ops.gather_wait(g)
    w_whole = t[0]                                   holds what w does, whole on the data axis

If a parameter is rounded before it is gathered, all its readers in the model must round it in the same way.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shardc.ir.graph import producer_of, value_of
from shardc.ir.mesh import MICROBATCH
from shardc.ir.placement import REPLICATE, Layout, Partial
from shardc.optional import needed, table
from shardc.runtime import ops
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
        if _fetched(text, user):
            for reader in user.users:
                follow(text, reader, user, None)
    elif target is operator.getitem and user.args[0] in text.fetched:
        _parameter(text, user)
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
        _summed(text, user, claim, text.mesh.digits(*user.args[2]), "max")  # type: ignore[misc]
    elif target is ops.fill_padding:
        _fill(text, user, claim)
    elif target in table("proof", "FOLLOWED"):
        table("proof", "FOLLOWED")[target](text, user, claim)
    elif target is ops.cast_once:
        cast = text.model.cast(claim.of, user.args[2])
        if cast is not None:
            text.claim(user, replace(claim, of=cast))
    elif target is ops.summed:
        if _summed(text, user, claim, [MICROBATCH]):
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


def _summed(text: Text, node: fx.Node, claim: Claim, axes: Sequence[str], op: str = "sum") -> list[str]:
    """Claim a sum or maximum over ranks or microbatches; return the axes on which its operand is no summand."""
    late = [a for a in axes if claim.layout[a] != Partial(op)]
    layout = Layout.of(dict(claim.layout.items) | dict.fromkeys(axes, REPLICATE), text.mesh)
    if not late:
        text.claim(node, replace(claim, layout=layout))
    return late


def _total(text: Text, node: fx.Node) -> None:
    """Claim a sum of the prologue over all microbatches, and over the axes that the line names."""
    number: Any = node.args[1]
    over: Any = node.args[2] if len(node.args) > 2 else ()
    if not isinstance(number, int) or number >= len(text.totals):
        text.wrong[node] = f"the prologue has no sum {number}"
        return
    for claim in text.totals[number]:
        if late := _summed(text, node, claim, (MICROBATCH, *text.mesh.digits(*over))):
            text.wrong[node] = f"over {', '.join(late)} it adds up what is no summand there"


def _counted(text: Text, node: fx.Node, claim: Claim) -> None:
    """Claim a cast of truth values to numbers (so that a sum can add them among zeros), and a cast back."""
    of, dtype, counts = claim.of, node.kwargs.get("dtype"), text.model.counts
    value = value_of(of)
    if value.dtype == torch.bool and dtype == torch.uint8 and text.model.cast(of, dtype) is None:
        if of not in counts:
            counts[of] = text.model.added(node.target, (of,), {"dtype": dtype}, replace(value, dtype=torch.uint8))
        text.claim(node, replace(claim, of=counts[of]))
    elif dtype == torch.bool and of in counts.values():
        (truth,) = of.all_input_nodes
        text.claim(node, replace(claim, of=truth))


def _fetched(text: Text, node: fx.Node) -> bool:
    """Check a line that makes a bucket's parameters whole on the data axis. Return whether it is one."""
    args: Any = (*node.args, None, None)
    first, name, *_ = args
    if node.target is ops.gather_wait:
        if not isinstance(first, fx.Node) or first not in text.fetched:
            return False
        text.fetched[node] = text.fetched[first]
    else:
        names = tuple(getattr(x, "name", "") for x in first) if isinstance(first, tuple | list) else ()
        bucket = {f"bucket{i}": b for i, b in enumerate(text.model.program.buckets)}.get(name)
        if bucket is None or bucket.params != names:
            members = ", ".join(bucket.params) if bucket else "none"
            text.wrong[node] = f"{name} has other parameters: {members}"
            return False
        if node.target is not (ops.gather_start if bucket.zero == 3 else ops.updated):
            text.wrong[node] = f"{name} is at zero {bucket.zero}"
            return False
        text.fetched[node] = first, bucket
    text.explained.add(node)
    return True


def _parameter(text: Text, node: fx.Node) -> None:
    """Claim a line that reads one parameter of a bucket, in the bucket's compute dtype."""
    behind, index = producer_of(node)
    if behind.target is ops.gather_start:
        text.wrong[node] = "it reads a bucket that is still on its way"
        return
    sources, bucket = text.fetched[behind]
    source = sources[index]
    for claim in text.given.get(source, ()):
        of = claim.of if bucket.compute is None else text.model.cast(claim.of, bucket.compute)
        if of is None:
            text.wrong[node] = f"the model has no cast of {source.name} to {bucket.compute}"
        elif not bucket.rounded:
            text.claim(node, replace(claim, of=of))
        else:
            needed("fp8", "proof", "rounded")(text, node, replace(claim, of=of), bucket.rounded[index])
