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
2. Of what a region reads, each dim is tried: which ops keep that split (`_follow`)? What it does not reach (inputs that
   all channels share) is whole on every rank, and gathered once.
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
from shardc.rules.core.along_split_dim import STRETCHES
from shardc.rules.core.strategy import Strategy

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


#: What says how a region runs: the number of a value that it reads, and its split. None: whole.
Name = tuple[int, Shard] | None


def split_otherwise(axis: Axis, tokens: set[str]) -> tuple[Axis, list[str]]:
    """Decides the regions of an axis of the sequence that has been placed; returns it placed anew, and notes. tokens:
    all axes of the sequence.
    """
    inner = _ranks_beside(axis, tokens)
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


def _note(axis: Axis, region: Region, name: tuple[int, Shard]) -> str:
    number, shard = name
    (node, i), _ = region.reads[number]
    v = values_of(node)[i]
    return (
        f"{source_of(region.nodes[0])}: {len(region.nodes)} ops read tokens of other ranks; over {axis.name} they are"
        f" split by dim {shard.dim} of {v} instead of the sequence, by all_to_all"
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
        available: list[frozenset[Placement]] = [frozenset({split.get(o, REPLICATE)}) for o in operands]
        found += [s for s in choices.rule.extra(choices.call, axis.n, available) if s.kind == STRETCHES]
    for s in found:
        so = all(split.get(o, need) == need for o, need in zip(operands, s.inputs, strict=True))
        if so and all(isinstance(p, Shard) for p in s.outputs) and axis.fits(node, s):
            return s
    return None


def _ways(axis: Axis, region: Region, inner: tuple[int, ...]) -> Iterator[tuple[Name, dict[fx.Node, Strategy]]]:
    """How a region may run, but for how it does: what says so, and the strategies of its ops."""
    now = axis.price(set(region.nodes))
    known: list[dict[fx.Node, Strategy]] = []
    for number, (seed, made) in enumerate(region.reads[:_SEEDS]):
        v = values_of(seed[0])[seed[1]]
        dims = [d for d in range(len(v.shape)) if d != made.dim]
        for shard in (Shard(d, digit) for d in dims for digit in _digits(axis, seed, d, inner)):
            # what is sent may become less, as other values may be turned in its place; but not by that much
            if axis.prices.transfer(v, made, shard, axis.size(seed)) > 2 * now:
                continue
            ops = _follow(axis, region, seed, shard)
            if ops and ops not in known:
                known.append(ops)
                yield (number, shard), ops
    # noted where it is gathered
    yield None, {n: axis.choices[n].replicate for n in region.nodes}


def _digits(axis: Axis, operand: Key, dim: int, inner: tuple[int, ...]) -> list[int]:
    """Where in a dim the axis may have its digit: inside of those of axes that split it already, or may do so."""
    node, i = operand
    size = values_of(node)[i].shape[dim]
    placed = node.meta["strategies"].items()
    taken = [
        p.split * axis.mesh.size(a)
        for a, s in placed
        if a != axis.name and isinstance(p := s.outputs[i], Shard) and p.dim == dim
    ]
    every = (max(taken),) if taken else inner
    return [digit for digit in every if size % (digit * axis.n) == 0]


def _ranks_beside(axis: Axis, tokens: set[str]) -> tuple[int, ...]:
    """Digits that an axis may have in channels: inside of those of axes that split weights, which are placed later, and
    of the sequence's other axes, which may have taken some already; or the outermost.
    """
    params = axis.program.params
    weights = {a for p in params for a, s in p.layout.items if isinstance(s, Shard) and a not in tokens}
    ranks = math.prod(axis.mesh.size(a) for a in weights)
    others = math.prod(axis.mesh.size(a) for a in tokens if a != axis.name)
    return tuple(dict.fromkeys((ranks * others, ranks, 1)))


def _follow(axis: Axis, region: Region, seed: Key, shard: Shard) -> dict[fx.Node, Strategy]:
    """The strategies that ops get by a split of one value, forward and back; what it does not reach is whole. Left out
    are ops that cannot keep it, and what they lead to: placement decides those.
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
            found = _reached(axis, node, placed, wanted)
            if found is None and any(isinstance(placed.get(o), Shard) for o in operands):
                left.add(node)
            if found is None:
                continue
            for o, need in zip(operands, found.inputs, strict=True):
                if isinstance(need, Shard):
                    made = o[0] in split or o in reads or o[0] not in within
                    (placed if made else wanted)[o] = need
            placed |= {(node, i): p for i, p in enumerate(found.outputs)}
            split[node] = found
    rest = {n: axis.choices[n].partial_grad for n in region.nodes if n not in split and n not in left}
    return {**split, **rest} if split else {}


def _reached(axis: Axis, node: fx.Node, placed: dict[Key, Placement], wanted: dict[Key, Placement]) -> Strategy | None:
    """How an op keeps the split of an operand, or gives the one that is wanted of its result; None: not."""
    choices, operands = axis.choices[node], axis.operands[node]
    split = [(i, p) for i, o in enumerate(operands) if isinstance(p := placed.get(o), Shard)]
    if split:
        every = [choices.from_operand(*split[0], axis.n)]
    else:
        results = range(len(choices.call.results))
        every = [choices.from_result(i, p, axis.n) for i in results if (p := wanted.get((node, i))) is not None]
    for s in every:
        if s is None or any(isinstance(p, Partial) for p in s.outputs) or not axis.fits(node, s):
            continue
        if all(
            not isinstance(p := placed.get(o), Shard) or p == need for o, need in zip(operands, s.inputs, strict=True)
        ):
            return s
    return None
