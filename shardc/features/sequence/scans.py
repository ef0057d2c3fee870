"""Split ops that need all tokens of a split sequence by another dim, where gathers cost more.

The scan of a state space, a loop over tokens or over chunks, a sort, a roll: no rule splits these ops by their tokens.
For one such op alone, gathering its operand is cheaper than changing the split. Together they may be independent over
another dim: channels, heads or rows. Then an all_to_all makes the tokens whole and splits that dim, each rank computes
its share, and an all_to_all leads back. For attention, `method: ulysses` does the same.

    before   h0 = b[:, :, 0]                       a, b: f32[8, 128, 16@cp]   an all_reduce fetches each token from its
             h1 = a[:, :, 1] * h0 + b[:, :, 1]                                 rank; every rank computes all of the scan
    after    the same ops                          a, b: f32[8, 128@cp, 16]   one all_to_all of a and b before

1. Placement runs as usual. Ops that it left whole, though they come from a value with split tokens, are grouped into
   connected *regions* (`_regions`).
2. The *ways* to run a region are listed (`_ways`). A way takes one of the two largest values that the region reads,
   splits it by one of its other dims, and follows this split through the region (`_follow`). Ops that cannot keep it
   are left to placement; values that it does not reach (shared by all channels) are whole, and gathered once. The last
   way is to gather once what the ops would read token by token.
3. Placement runs again with the strategies of each way decided, and the cheapest is taken, by bytes and by repeated
   work. Equal regions, as of equal layers, are decided together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from shardc.ir.graph import source_of, values_of
from shardc.ir.placement import REPLICATE, Partial, Placement, Shard
from shardc.passes.place.one_axis import Axis, Key
from shardc.rules.core.along_split_dim import ALONG_SPLIT_DIM
from shardc.rules.core.strategy import Strategy

#: Strategies that read single entries of a split dim, as sums over ranks.
_ONE_BY_ONE = ("owner", "entries")
#: A kind of region is tried if it costs at least this share of the whole placement.
_LEAST = 0.01
#: How many of a region's values are tried as the one that decides the dim of the split.
_SEEDS = 2


@dataclass(frozen=True)
class ScanRegion:
    """Connected ops, in the graph's order, that placement left whole on every rank.

    reads: the values that the region reads, the largest first, each with the split of its tokens.
    """

    nodes: tuple[fx.Node, ...]
    reads: tuple[tuple[Key, Shard], ...]

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for equal regions."""
        return tuple((n.target, values_of(n)) for n in self.nodes)


#: A way to run a region: an index in its `reads`, and the shard of that value. None: all its ops are whole.
Way = tuple[int, Shard] | None


def split_by_other_dims(axis: Axis, token_axes: set[str]) -> tuple[Axis, list[str]]:
    """Find the cheapest way to run each region. Return the axis placed with these, and notes.

    token_axes: all axes of the sequence.
    """
    free_splits = _free_splits(axis, token_axes)
    kinds: dict[tuple[object, ...], list[ScanRegion]] = {}
    for region in _regions(axis):
        kinds.setdefault(region.kind, []).append(region)
    notes: list[str] = []
    for regions in kinds.values():
        best, lowest, taken = axis, axis.price(), None
        if sum(axis.price(set(region.nodes)) for region in regions) < _LEAST * lowest:
            continue
        per_region = [dict(_ways(axis, region, free_splits)) for region in regions]
        for way in per_region[0]:
            if all(way in ways for ways in per_region):
                ops = {node: s for ways in per_region for node, s in ways[way].items()}
                tried = axis.choose_with({**axis.decided, **ops})
                if (price := tried.price()) < lowest * (1 - 1e-9):
                    best, lowest, taken = tried, price, way
        axis = best
        if taken is not None:
            notes += [_note(axis, region, taken) for region in regions]
    return axis, notes


def _note(axis: Axis, region: ScanRegion, way: tuple[int, Shard]) -> str:
    read, shard = way
    (node, i), _ = region.reads[read]
    v = values_of(node)[i]
    return (
        f"{source_of(region.nodes[0])}: {len(region.nodes)} ops read tokens of other ranks; over {axis.name} they are"
        f" split by dim {shard.dim} of {v} instead of the sequence, by all_to_all"
    )


def _regions(axis: Axis) -> list[ScanRegion]:
    """Return the connected ops that placement left whole though they come from values with split tokens."""
    split: dict[Key, Shard] = {}  # values whose tokens are split, or could be if their users did not need all
    group: dict[fx.Node, fx.Node] = {}  # a forest: another op of the same region for each op
    reads: dict[fx.Node, list[Key]] = {}

    def root(node: fx.Node) -> fx.Node:
        while group[node] is not node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    for node, strategy in axis.chosen.items():
        operands = axis.operands[node]
        for o in operands:
            if isinstance(p := axis.available[o][0], Shard):
                split[o] = p
        if any(isinstance(p, Shard) for p in strategy.outputs) or node in axis.decided:
            continue
        within = [source for source, _ in operands if source in group]
        begins = [o for o, need in zip(operands, strategy.inputs, strict=True) if _needs_all(o, split, need, strategy)]
        if begins and not within and (kept := _keeps(axis, node, split)) is not None:
            split |= {(node, i): p for i, p in enumerate(kept.outputs) if isinstance(p, Shard)}
        elif begins or within:
            group[node], reads[node] = node, begins
            for other in within:
                group[root(other)] = node
    by_root: dict[fx.Node, list[fx.Node]] = {}
    for node in group:
        by_root.setdefault(root(node), []).append(node)
    regions = []
    for nodes in by_root.values():
        first = {o: split[o] for node in nodes for o in reads[node]}
        ordered = sorted(first.items(), key=lambda read: -axis.size(read[0]))
        regions.append(ScanRegion(tuple(nodes), tuple(ordered)))
    return regions


def _needs_all(operand: Key, split: dict[Key, Shard], need: Placement, strategy: Strategy) -> bool:
    """Return whether an op needs a split float value whole, or single entries. (Integers are small.)"""
    node, i = operand
    placement = split.get(operand)
    is_float = values_of(node)[i].dtype.is_floating_point
    return placement is not None and is_float and (need != placement or strategy.kind in _ONE_BY_ONE)


def _keeps(axis: Axis, node: fx.Node, split: dict[Key, Shard]) -> Strategy | None:
    """Return the strategy by which an op keeps the split of tokens; None if it has none."""
    choices, operands = axis.choices[node], axis.operands[node]
    strategies = [s for i, o in enumerate(operands) if o in split and (s := choices.from_operand(i, split[o], axis.n))]
    if choices.rule.extra is not None:
        available: list[frozenset[Placement]] = [frozenset({split.get(o, REPLICATE)}) for o in operands]
        strategies += [s for s in choices.rule.extra(choices.call, axis.n, available) if s.kind == ALONG_SPLIT_DIM]
    for s in strategies:
        matches = all(split.get(o, need) == need for o, need in zip(operands, s.inputs, strict=True))
        if matches and all(isinstance(p, Shard) for p in s.outputs) and axis.fits(node, s):
            return s
    return None


def _ways(
    axis: Axis, region: ScanRegion, free_splits: tuple[int, ...]
) -> Iterator[tuple[Way, dict[fx.Node, Strategy]]]:
    """Yield the other ways to run a region, each with the strategies of its ops. free_splits: see `_free_splits`."""
    now = axis.price(set(region.nodes))
    known: list[dict[fx.Node, Strategy]] = []
    for read, (seed, seed_shard) in enumerate(region.reads[:_SEEDS]):
        v = values_of(seed[0])[seed[1]]
        dims = [d for d in range(len(v.shape)) if d != seed_shard.dim]
        for shard in (Shard(d, split) for d in dims for split in _possible_splits(axis, seed, d, free_splits)):
            # not worth trying: the all_to_all of this value alone costs twice the region as it is now
            if axis.prices.transfer(v, seed_shard, shard, axis.size(seed)) > 2 * now:
                continue
            ops = _follow(axis, region, seed, shard)
            if ops and ops not in known:
                known.append(ops)
                yield (read, shard), ops
    # partition adds the note about the gather
    yield None, {n: axis.choices[n].replicate for n in region.nodes}


def _possible_splits(axis: Axis, operand: Key, dim: int, free_splits: tuple[int, ...]) -> list[int]:
    """Return the possible `Shard.split`s in a dim: the digit below those of other axes, or `free_splits`."""
    size, taken = values_of(operand[0])[operand[1]].shape[dim], axis.taken(operand, dim)
    candidates = (taken,) if taken > 1 else free_splits
    return [split for split in candidates if size % (split * axis.n) == 0]


def _free_splits(axis: Axis, token_axes: set[str]) -> tuple[int, ...]:
    """Return the `Shard.split`s to try in a dim that no axis splits yet.

    They leave room for axes that may split it too: those of weights and of the sequence; those of weights; none.
    """
    params = axis.program.params
    weights = {a for p in params for a, s in p.layout.items if isinstance(s, Shard) and a not in token_axes}
    ranks = math.prod(axis.mesh.size(a) for a in weights)
    others = math.prod(axis.mesh.size(a) for a in token_axes if a != axis.name)
    return tuple(dict.fromkeys((ranks * others, ranks, 1)))


def _follow(axis: Axis, region: ScanRegion, seed: Key, shard: Shard) -> dict[fx.Node, Strategy]:
    """Return the strategies that ops get if one value's split is followed to its users and producers.

    What the split does not reach is whole. Ops that cannot keep it, and those after them, are left to placement.
    """
    placed: dict[Key, Placement] = {seed: shard}
    wanted: dict[Key, Placement] = {}
    split: dict[fx.Node, Strategy] = {}
    left: set[fx.Node] = set()
    reads, within = {o for o, _ in region.reads}, set(region.nodes)
    before = -1
    while before != len(split) + len(left):
        before = len(split) + len(left)
        for node in region.nodes:
            operands = axis.operands[node]
            if node in split or node in left:
                continue
            if any(source in left for source, _ in operands):
                left.add(node)
                continue
            strategy = _reached(axis, node, placed, wanted)
            if strategy is None and any(isinstance(placed.get(o), Shard) for o in operands):
                left.add(node)
            if strategy is None:
                continue
            for o, need in zip(operands, strategy.inputs, strict=True):
                if isinstance(need, Shard):  # an op of the region that has no strategy yet may make it so
                    undecided = o[0] in within and o[0] not in split and o not in reads
                    (wanted if undecided else placed)[o] = need
            placed |= {(node, i): p for i, p in enumerate(strategy.outputs)}
            split[node] = strategy
    rest = {n: axis.choices[n].partial_grad for n in region.nodes if n not in split and n not in left}
    return {**split, **rest} if split else {}


def _reached(axis: Axis, node: fx.Node, placed: dict[Key, Placement], wanted: dict[Key, Placement]) -> Strategy | None:
    """Return how an op keeps the split of an operand, or makes a wanted result split; None if it cannot."""
    choices, operands = axis.choices[node], axis.operands[node]
    split = [(i, p) for i, o in enumerate(operands) if isinstance(p := placed.get(o), Shard)]
    if split:
        strategies = [choices.from_operand(*split[0], axis.n)]
    else:
        results = range(len(choices.call.results))
        strategies = [choices.from_result(i, p, axis.n) for i in results if (p := wanted.get((node, i))) is not None]
    for s in strategies:
        if s is None or any(isinstance(p, Partial) for p in s.outputs) or not axis.fits(node, s):
            continue
        if all(
            not isinstance(p := placed.get(o), Shard) or p == need for o, need in zip(operands, s.inputs, strict=True)
        ):
            return s
    return None
