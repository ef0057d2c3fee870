"""What reads a whole sequence that ranks split, token after token: it is split by another dim instead.

The scan of a state space, a loop over tokens or over chunks, a sort, a roll: no rule splits these ops by their tokens.
One by one, each would rather have its operand gathered than be the only one that is split otherwise. Together they may
be independent over another dim, the channels, heads or rows: then an all_to_all makes the tokens whole and splits that
dim, each rank computes its share, and an all_to_all leads back. For attention that is what `method: ulysses` does.

    before   h0 = a[:, :, 0] * 0 + b[:, :, 0]      a, b: f32[8, 128, 16@cp]   each rank has a sum of every token, and
             h1 = a[:, :, 1] * h0 + b[:, :, 1]                                 computes all of the scan
    after    the same ops                          a, b: f32[8, 128@cp, 16]   turned once, by all_to_all

1. Placement runs as ever. What it left whole, though it comes from a value whose tokens are split, is grouped into
   *regions* of ops that hang together (`_regions`).
2. Of what a region reads, each dim is tried: does every op that it reaches keep the split (`_follow`)? What it does not
   reach (inputs that all channels share) is whole on every rank, and gathered once.
3. Placement runs again with these strategies decided, and the cheapest is taken: by bytes, and by work that ranks
   repeat. To gather once what the ops would read token by token is tried, too. Regions that are alike, those of equal
   layers, are decided together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from shardc.ir.graph import source_of, values_of
from shardc.ir.placement import REPLICATE, Partial, Placement, Shard
from shardc.passes.place.one_axis import Axis, Key
from shardc.passes.place.transfer_cost import transfer
from shardc.rules.strategy import Strategy
from shardc.rules.stretches import STRETCHES

#: Strategies that read single entries of a split dim, as sums over ranks.
_ONE_BY_ONE = ("owner", "entries")
#: A kind of region is looked at if it costs this share of all that placement priced.
_LEAST = 0.01
#: Of what a region reads, so many values are tried as the one that says by which dim it is split.
_SEEDS = 2


@dataclass(frozen=True)
class Region:
    """Ops, in the graph's order, that placement left whole on every rank; reads: the values that they begin with, and
    how those are split, or may be, the largest first.
    """

    nodes: tuple[fx.Node, ...]
    reads: tuple[tuple[Key, Shard], ...]

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for regions that are alike."""
        return tuple((n.target, values_of(n)) for n in self.nodes)


#: A way to run a region: what says so (an operand's number and dim; None: whole), and the strategies of its ops.
Way = tuple[tuple[int, int] | None, dict[fx.Node, Strategy]]


def split_otherwise(axis: Axis, tokens: set[str]) -> tuple[Axis, list[str]]:
    """Decides the regions of an axis of the sequence that has been placed; returns it placed anew, and notes. tokens:
    all axes of the sequence.
    """
    inner = _ranks_of_weights(axis, tokens)
    kinds: dict[tuple[object, ...], list[Region]] = {}
    for region in _regions(axis):
        kinds.setdefault(region.kind, []).append(region)
    notes: list[str] = []
    for regions in kinds.values():
        best, lowest, taken = axis, axis.price(), None
        if sum(axis.price(set(region.nodes)) for region in regions) < _LEAST * lowest:
            continue
        every = [dict(_ways(axis, region, inner)) for region in regions]
        for name in every[0]:
            if all(name in ways for ways in every):
                ops = {node: s for ways in every for node, s in ways[name].items()}
                tried = axis.choose_with({**axis.decided, **ops})
                if (price := tried.price()) < lowest * (1 - 1e-9):
                    best, lowest, taken = tried, price, name
        axis = best
        if taken is not None:
            notes += [_note(axis, region, taken) for region in regions]
    return axis, notes


def _note(axis: Axis, region: Region, name: tuple[int, int]) -> str:
    number, dim = name
    (node, i), _ = region.reads[number]
    v = values_of(node)[i]
    return (
        f"{source_of(region.nodes[0])}: {len(region.nodes)} ops read tokens of other ranks; over {axis.name} they are"
        f" split by dim {dim} of {v} instead of the sequence, by all_to_all"
    )


def _regions(axis: Axis) -> list[Region]:
    """What placement left whole though it comes from values whose tokens are split, in parts that hang together."""
    split: dict[Key, Shard] = {}  # values that are split, or may be
    group: dict[fx.Node, fx.Node] = {}  # a forest: of each op another one of its region
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
        begins = [o for o, need in zip(operands, strategy.inputs, strict=True) if _leaves(o, split, need, strategy)]
        if begins and not within and (kept := _keeps(axis, node, split)) is not None:
            split |= {(node, i): p for i, p in enumerate(kept.outputs) if isinstance(p, Shard)}
        elif begins or within:
            group[node], reads[node] = node, begins
            for other in within:
                group[root(other)] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in group:
        found.setdefault(root(node), []).append(node)
    regions = []
    for nodes in found.values():
        first = {o: split[o] for node in nodes for o in reads[node]}
        ordered = sorted(first.items(), key=lambda read: -axis.size(read[0]))
        regions.append(Region(tuple(nodes), tuple(ordered)))
    return regions


def _leaves(operand: Key, split: dict[Key, Shard], need: Placement, strategy: Strategy) -> bool:
    """Whether a split value is read whole, or one entry of it. Numbers only: ids are a few bytes."""
    node, i = operand
    made = split.get(operand)
    numbers = values_of(node)[i].dtype.is_floating_point
    return made is not None and numbers and (need != made or strategy.kind in _ONE_BY_ONE)


def _keeps(axis: Axis, node: fx.Node, split: dict[Key, Shard]) -> Strategy | None:
    """The strategy by which an op would go on with tokens that are split; None if it has none."""
    choices, operands = axis.choices[node], axis.operands[node]
    found = [s for i, o in enumerate(operands) if o in split and (s := choices.from_operand(i, split[o], axis.n))]
    if choices.rule.extra is not None:
        available = [frozenset({split[o]} if o in split else {REPLICATE}) for o in operands]
        found += [s for s in choices.rule.extra(choices.call, axis.n, available) if s.kind == STRETCHES]
    for s in found:
        so = all(split.get(o, need) == need for o, need in zip(operands, s.inputs, strict=True))
        if so and all(isinstance(p, Shard) for p in s.outputs) and axis.fits(node, s):
            return s
    return None


def _ways(axis: Axis, region: Region, inner: int) -> Iterator[Way]:
    """How a region may run, but for how it does."""
    now = axis.price(set(region.nodes))
    known: list[dict[fx.Node, Strategy]] = []
    for number, (seed, made) in enumerate(region.reads[:_SEEDS]):
        v = values_of(seed[0])[seed[1]]
        for dim in range(len(v.shape)):
            digit = _digit(axis, seed, dim, inner)
            if digit is None or made.dim == dim:
                continue
            shard = Shard(dim, digit)
            # what is sent may become less, as other values may be turned in its place; but not by that much
            if transfer(v, made, shard, axis.n, axis.size(seed)) > 2 * now:
                continue
            split = _follow(axis, region, seed, shard)
            if split and split not in known:
                known.append(split)
                rest = {n: axis.choices[n].partial_grad for n in region.nodes if n not in split}
                yield (number, dim), {**split, **rest}
    # noted where it is gathered
    yield None, {n: axis.choices[n].replicate for n in region.nodes}


def _digit(axis: Axis, operand: Key, dim: int, inner: int) -> int | None:
    """Where in a dim the axis may have its digit: inside of those of axes that split it already, or may do so."""
    node, i = operand
    size = values_of(node)[i].shape[dim]
    placed = node.meta["strategies"].items()
    taken = [
        p.split * axis.mesh.size(a)
        for a, s in placed
        if a != axis.name and isinstance(p := s.outputs[i], Shard) and p.dim == dim
    ]
    for digit in (max(taken),) if taken else (inner, 1):
        if size % (digit * axis.n) == 0:
            return digit
    return None


def _follow(axis: Axis, region: Region, seed: Key, shard: Shard) -> dict[fx.Node, Strategy] | None:
    """The strategies of the ops that a split of one value reaches, forward and back; None where one cannot keep it."""
    placed: dict[Key, Placement] = {seed: shard}
    wanted: dict[Key, Placement] = {}
    split: dict[fx.Node, Strategy] = {}
    reads, within = {o for o, _ in region.reads}, set(region.nodes)
    changed = True
    while changed:
        changed = False
        for node in region.nodes:
            if node in split:
                continue
            choices, operands, found = axis.choices[node], axis.operands[node], None
            for i, o in enumerate(operands):
                if isinstance(p := placed.get(o), Shard):
                    if (found := choices.from_operand(i, p, axis.n)) is None:
                        return None
                    break
            else:
                results = range(len(choices.call.results))
                asked = (choices.from_result(i, p, axis.n) for i in results if (p := wanted.get((node, i))) is not None)
                found = next((s for s in asked if s is not None), None)
            if found is None:
                continue
            if any(isinstance(p, Partial) for p in found.outputs) or not axis.fits(node, found):
                return None
            for o, need in zip(operands, found.inputs, strict=True):
                if isinstance(p := placed.get(o), Shard) and p != need:
                    return None
                if isinstance(need, Shard):
                    if o[0] in split or o in reads or o[0] not in within:
                        placed[o] = need
                    else:
                        wanted[o] = need
            for i, p in enumerate(found.outputs):
                placed[node, i] = p
            split[node] = found
            changed = True
    return split


def _ranks_of_weights(axis: Axis, tokens: set[str]) -> int:
    """Ranks of axes that split weights: they may split channels as well, and are placed later. Theirs are the outer
    digits.
    """
    params = axis.program.params
    axes = {a for p in params for a, s in p.layout.items if isinstance(s, Shard) and a not in tokens}
    return math.prod(axis.mesh.size(a) for a in axes)
