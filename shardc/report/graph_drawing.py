"""Where the boxes of a small graph go, from top to bottom: layered drawing (Sugiyama, Tagawa & Toda 1981).

Each box is below all that it uses. Edges over several layers get a point in each, so that they go around boxes. Within
a layer, boxes are ordered by the middle of their neighbours, then moved towards them as far as the others let them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 12
_GAP = 26.0  # pixels between boxes of a layer
_BEND = 8.0  # the width of a point of an edge


@dataclass(frozen=True)
class Placed:
    """centres: x of the middle of each box, from 0. layers: of each box. bends: of each edge, x in the layers that it
    passes. width: of all.
    """

    centres: Mapping[Hashable, float]
    layers: Mapping[Hashable, int]
    bends: Mapping[tuple[Hashable, Hashable], Sequence[float]]
    width: float


def place(widths: Mapping[Hashable, float], edges: Iterable[tuple[Hashable, Hashable]]) -> Placed:
    """widths: of each box, in an order in which every box comes after those that it uses. edges: (used, user)."""
    pairs = list(dict.fromkeys(edges))
    layer = _layers(list(widths), pairs)
    wide = dict(widths)
    above: dict[Hashable, list[Hashable]] = {v: [] for v in widths}
    below: dict[Hashable, list[Hashable]] = {v: [] for v in widths}
    chains: dict[tuple[Hashable, Hashable], list[Hashable]] = {}
    for a, b in pairs:
        chain: list[Hashable] = [("bend", a, b, i) for i in range(layer[a] + 1, layer[b])]
        for i, point in enumerate(chain):
            layer[point], wide[point] = layer[a] + 1 + i, _BEND
            above[point], below[point] = [], []
        chains[a, b] = chain
        for upper, lower in pairwise([a, *chain, b]):
            below[upper].append(lower)
            above[lower].append(upper)
    rows: list[list[Hashable]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    for v in wide:
        rows[layer[v]].append(v)
    x = _coordinates(_ordered(rows, above, below), wide, above, below)
    left = min((x[v] - wide[v] / 2 for v in wide), default=0.0)
    right = max((x[v] + wide[v] / 2 for v in wide), default=0.0)
    return Placed(
        {v: x[v] - left for v in widths},
        {v: layer[v] for v in widths},
        {pair: [x[p] - left for p in chain] for pair, chain in chains.items()},
        right - left,
    )


def _layers(boxes: Sequence[Hashable], edges: Sequence[tuple[Hashable, Hashable]]) -> dict[Hashable, int]:
    """Each box one below the lowest that it uses; what uses nothing comes right above its first user."""
    used: dict[Hashable, list[Hashable]] = {v: [] for v in boxes}
    users: dict[Hashable, list[Hashable]] = {v: [] for v in boxes}
    for a, b in edges:
        used[b].append(a)
        users[a].append(b)
    layer: dict[Hashable, int] = {}
    for v in boxes:
        layer[v] = max((layer[a] + 1 for a in used[v]), default=0)
    for v in boxes:
        if not used[v] and users[v]:
            layer[v] = min(layer[b] for b in users[v]) - 1
    return layer


Neighbours = Mapping[Hashable, Sequence[Hashable]]


def _ordered(rows: list[list[Hashable]], above: Neighbours, below: Neighbours) -> list[list[Hashable]]:
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        position = {v: i for row in rows for i, v in enumerate(row)}
        for row in rows if down else reversed(rows):
            near = above if down else below

            def middle(v: Hashable, near: Neighbours = near, position: dict[Hashable, int] = position) -> float:
                places = [position[u] for u in near[v]]
                return sum(places) / len(places) if places else position[v]

            row.sort(key=middle)
            position |= {v: i for i, v in enumerate(row)}
    return rows


def _coordinates(
    rows: list[list[Hashable]], wide: Mapping[Hashable, float], above: Neighbours, below: Neighbours
) -> dict[Hashable, float]:
    x: dict[Hashable, float] = {}
    for row in rows:
        at = 0.0
        for v in row:
            x[v] = at + wide[v] / 2
            at += wide[v] + _GAP
        for v in row:
            x[v] -= at / 2
    for sweep in range(_SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = []
            for v in row:
                near = [*above[v], *below[v]]
                wanted.append(sum(x[u] for u in near) / len(near) if near else x[v])
            _spread(row, wanted, wide, x)
    return x


def _spread(
    row: Sequence[Hashable], wanted: Sequence[float], wide: Mapping[Hashable, float], x: dict[Hashable, float]
) -> None:
    """Each box of a row as near to where it wants to be as its neighbours let it: the mean of pushing all to the right
    and pushing all to the left.
    """
    right, left = list(wanted), list(wanted)
    room = [(wide[a] + wide[b]) / 2 + _GAP for a, b in pairwise(row)]
    for i in range(1, len(row)):
        right[i] = max(right[i], right[i - 1] + room[i - 1])
    for i in range(len(row) - 2, -1, -1):
        left[i] = min(left[i], left[i + 1] - room[i])
    for v, a, b in zip(row, left, right, strict=True):
        x[v] = (a + b) / 2
