"""Define the table of conversions: every way to change a value's placement on a mesh axis.

Placement decides what each value is on an axis; where an op needs another placement, partition inserts one of these
ops. The gradient goes the other way, and its placements follow from the duality:

    value          its gradient
    Replicate      Replicate      whole on every rank
    Shard          Shard          cut in the same way
    Partial        Replicate      every summand gets the sum's gradient
    PartialGrad    Partial        every copy gets a summand of it

So the backward of reduce_scatter (Partial to Shard) takes a gradient from Shard to Replicate: all_gather. `CONVERSIONS`
has all pairs of a forward and its backward; no other file says which belong together. Readers of the table:

    passes/partition                 which ops to insert, in which order, their names and collectives
    passes/place/transfer_cost.py    what they cost
    passes/accumulate                which of them depend on the microbatch; relies on all being linear
    runtime/ops/convert.py           what they run, forward and backward
    docs/explanation/algebra.md      shows the table as `python -m shardc.ir.conversions` prints it

A new conversion is a row here and an op of its name in runtime/ops/convert.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardc.ir.placement import Partial, PartialGrad, Placement, Replicate, Shard

#: What a rank does with its tensor: one of four collectives, or without communication: "slice" keeps the rank's part,
#: "pad" puts a part among zeros, "first" keeps the first rank's tensor and zeroes the others', "identity" keeps all.
Move = Literal["all_gather", "all_reduce", "all_to_all", "reduce_scatter", "slice", "pad", "first", "identity"]

#: The collectives, each with what a rank sends: a multiple of (n-1)/n of the whole tensor (all_to_all: of this rank's
#: part, 1/n of the tensor). Only docs use the numbers; seconds: shardc.machine.collectives.
COLLECTIVES = {"all_gather": 1, "all_reduce": 2, "all_to_all": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Conversion:
    """A row: the op that turns one kind of placement into another on an axis, and what it runs.

    forward, backward: the move of the value, and of its gradient. suffix: ends the name of the result (`proj_sum`).
    distance: if a value exists in several layouts, the one with the smallest sum of distances over the axes is
    converted. Conversions without a message count 1 or 2 (so does shard, which sends in backward), sum_grad 20, those
    that send in forward 30 to 50, and unshard_partial 40, as its sum follows.
    deferred: the price of a sum that follows later, in all_gathers. Only unshard_partial has one: 3, more than the 2 of
    an all_reduce. reason: why a program needs it. merged: one call converts several axes, in one collective.
    """

    source: type[Placement]
    target: type[Placement]
    op: str
    forward: Move
    backward: Move
    suffix: str
    distance: int
    reason: str
    deferred: int = 0
    merged: bool = False

    def collectives(self, *, gradient: bool) -> tuple[str, str]:
        """Return the collectives of forward and backward, or "none". gradient: whether one flows."""
        backward = self.backward if gradient and self.backward in COLLECTIVES else "none"
        return self.forward if self.forward in COLLECTIVES else "none", backward

    def price(self, each: Mapping[str, float], *, gradient: bool, packed: float = 1.0) -> float:
        """Return the price per byte of the whole tensor: forward and backward collectives, and `deferred`.

        each: the price of a byte in a collective, by kind. packed: the share of the bytes that a forward gather sends,
        if the value is rounded to 8 bits.
        """
        forward, backward = self.collectives(gradient=gradient)
        share = packed if forward == "all_gather" else 1.0
        now = share * each[forward] if forward != "none" else 0.0
        later = self.deferred * each["all_gather"] if self.deferred else 0.0
        return now + later + (each[backward] if backward != "none" else 0.0)


# The table keeps its columns, hence no formatter.
# fmt: off
#: The order of rows is the order of steps for a value that is converted on several axes: cut first, so that less is
#: sent; then exchange, sum, gather; last what sends nothing in forward. (first_grad sends nothing either.)
CONVERSIONS = (
    #          from         to           op                         forward           backward          suffix distance
    Conversion(Replicate,   Shard,       "shard",                   "slice",          "all_gather",     "cut",    1,
               "a value that every rank has is used in parts"),
    Conversion(PartialGrad, Shard,       "shard_partial_grad",      "slice",          "pad",            "cut",    2,
               "the same where gradients are summed anyway"),
    Conversion(Partial,     Shard,       "reduce_scatter",          "reduce_scatter", "all_gather",     "part",   30,
               "a sum of which every rank uses a part: sequence parallelism after a row-parallel layer"),
    Conversion(Shard,       Shard,       "all_to_all",              "all_to_all",     "all_to_all",     "turned", 40,
               "another dim is split from here on"),
    Conversion(Partial,     Replicate,   "all_reduce",              "all_reduce",     "identity",       "sum",    40,
               "a sum that every rank uses whole: after a row-parallel layer (Megatron's g, JAX's psum)", merged=True),
    Conversion(PartialGrad, Replicate,   "first_grad",              "identity",       "first",          "one",    2,
               "all ranks do the same work with a value whose gradients are summed: only the first's enters the sum"),
    Conversion(Shard,       Replicate,   "all_gather",              "all_gather",     "slice",          "whole",  40,
               "a value in parts is used whole, and the ranks repeat the same work"),
    Conversion(Shard,       PartialGrad, "all_gather_partial_grad", "all_gather",     "reduce_scatter", "whole",  50,
               "a value in parts is used whole, in other work: sequence parallelism before column parallel"),
    Conversion(Shard,       Partial,     "unshard_partial",         "pad",            "slice",          "padded", 40,
               "parts are added to a sum that is still to be done", deferred=3),
    Conversion(Replicate,   PartialGrad, "sum_grad",                "identity",       "all_reduce",     "each",   20,
               "each rank does other work: before a column-parallel layer (Megatron's f, JAX's pvary)", merged=True),
    Conversion(Replicate,   Partial,     "to_partial",              "first",          "identity",       "once",   1,
               "a value is added to a sum that is still to be done: one rank brings it"),
    Conversion(PartialGrad, Partial,     "partial_grad_to_partial", "first",          "first",          "once",   2,
               "the same where gradients are summed anyway"),
)
# fmt: on

BY_OP = {row.op: row for row in CONVERSIONS}
_BY_PLACEMENTS = {(row.source, row.target): row for row in CONVERSIONS}


def between(source: type[Placement], target: type[Placement]) -> tuple[Conversion, ...]:
    """Return the conversions from one kind of placement to another: its row, or two by way of Replicate.

    Only Partial to PartialGrad has no row: all_reduce, then sum_grad.
    """
    row = _BY_PLACEMENTS.get((source, target))
    return (row,) if row else by_way_of_replicate(source, target)


def by_way_of_replicate(source: type[Placement], target: type[Placement]) -> tuple[Conversion, Conversion]:
    """Return the conversions to Replicate, and from there to the target."""
    return _BY_PLACEMENTS[source, Replicate], _BY_PLACEMENTS[Replicate, target]


def path(old: Placement, new: Placement) -> tuple[Conversion, ...]:
    """Return the conversions of one value on one axis. Between digits of one dim: gather, then cut again."""
    if old == new:
        return ()
    if isinstance(old, Shard) and isinstance(new, Shard) and old.dim == new.dim:
        return by_way_of_replicate(Shard, Shard)  # `distance` and place's prices count one all_to_all: a rare case
    return between(type(old), type(new))


def distance(old: Placement, new: Placement) -> int:
    """Return the distance between two placements of a value on one axis: `Conversion.distance`, 10 for a second row."""
    if old == new:
        return 0
    first, *more = between(type(old), type(new))
    return first.distance + 10 * len(more)


def steps(paths: Mapping[str, tuple[Conversion, ...]]) -> list[tuple[Conversion, list[str]]]:
    """Return the conversions of one value on several axes in order, each with its axes. paths: by axis.

    The order is the table's, but the second conversion of an axis comes after the first. If its row is earlier in the
    table (all_gather, then shard), it takes the place of the first, and comes last there.
    """
    order = {row.op: i for i, row in enumerate(CONVERSIONS)}
    axes: dict[tuple[int, int], list[str]] = {}
    for axis, path in paths.items():
        for k, row in enumerate(path):
            place = max(order[before.op] for before in path[: k + 1])
            axes.setdefault((place, -order[row.op]), []).append(axis)  # the minus: earlier rows come last in a place
    return [(CONVERSIONS[-row], axes[place, row]) for place, row in sorted(axes)]


def markdown() -> str:
    """Format the table for docs/explanation/algebra.md."""
    lines = [
        "| from | to | op | forward | backward | sent | result | when |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in CONVERSIONS:
        sent = [
            f"{COLLECTIVES.get(move, 0)}{'/n' if move == 'all_to_all' else ''}" for move in (row.forward, row.backward)
        ]
        cells = (row.source.__name__, row.target.__name__, f"`{row.op}`", row.forward, row.backward, " + ".join(sent))
        lines.append(f"| {' | '.join(cells)} | `x_{row.suffix}` | {row.reason} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
