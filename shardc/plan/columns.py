"""Choices as columns of numbers, so that thousands of them are estimated at once: what they shard and how many rows a
microbatch has, what their collectives take, and how their schedules wait.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardc.plan.longest_paths import walked
from shardc.plan.space import Choice
from shardc.plan.stage_vectors import ROWS, Vector
from shardc.runtime.schedule import SCHEDULES
from shardc.spec.data_section import Data

#: What data axes and neighbours in a pipeline exchange.
OF_EXPERTS = {"all_gather": "gather of experts", "reduce_scatter": "scatter of experts"}
COLLECTIVES = ("all_gather", "reduce_scatter", *OF_EXPERTS.values(), "sum of dense", "sum of experts", "send_recv")


#: What specs of a plan say of buckets: nothing.
_DATA = Data()

#: What decides of a choice's collectives and shares of state; and how a pipeline runs.
_PLACED = attrgetter("pp", "dp", "cp", "ep", "tp", "inside", "zero", "outer", "kept", "over_experts", "offload")
_SCHEDULED = attrgetter("pp", "schedule", "per_rank", "rows", "microbatches")


class Columns:
    """Choices as columns of numbers. lines: of the collectives of one choice, seconds of none and of each byte. group:
    choices with one number are stages of the same layers; firsts: the first of each.
    """

    def __init__(self, choices: Sequence[Choice], lines: Callable[[Choice], list[tuple[float, float]]]) -> None:
        self.choices = choices
        firsts, placed = _alike([_PLACED(c) for c in choices])
        some = [choices[i] for i in firsts]

        def column(of: Callable[[Choice], Any], dtype: type = bool) -> NDArray[Any]:
            return np.array([of(c) for c in some], dtype)[placed]

        self.zero = column(lambda c: c.zero, int)
        self.sharded = column(lambda c: c.sharded, float)
        self.experts_sharded = column(lambda c: c.dp if c.over_experts else c.sharded, float)
        self.over_experts = column(lambda c: c.over_experts)
        self.bucket_bytes = column(lambda c: _DATA.bucket_bytes(c.dp * c.cp * c.ep), float)
        self.kept = column(lambda c: c.kept)
        self.offloads_optimizer = column(lambda c: bool(c.offload))
        self.offloads_all = column(lambda c: c.offload == "all")
        each = np.array([lines(c) for c in some]).reshape(-1, len(COLLECTIVES), 2)[placed]
        self.lines = {kind: each[:, i] for i, kind in enumerate(COLLECTIVES)}
        each_waits = [_each_microbatch(c) for c in some]
        waits = [each_waits[i] for i in placed]

        firsts, placed = _alike([_SCHEDULED(c) for c in choices])
        some = [choices[i] for i in firsts]
        self.stages, self.per_rank = column(lambda c: c.pp, float), column(lambda c: c.per_rank, float)
        self.rows = column(lambda c: c.rows, float)
        self.of_rows = np.array([parts_of_rows(c.rows) for c in some])[placed]
        self.microbatches = column(lambda c: c.microbatches, float)
        self.collects = column(lambda c: SCHEDULES[c.schedule].collects and c.pp > 1)
        self.alive = column(lambda c: _alive(c, first=True), float), column(lambda c: _alive(c, first=False), float)
        of_layers, group = _alike([(c.pp, c.per_rank, SCHEDULES[c.schedule].folds) for c in some])
        self.firsts, self.group = [firsts[i] for i in of_layers], group[placed]
        self._timed, self._as_timed = _alike(list(zip(placed.tolist(), waits, strict=True)))
        made = [walked(c.schedule, c.pp, c.per_rank, c.microbatches) if c.pp > 1 else None for c in some]
        self._walked = [(paths, np.flatnonzero(placed == i)) for i, paths in enumerate(made) if paths is not None]

    def steps(self, actions: Vector, send: Vector) -> Vector:
        """Seconds of all microbatches, of each choice. actions: of F, B, I and W of one on all stages of a rank, where
        all ranks take as long; send: of what one sends.
        """
        f, b, _, w = actions
        spent: Vector = self.microbatches * (f + b) + self._bubbles(f, b, w) + 2 * (self.stages - 1) * send
        for paths, places in self._walked:
            each = actions[:, places] / self.choices[places[0]].per_rank
            spent[places] = paths.seconds(np.vstack([each, send[places]]))
        return spent

    def _bubbles(self, f: Vector, b: Vector, w: Vector) -> Vector:
        """See bubble; equal for choices that differ in what they do with state once a step."""
        some = [bubble(self.choices[i], float(f[i]), float(b[i]), float(w[i])) for i in self._timed]
        return np.array(some)[self._as_timed]

    def part(self, experts: Vector) -> Vector:
        """Of the state that ZeRO shards, what a rank has, of each choice. experts: share of what is experts', which is
        sharded over dp alone where all else is sharded over the axis that they are spread over.
        """
        return 1 / self.sharded + experts * (1 / self.experts_sharded - 1 / self.sharded)

    def buckets(self, smallest: Vector, nbytes: Vector) -> Vector:
        """How many buckets so many bytes of gradients are, of each choice: with more ranks they are larger, unless one
        parameter fills one; each stage has its own. smallest: how many there would be of the smallest size.
        """
        of_each = np.ceil(np.minimum(smallest, nbytes / self.bucket_bytes) / self.per_rank)
        number: Vector = of_each * self.per_rank
        return number

    def taken(self, collective: str, nbytes: Vector, times: Vector) -> Vector:
        """Seconds of so many collectives with so many bytes together, of each choice."""
        line = self.lines[collective]
        return line[:, 0] * times + line[:, 1] * nbytes


def _alike(keys: Sequence[object]) -> tuple[list[int], NDArray[np.intp]]:
    """(the first place of each key, the number of its key for each place)."""
    numbers: dict[object, int] = {}
    places = [numbers.setdefault(key, len(numbers)) for key in keys]
    firsts = {number: i for i, number in reversed(list(enumerate(places)))}
    return [firsts[i] for i in range(len(numbers))], np.array(places, np.intp)


def parts_of_rows(rows: int) -> list[float]:
    """How much of what a microbatch with each number of ROWS takes one of so many rows does.

    >>> parts_of_rows(7)
    [0.0, 0.75, 0.25, 0.0]
    """
    shares = [0.0] * len(ROWS)
    i = min(bisect_right(ROWS, rows), len(ROWS) - 1)
    further = (rows - ROWS[i - 1]) / (ROWS[i] - ROWS[i - 1])
    shares[i - 1], shares[i] = 1 - further, further
    return shares


def _alive(c: Choice, first: bool) -> float:
    """How many microbatches a rank keeps at once, all its stages counted as one: the first rank (most), or the last."""
    return 1.0 if c.pp == 1 else SCHEDULES[c.schedule].kept(c.pp, c.per_rank, c.microbatches, first)


def _each_microbatch(c: Choice) -> tuple[object, ...]:
    """What decides of what every microbatch gathers or sums; () where that is nothing."""
    each = c.zero == 2 or (c.zero == 3 and not c.kept)
    return (c.zero, c.dp, c.outer, c.over_experts, c.inside) if each else ()


def bubble(c: Choice, forward: float, backward: float, weights: float) -> float:
    """Seconds in which a rank waits for others, where all stages are equal; forward, backward: of a microbatch on all
    stages of a rank; weights: of backward, those of gradients of weights.
    """
    if c.pp == 1:
        return 0.0
    if c.microbatches < c.pp:  # too few to fill the pipeline: nothing helps
        return (c.pp - 1) * (forward + backward)
    return SCHEDULES[c.schedule].idle(c.pp, c.per_rank, c.microbatches, forward, backward, weights)
