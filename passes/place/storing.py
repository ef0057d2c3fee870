"""Write an axis's placements back to parameters and buffers, with the annotation behind each.

Two linear layers of which the spec only says `up: column` (shardc.passes.place.one_axis):

    down, on tp    all uses need Shard(1), no annotation differs    stored as Shard(1): a rank has its part alone
    up, on dp      its use needs PartialGrad                        stored so: its gradient is summed at the parameter
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from shardc.ir.graph import values_of
from shardc.ir.placement import PARTIAL_GRAD, REPLICATE, Partial, Placement, Shard
from shardc.passes.place.one_axis import Axis
from shardc.rules.core.strategy import needs_sum_grad


def write(axis: Axis) -> None:
    """Write the chosen strategies to the graph's nodes."""
    _hoist(axis)
    for node, strategy in axis.chosen.items():
        node.meta["strategies"][axis.name] = strategy
    _explain(axis)


def _hoist(axis: Axis) -> None:
    """Store parameters and buffers as their uses need them: split, or with `sum_grad` moved up to them."""
    for node in reversed(list(axis.nodes())):
        plain = node in axis.from_parameters and axis.chosen[node].kind == "replicate"
        if plain and any(PARTIAL_GRAD in _needs(axis, node, i) for i in range(len(values_of(node)))):
            axis.chosen[node] = axis.choices[node].partial_grad
    for node, placement in axis.stored.items():
        if node in axis.from_parameters and placement == REPLICATE:
            needs = _needs(axis, node)
            v = values_of(node)[0]
            only = next(iter(needs)) if len(needs) == 1 else None
            whole = axis.running.get(node.name, only) != only
            if isinstance(only, Shard) and not (only.mirrored or axis.of_time or whole or _collides(axis, node, only)):
                axis.stored[node] = only
            elif needs_sum_grad(v) and (PARTIAL_GRAD in needs or (isinstance(only, Shard) and only.mirrored)):
                axis.stored[node] = PARTIAL_GRAD
    # statistics of split channels are stored split if they are produced and used so; read-only caches, as used
    for node, p in (*_updated_buffers(axis), *_read_caches(axis)):
        if (
            axis.stored[node] == REPLICATE
            and not axis.of_time
            and isinstance(p, Shard)
            and not p.mirrored
            and _needs(axis, node) == {p}
            and not _collides(axis, node, p)
        ):
            axis.stored[node] = p


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


def _updated_buffers(axis: Axis) -> Iterator[tuple[fx.Node, Placement]]:
    """Yield each buffer that the step updates, with the placement in which its new value is produced."""
    nodes = {n.name: n for n in axis.stored}
    news = axis.operands[axis.program.graph.output_node()][0 if axis.program.forward_only else 1 :]
    for b, new in zip((b for b in axis.program.buffers if b.updated), news, strict=False):
        yield nodes[b.name], axis.available[new][0]


def _read_caches(axis: Axis) -> Iterator[tuple[fx.Node, Placement]]:
    """Yield each cache of a generating model that no token changes, with each placement that users need."""
    nodes = {n.name: n for n in axis.stored}
    for b in axis.program.buffers:
        if b.cache and not b.updated:
            yield from ((nodes[b.name], p) for p in _needs(axis, nodes[b.name]))


def _collides(axis: Axis, node: fx.Node, placement: Shard) -> bool:
    layout = next(p.layout for p in axis.program.stored if p.name == node.name)
    return bool(layout.replace(axis.name, placement, axis.mesh).fits(values_of(node)[0].shape, axis.mesh))


def _explain(axis: Axis) -> None:
    """Record the annotation behind each op's strategy: a weight's first, else its split operand's."""
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
