"""Who sends which box: each element once, both ends alike, and replicas in turn."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from shardc.features.reshard.places import Whole
from shardc.features.reshard.routes import messages, nearest_source, routes
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout, Placement, Shard
from shardc.runtime.state.boxes import Box, boxes_of, overlap, without


@dataclass(frozen=True)
class Split:
    """A tensor split by a layout."""

    shape: tuple[int, ...]
    mesh: Mesh
    layout: Layout

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return boxes_of(self.shape, self.layout, None, self.mesh, rank)


def split(shape: tuple[int, ...], sizes: dict[str, int], **placements: Placement) -> Split:
    mesh = Mesh.of(sizes)
    layout = Layout.of(placements, mesh)
    assert not layout.problem(shape, mesh)
    return Split(shape, mesh, layout)


SHAPE = (12, 8)
SPLITS = [
    split(SHAPE, {"a": 4}),
    split(SHAPE, {"a": 4}, a=Shard(0)),
    split(SHAPE, {"a": 4}, a=Shard(1)),
    split(SHAPE, {"a": 4}, a=Shard(1, 2)),  # two stretches each
    split(SHAPE, {"a": 2, "b": 2}, b=Shard(0)),
    split(SHAPE, {"a": 2, "b": 2}, a=Shard(1), b=Shard(0)),
    split(SHAPE, {"a": 4}, a=Shard(0, 1, (4, 8))),  # two parts, each split
]


@pytest.mark.parametrize("have", SPLITS, ids=lambda s: str(s.layout))
@pytest.mark.parametrize("need", SPLITS, ids=lambda s: str(s.layout))
@pytest.mark.parametrize("turn", [0, 3])
def test_every_element_comes_once(have: Split, need: Split, turn: int) -> None:
    whole = torch.arange(96).view(SHAPE)
    every = [routes(have, need, 4, r, turn=turn) for r in range(4)]
    old, new = ([x.layout.local(whole, x.mesh, x.mesh.coords(r)) for r in range(4)] for x in (have, need))
    for r, mine in enumerate(every):
        assert mine.lacking == 0
        got, times = torch.zeros_like(new[r]), torch.zeros_like(new[r])
        for source, pieces in mine.received.items():
            sent = every[source].sent[r]
            assert [(p.offset, p.shape) for p in sent] == [(p.offset, p.shape) for p in pieces]
            for a, b in zip(sent, pieces, strict=True):
                b.of(got).copy_(a.of(old[source]))
                b.of(times).add_(1)
        assert torch.equal(got, new[r])
        assert times.eq(1).all()
        held = set(old[r].flatten().tolist())
        received = [p.numel for source, each in mine.received.items() if source != r for p in each]
        assert sum(received) == len(set(new[r].flatten().tolist()) - held)


def test_replicas_take_turns_and_the_nearest_comes_first() -> None:
    half, other = (Whole((4,), frozenset(ranks)) for ranks in (range(4), range(4, 8)))
    pairs = {(m.source, m.target) for m in messages(half, other, 8)}
    assert {s for s, _ in pairs} == {0, 1, 2, 3}
    assert {t for _, t in pairs} == {4, 5, 6, 7}
    some, rest = Whole((4,), frozenset({0, 4})), Whole((4,), frozenset(range(8)))
    assert {m.target: m.source for m in messages(some, rest, 8)} == dict(enumerate([0] * 4 + [4] * 4))
    assert [nearest_source(6, [0, 1, 2, 3], turn) for turn in range(5)] == [0, 1, 2, 3, 0]
    assert [nearest_source(3, [0, 1, 2], turn) for turn in range(2)] == [2, 2]


def test_what_nobody_has_is_told() -> None:
    none, all_of_it = Whole((4, 2), frozenset()), Whole((4, 2), frozenset({1}))
    assert [routes(none, all_of_it, 2, r).lacking for r in range(2)] == [0, 8]


def test_a_box_without_one_in_it() -> None:
    random.seed(0)
    for _ in range(200):
        shape = [random.randint(1, 4) for _ in range(random.randint(0, 3))]
        start = tuple(random.randint(0, n - 1) for n in shape)
        size = tuple(random.randint(1, n - a) for n, a in zip(shape, start, strict=True))
        seen = torch.zeros(shape)
        for offset, left in [*without((0,) * len(shape), tuple(shape), start, size), (start, size)]:
            seen[tuple(slice(a, a + n) for a, n in zip(offset, left, strict=True))] += 1
            assert (offset, left) == (start, size) or overlap(offset, left, start, size) is None
        assert seen.eq(1).all()
