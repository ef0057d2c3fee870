"""The table of conversions: every backward follows from the duality of placements, and steps come in order."""

from __future__ import annotations

import itertools

import pytest

from shardc.ir.conversions import BY_OP, CONVERSIONS, Conversion, between, distance, path, steps
from shardc.ir.placement import (
    PARTIAL,
    PARTIAL_GRAD,
    REPLICATE,
    Partial,
    PartialGrad,
    Placement,
    Replicate,
    Shard,
)
from shardc.runtime import ops
from shardc.runtime.ops import convert

KINDS: tuple[type[Placement], ...] = (Replicate, Shard, Partial, PartialGrad)
#: What a gradient is where a value is that.
DUAL: dict[type[Placement], type[Placement]] = {
    Replicate: Replicate,
    Shard: Shard,
    Partial: Replicate,
    PartialGrad: Partial,
}


def move(old: type[Placement], new: type[Placement]) -> str:
    """What a rank does to a tensor; in one direction alone PartialGrad is Replicate."""
    old, new = (Replicate if p is PartialGrad else p for p in (old, new))
    return {
        (Replicate, Replicate): "identity",
        (Replicate, Shard): "slice",
        (Replicate, Partial): "first",
        (Shard, Replicate): "all_gather",
        (Shard, Shard): "all_to_all",
        (Shard, Partial): "pad",
        (Partial, Replicate): "all_reduce",
        (Partial, Shard): "reduce_scatter",
    }[old, new]


@pytest.mark.parametrize("row", CONVERSIONS, ids=lambda row: row.op)
def test_both_directions_follow_from_the_placements(row: Conversion) -> None:
    assert row.forward == move(row.source, row.target)
    assert row.backward == move(DUAL[row.target], DUAL[row.source])


def test_every_pair_of_placements_is_reached() -> None:
    pairs = {(row.source, row.target) for row in CONVERSIONS}
    assert len(pairs) == len(BY_OP) == len(CONVERSIONS)
    for old, new in itertools.permutations(KINDS, 2):
        rows = between(old, new)
        assert (rows[0].source, rows[-1].target) == (old, new)
        assert len(rows) == 1 or (old, new) == (Partial, PartialGrad)  # all_reduce, then sum_grad


def test_every_row_has_an_op_and_every_op_a_row() -> None:
    made = {name for name in ops.__all__ if getattr(ops, name).__module__ == convert.__name__}
    no_conversion = {"all_reduce_max"} | ops.OF_GRAPHS  # that one has no gradient; these call others backwards
    assert made - no_conversion == set(BY_OP)


def test_the_way_between_two_digits_of_a_dim_is_the_whole() -> None:
    assert [row.op for row in path(Shard(0), Shard(0, 2))] == ["all_gather", "shard"]
    assert [row.op for row in path(Shard(0), Shard(1))] == ["all_to_all"]
    assert [row.op for row in path(PARTIAL, PARTIAL_GRAD)] == ["all_reduce", "sum_grad"]
    assert path(Shard(0), Shard(0)) == ()
    assert distance(REPLICATE, REPLICATE) == 0


def test_steps_of_several_axes_come_in_the_order_of_the_table() -> None:
    ways = {
        "a": path(Shard(0), Shard(0, 2)),
        "b": path(REPLICATE, Shard(1)),
        "c": path(PARTIAL, PARTIAL_GRAD),
        "d": path(REPLICATE, PARTIAL_GRAD),
        "e": path(Shard(2), REPLICATE),
        "f": (),
    }
    found = [(row.op, axes) for row, axes in steps(ways)]
    assert found == [
        ("shard", ["b"]),
        ("all_reduce", ["c"]),
        ("all_gather", ["a", "e"]),
        ("shard", ["a"]),
        ("sum_grad", ["c", "d"]),
    ]


@pytest.mark.parametrize(
    ("op", "gradient", "sent"),
    [
        ("all_reduce", True, 2),
        ("sum_grad", True, 2),
        ("sum_grad", False, 0),
        ("reduce_scatter", True, 2),
        ("reduce_scatter", False, 1),
        ("all_to_all", True, 0.5),
        ("unshard_partial", True, 3),
    ],
)
def test_prices(op: str, gradient: bool, sent: float) -> None:
    each = {"all_gather": 0.75, "reduce_scatter": 0.75, "all_reduce": 1.5, "all_to_all": 0.75 / 4}
    assert BY_OP[op].price(each, gradient=gradient) == sent * 0.75
