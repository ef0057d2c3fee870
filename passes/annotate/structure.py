"""Choose the weights to split from the graph alone (`shard: {use: structure}`).

    before   fc: f32[256, 64]       out: f32[64, 256]         whole
    after    fc: f32[256@tp, 64]    out: f32[64, 256@tp]      a column- and a row-parallel layer (Shoeybi et al. 2019)

Each dim of a weight that a matrix product sums over, or that only the product's result has, is followed through the
graph (propagate_split.py). The result is a candidate if it is a group in which no value is needed both whole and split:
attention between its projections, an MLP, a gated MLP, a pair of convolutions, a head and its loss. Candidates that
share an op exclude each other; the one with more work per communicated byte wins. Last, tables that are looked up by
the batch's ids, and have at least as many rows as columns, are split by rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import fx

from shardc.errors import ShardcError
from shardc.ir.graph import is_call, operands_of, producer_of, source_of, values_of
from shardc.ir.patterns import siblings
from shardc.ir.placement import Shard
from shardc.ir.program import Program
from shardc.ir.types import op_name
from shardc.layer_names import of_every_layer
from shardc.passes.annotate import kv_heads
from shardc.passes.annotate.model_plan import Plan
from shardc.passes.annotate.propagate_split import Blocked, Follower, Key, SplitGroup, uses
from shardc.passes.annotate.weight_roles import unsplit_by
from shardc.rules.core.strategy import needs_sum_grad

aten = torch.ops.aten


def choose(
    program: Program, fixed: Mapping[str, Shard | None], axis: str, n: int, where: str, *, pad: bool = False
) -> Plan:
    """Choose the weights to split over an axis of n ranks, with notes on what was left whole.

    fixed: parameters that the user has placed (None = whole on this axis). A group that needs another split is left
    out. where: the spec's line, for causes. pad: sizes that n does not divide are split as well, and padded. Raises
    ShardcError if there is nothing to split.
    """
    follower = Follower(program)
    chosen: dict[str, tuple[Shard, str]] = {}
    indivisible: dict[str, None] = {}  # notes on weights that are left whole, once for equal layers
    without_rule: dict[str, dict[str, None]] = {}  # ops whose weights no rule splits -> modules
    taken: set[fx.Node] = set()
    shared = kv_heads.shared(program.graph)
    stops: list[Blocked] = []
    for group in _ranked(follower, _candidates(follower, program, stops)):
        if taken.isdisjoint(group.ops) and all(fixed.get(p.name, s) == s for p, s in group.params.items()):
            taken |= group.ops.keys()
            if note := "" if pad else _uneven(program, group, shared, axis, n):
                indivisible[note] = None
                continue
            why = f"{where} use: structure '{_described(group)}'"
            chosen |= {p.name: (s, why) for p, s in group.params.items() if p.name not in fixed}
    for p in program.params:
        if p.name in chosen or p.name in fixed:
            continue
        node = follower.placeholders[p.name]
        if taken.isdisjoint(node.users) and _is_vocabulary(follower, node):
            if p.shape[0] % n and not pad:
                indivisible[f"{p.fqn} is left whole: its {p.shape[0]} rows are not divisible by {axis}={n}"] = None
            else:
                chosen[p.name] = (Shard(0), f"{where} use: structure '{p.fqn}: vocabulary'")
        elif len(p.shape) > 1 and (op := unsplit_by(node)):
            without_rule.setdefault(op, {})[of_every_layer(p.fqn.rpartition(".")[0] or p.fqn)] = None
    if not chosen and not fixed:
        why = "; ".join(indivisible)
        fix = f"choose another number of ranks for {axis}, or set `uneven: pad`"
        if not why:
            why = f"no weight's split can be followed to another weight, or to the loss{_places(stops)}"
            fix = "name the weights by patterns: values that are needed whole are then gathered"
        raise ShardcError(f"`use: structure` finds nothing to split: {why}", where=where, fix=fix)
    left_whole = [f"{note} (`uneven: pad` splits it)" for note in indivisible]
    for op, modules in without_rule.items():
        left_whole.append(f"{', '.join(modules)} left whole: no rule splits a weight of {op}")
    return Plan(axis, chosen, tuple(f"{where} use: structure: {note}" for note in left_whole))


def _places(stops: list[Blocked]) -> str:
    """Return the first ops that stopped a split, with the user's lines."""
    places: dict[str, str] = {}
    for stop in stops:
        source = source_of(stop.node)
        if stop.node.op == "call_function" and source.line:
            module = f" in {source.module}" if source.module else ""
            places.setdefault(f"{op_name(stop.node.target)}{module} ({source.line})", stop.why)
    shown = [f"{place} {why}" for place, why in list(places.items())[:2]]
    more = f"; and {len(places) - 2} more" if len(places) > 2 else ""
    return f": {'; '.join(shown)}{more}" if shown else ""


def _candidates(follower: Follower, program: Program, stops: list[Blocked]) -> Iterator[SplitGroup]:
    """Yield a group for each dim of each weight of a product, once. stops: receives what blocked others."""
    seen: set[tuple[Key, Shard]] = set()
    for node in program.graph.nodes:
        if node not in _products(follower, [node]):
            continue
        for i, t in enumerate(operands_of(node)):
            key = producer_of(t)
            if key[0] not in follower.derived:
                continue
            for d in range(len(values_of(key[0])[key[1]].shape)):
                start = (key, Shard(d))
                if start in seen or follower.by_operand(node, i, Shard(d)) is None:
                    continue
                group = follower.follow(*start)
                if isinstance(group, Blocked):
                    stops.append(group)
                    continue
                seen |= set(group.values.items())
                if _worthwhile(follower, group):
                    yield group


def _products(follower: Follower, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the matrix products and convolutions among some nodes."""
    return [n for n in nodes if is_call(n) and follower.choices(n).rule.flops is not None]


def _worthwhile(follower: Follower, group: SplitGroup) -> bool:
    """Return whether a group has two products, or splits a matrix along its longest dim, such as a vocabulary.

    Splitting a small head alone sums more than it saves.
    """
    products = [
        n for n in _products(follower, group.ops) if any(producer_of(t)[0] in follower.derived for t in operands_of(n))
    ]
    shapes = [(values_of(p)[0].shape, s.dim) for p, s in group.params.items()]
    return len(products) > 1 or any(len(shape) > 1 and shape[d] == max(shape) for shape, d in shapes)


def _ranked(follower: Follower, groups: Iterator[SplitGroup]) -> list[SplitGroup]:
    """Sort groups by work per byte, most first; equal ones keep the order of the graph."""

    def density(group: SplitGroup) -> float:
        moved = group.bytes()
        return follower.flops(group) / moved if moved else float("inf")

    return sorted(groups, key=density, reverse=True)


def _uneven(program: Program, group: SplitGroup, shared: Mapping[fx.Node, kv_heads.Shared], axis: str, n: int) -> str:
    """Return why a group cannot be split over n ranks, or "". Ranks may share key-value heads."""
    shareable = {shared[p].heads for p in group.params if p in shared and shared[p].shareable(n)}
    for (node, i), s in group.values.items():
        shape = values_of(node)[i].shape
        for size in s.sections or (shape[s.dim] // s.split,):
            if size % n and size not in shareable:
                names = ", ".join(dict.fromkeys(of_every_layer(program.param(p.name).fqn) for p in group.params))
                source = source_of(node)
                place = f"at {replace(source, module=of_every_layer(source.module))}, " if str(source) else ""
                return f"{names} are left whole: {place}{size} (of {list(shape)}) is not divisible by {axis}={n}"
    return ""


def _is_vocabulary(follower: Follower, node: fx.Node) -> bool:
    """Return whether a table is looked up by ids of the batch, and has at least as many rows as columns."""
    shape, lookups = values_of(node)[0].shape, list(uses((node, 0)))
    if len(shape) != 2 or shape[0] < shape[1] or not lookups:
        return False
    for user, i in lookups:
        if user.target is not aten.embedding.default or i != 0 or follower.by_operand(user, 0, Shard(0)) is None:
            return False
        if producer_of(operands_of(user)[1])[0] in follower.constant:
            return False
    return True


def _described(group: SplitGroup) -> str:
    """Return a group's description: from the modules that begin it to those that end it."""
    reads = (
        u for key in group.entries if needs_sum_grad(values_of(key[0])[key[1]]) for u, _ in uses(key) if u in group.ops
    )
    ins = dict.fromkeys(source_of(u).module or u.name for u in reads)
    outs = dict.fromkeys(source_of(node).module or node.name for node, _ in group.exits)
    return f"{_first_names(ins, 'input')} -> {_first_names(outs, 'loss')}"


def _first_names(names: Iterable[str], none: str) -> str:
    """Return the first of some names and its siblings: `attn.{q,k,v}`; `...` for those of other modules.

    none: what to return if there are no names.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        groups.setdefault(parent, []).append(last)
    for parent, lasts in groups.items():
        return siblings(parent, lasts) + (", ..." if len(groups) > 1 else "")
    return none
