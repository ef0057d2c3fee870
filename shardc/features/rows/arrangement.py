"""Decide which rank and microbatch takes which row of a step: pure functions of lengths and seconds.

The rows of a step are fixed: the sampler names them, the same on every mesh. Any order of them is the same step, since
counts are global. So the order is free, and `arranged` takes the fastest of a few:

    as they come          row i at place i
    like lengths          sorted by length, so that a microbatch has little padding; microbatches are dealt to ranks
    in levels             the same, and the i-th microbatches of all ranks are like each other: for ranks that meet in
                          each microbatch (ZeRO 2 and 3)
    by seconds alone      rows are dealt one by one: for rows of one length with other documents
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

#: Exchanges between two ranks that are tried for one step.
EXCHANGES = 256
Rows = Sequence[int]


@dataclass(frozen=True)
class Row:
    """A row. length: its tokens; pairs: of a query and a key, that attention computes, if it leaves others out."""

    length: int
    pairs: int


def row(documents: int | Sequence[int]) -> Row:
    """Return the row of one document, or of several that are kept apart."""
    each = [int(documents)] if isinstance(documents, int) else list(documents)
    return Row(sum(each), sum(n * n for n in each))


@dataclass(frozen=True)
class Step:
    """Where the rows of a step go. ranks: groups of ranks with rows of their own; rows: of one in a microbatch.

    meet: ranks wait for each other in each microbatch, and not only at the step's end. lengths: to which microbatches
    are padded, in order; () = all rows are `length` long. seconds: of a microbatch, by (its length, mean pairs of its
    rows); it is called for each candidate, so it should be cheap.
    """

    ranks: int
    microbatches: int
    rows: int
    seconds: Callable[[int, float], float] = field(repr=False)
    meet: bool = False
    lengths: tuple[int, ...] = ()
    length: int = 0
    left_out: bool = False

    @property
    def size(self) -> int:
        """Rows of a step."""
        return self.ranks * self.microbatches * self.rows

    def padded(self, length: int) -> int:
        """Return the length to which a row, or the longest row of a microbatch, is padded."""
        if not self.lengths:
            return max(length, self.length)
        at = bisect_left(self.lengths, length)
        return self.lengths[at] if at < len(self.lengths) else length

    def of(self, rows: Sequence[Row]) -> tuple[int, float]:
        """Return the length of a microbatch of these rows, and its seconds."""
        length = self.padded(max(r.length for r in rows))
        pairs = sum(r.pairs for r in rows) / len(rows) if self.left_out else length * length
        return length, self.seconds(length, pairs)


@dataclass(frozen=True)
class Priced:
    """A step as predicted. order: the row at each place: by rank, then microbatch, then row of it.

    lengths: of each microbatch, in that order. seconds: until the last rank ends; of_ranks: of each alone; tokens: of
    the rows; padded: with what fills them up.
    """

    order: tuple[int, ...]
    lengths: tuple[int, ...]
    seconds: float
    of_ranks: tuple[float, ...]
    tokens: int
    padded: int

    @property
    def slowest(self) -> float:
        """The slowest rank's seconds, of the mean of all."""
        mean = sum(self.of_ranks) / len(self.of_ranks)
        return max(self.of_ranks) / mean if mean else 1.0

    @property
    def padding(self) -> float:
        """The share of tokens that only fill up."""
        return 1 - self.tokens / self.padded if self.padded else 0.0


def priced(step: Step, rows: Sequence[Row], order: Rows) -> Priced:
    """Predict a step with its rows in this order."""
    cells = [step.of([rows[i] for i in order[at : at + step.rows]]) for at in range(0, step.size, step.rows)]
    m = step.microbatches
    by_rank = [[s for _, s in cells[at : at + m]] for at in range(0, len(cells), m)]
    of_ranks = tuple(map(sum, by_rank))
    seconds = sum(map(max, zip(*by_rank, strict=True))) if step.meet else max(of_ranks)
    padded = sum(n for n, _ in cells) * step.rows
    return Priced(tuple(order), tuple(n for n, _ in cells), seconds, of_ranks, sum(r.length for r in rows), padded)


def arranged(step: Step, rows: Sequence[Row]) -> Priced:
    """Return the fastest order of a step's rows, as predicted; as they come if none is faster."""
    candidates = [priced(step, rows, order) for order in _orders(step, rows)]
    return min(candidates, key=lambda p: (p.seconds, sum(p.of_ranks)))


def _orders(step: Step, rows: Sequence[Row]) -> list[Rows]:
    cost = [step.of([r])[1] for r in rows]
    like = sorted(range(len(rows)), key=lambda i: (-rows[i].length, -cost[i], i))
    sorted_cells = [like[at : at + step.rows] for at in range(0, len(like), step.rows)]
    mixed_cells = dealt(cost, step.ranks * step.microbatches, step.rows)
    levels = [
        [k * step.ranks + (r if k % 2 else step.ranks - 1 - r) for k in range(step.microbatches)]
        for r in range(step.ranks)
    ]
    ways = [(sorted_cells, levels)]
    for cells in (sorted_cells, mixed_cells):
        by_cell = [step.of([rows[i] for i in cell])[1] for cell in cells]
        ways.append((cells, dealt(by_cell, step.ranks, step.microbatches)))
    dealt_out = [[i for mine in of_ranks for cell in mine for i in cells[cell]] for cells, of_ranks in ways]
    return [range(len(rows)), *dealt_out]


def dealt(costs: Sequence[float], ranks: int, each: int) -> list[list[int]]:
    """Deal things to ranks, `each` to every one, so that the largest sum is small; return the numbers of each's.

    The dearest first, to the rank with the least so far; then the rank with the most exchanges one thing with another
    rank while that makes the larger of both sums smaller. A rank's things are in order of cost, the dearest first.
    """
    free = [(0.0, r) for r in range(ranks)]
    mine: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, r = heapq.heappop(free)
        mine[r].append(i)
        if len(mine[r]) < each:
            heapq.heappush(free, (total + costs[i], r))
    sums = [sum(costs[i] for i in some) for some in mine]
    for _ in range(EXCHANGES):
        *others, top = sorted(range(ranks), key=lambda r: (sums[r], -r))
        for r in others:  # the best exchange with the rank that has the least, if there is one
            gap = sums[top] - sums[r] - 1e-9 * sums[top]
            pairs = ((costs[i] - costs[j], i, j) for i in mine[top] for j in mine[r])
            best = max(((min(d, gap - d), i, j) for d, i, j in pairs if 0 < d < gap), default=None)
            if best is not None:
                _, i, j = best
                mine[top][mine[top].index(i)], mine[r][mine[r].index(j)] = j, i
                sums[top], sums[r] = sums[top] - costs[i] + costs[j], sums[r] + costs[i] - costs[j]
                break
        else:
            break
    return [sorted(some, key=lambda i: (-costs[i], i)) for some in mine]
