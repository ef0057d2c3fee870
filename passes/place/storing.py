"""Move an axis's conversions to parameters and buffers; write strategies and causes to nodes.

Two linear layers of which the spec only says `up: column` (shardc.passes.place.one_axis):

    down, on tp    all uses need Shard(1), no annotation splits it  stored as Shard(1): a rank has only its part
    up, on dp      its use needs PartialGrad                        stored so: its gradient is summed at the parameter
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TypeGuard

from torch import fx

from shardc.ir.graph import calls, values_of
from shardc.ir.placement import PARTIAL_GRAD, REPLICATE, Partial, Placement, Shard
from shardc.passes.place.one_axis import Axis
from shardc.rules.core.strategy import needs_sum_grad


def write(axis: Axis) -> None:
    """Set the stored placements (`axis.stored`), and the nodes' `strategies` and `why` on this axis."""
    _move_gradient_sums(axis)
    _store_parameters(axis)
    _store_buffers(axis)
    for node, strategy in axis.chosen.items():
        node.meta["strategies"][axis.name] = strategy
    _explain(axis)


def _move_gradient_sums(axis: Axis) -> None:
    """Give replicated ops on parameters alone partial gradients if users need them: the sum moves to the parameters."""
    for node in reversed(list(calls(axis.program.graph))):
        replicated = node in axis.from_parameters and axis.chosen[node].kind == "replicate"
        if replicated and any(PARTIAL_GRAD in _needs(axis, node, i) for i in range(len(values_of(node)))):
            axis.chosen[node] = axis.choices[node].partial_grad


def _store_parameters(axis: Axis) -> None:
    """Store a parameter split if all its uses need the same split; with a partial gradient if a use needs that.

    A parameter of a running program (`Axis.running`) is only split as it is there.
    """
    for node, placement in axis.stored.items():
        if node not in axis.from_parameters or placement != REPLICATE:
            continue
        needs = _needs(axis, node)
        only = next(iter(needs)) if len(needs) == 1 else None
        if _can_store(only, axis, node) and axis.running.get(node.name, only) == only:
            axis.stored[node] = only
        elif needs_sum_grad(values_of(node)[0]) and (
            PARTIAL_GRAD in needs or (isinstance(only, Shard) and only.mirrored)
        ):
            axis.stored[node] = PARTIAL_GRAD


def _store_buffers(axis: Axis) -> None:
    """Store a buffer split if its uses need that, and its new value (if any) is produced so: channels' statistics."""
    for node, p in _buffers(axis):
        if axis.stored[node] == REPLICATE and _can_store(p, axis, node) and _needs(axis, node) == {p}:
            axis.stored[node] = p


def _can_store(placement: Placement | None, axis: Axis, node: fx.Node) -> TypeGuard[Shard]:
    """Return whether a stored tensor can have this placement: a shard, not mirrored, that fits those of other axes."""
    if not isinstance(placement, Shard) or placement.mirrored or axis.is_microbatch:
        return False
    layout = next(p.layout for p in axis.program.stored if p.name == node.name)
    return not layout.replace(axis.name, placement, axis.mesh).problem(values_of(node)[0].shape, axis.mesh)


def _needs(axis: Axis, node: fx.Node, i: int = 0) -> set[Placement]:
    """Return the placements that the users of a result need, looking through getitem."""
    users = {
        u
        for x in (node, *(u for u in node.users if u.target is operator.getitem))
        for u in x.users
        if u in axis.operands
    }
    reads = ((o, need) for u in users for o, need in zip(axis.operands[u], _inputs(axis, u), strict=True))
    return {need for o, need in reads if o == (node, i)}


def _inputs(axis: Axis, user: fx.Node) -> tuple[Placement, ...]:
    return (REPLICATE,) * len(axis.operands[user]) if user.op == "output" else axis.chosen[user].inputs


def _buffers(axis: Axis) -> Iterator[tuple[fx.Node, Placement]]:
    """Yield each buffer that the step updates, with the placement in which its new value is produced.

    Also each cache that a generating program only reads, with each placement that users need.
    """
    nodes = {n.name: n for n in axis.stored}
    returned = axis.operands[axis.program.graph.output_node()]  # loss, new values of buffers, outputs
    new_values = iter(returned[0 if axis.program.forward_only else 1 :])
    for b in axis.program.buffers:
        if b.updated:
            yield nodes[b.name], axis.available[next(new_values)][0]
        elif b.cache:
            yield from ((nodes[b.name], p) for p in _needs(axis, nodes[b.name]))


def _explain(axis: Axis) -> None:
    """Record the annotation behind each op's strategy: its weight's, else its first split operand's."""
    for node in axis.program.graph.nodes:
        why = node.meta.setdefault("why", {})
        if node.op == "placeholder":
            cause = node.meta.get("cause", {}).get(axis.name, "")
            if cause:
                why[axis.name] = cause
        elif node in axis.chosen:
            if axis.chosen[node].kind == "pin":
                why[axis.name] = node.meta["cause"].get(axis.name, "")
                continue
            reads = zip(axis.operands[node], axis.chosen[node].inputs, strict=True)
            sharded = [source for (source, _), need in reads if isinstance(need, Shard | Partial)]
            causes = [
                s.meta["why"][axis.name]
                for s in sorted(sharded, key=lambda s: s not in axis.from_parameters)
                if axis.name in s.meta["why"]
            ]
            if causes:
                why[axis.name] = causes[0]
