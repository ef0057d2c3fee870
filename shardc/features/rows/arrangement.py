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


def _orders(step: Step, rows: Sequence[Row]) -> list[list[int]]:
    cost = [step.of([r])[1] for r in rows]
    like = sorted(range(len(rows)), key=lambda i: (-rows[i].length, -cost[i], i))
    cells = [like[at : at + step.rows] for at in range(0, len(like), step.rows)]
    by_cost = [like_cost(step, rows, cell) for cell in cells]
    mixed = dealt(cost, step.ranks * step.microbatches, step.rows)
    mixed_cost = [like_cost(step, rows, cell) for cell in mixed]
    orders = [list(range(len(rows)))]
    for some, costs in ((cells, by_cost), (mixed, mixed_cost)):
        of_ranks = dealt(costs, step.ranks, step.microbatches)
        orders.append([i for mine in of_ranks for cell in mine for i in some[cell]])
    orders.append([i for mine in _levels(by_cost, step.ranks) for cell in mine for i in cells[cell]])
    return orders


def like_cost(step: Step, rows: Sequence[Row], cell: Rows) -> float:
    """Return the seconds of a microbatch of these rows."""
    return step.of([rows[i] for i in cell])[1]


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
        if not _exchange(costs, mine, sums):
            break
    return [sorted(some, key=lambda i: (-costs[i], i)) for some in mine]


def _exchange(costs: Sequence[float], mine: list[list[int]], sums: list[float]) -> bool:
    """Make the best exchange of the rank with the most; return whether there is one."""
    top = max(range(len(sums)), key=lambda r: (sums[r], -r))
    best: tuple[float, int, int, int] | None = None
    for r in range(len(sums)):
        half = (sums[top] - sums[r]) / 2
        if half <= 0:
            continue
        theirs = sorted((costs[i], i) for i in mine[r])
        values = [c for c, _ in theirs]
        for i in mine[top]:  # the exchange that comes nearest to equal sums: a thing that is dearer by `half`
            at = bisect_left(values, costs[i] - half)
            for c, j in theirs[max(at - 1, 0) : at + 1]:
                gain = min(costs[i] - c, 2 * half - (costs[i] - c))
                if gain > 1e-9 * sums[top] and (best is None or gain > best[0]):
                    best = gain, r, i, j
    if best is None:
        return False
    _, r, i, j = best
    mine[top][mine[top].index(i)], mine[r][mine[r].index(j)] = j, i
    moved = costs[i] - costs[j]
    sums[top], sums[r] = sums[top] - moved, sums[r] + moved
    return True


def _levels(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Deal things that are in order of their cost, `ranks` at a time: the dearest to the rank with the least so far."""
    mine: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    for at in range(0, len(costs), ranks):
        by_sum = sorted(range(ranks), key=lambda r: (sums[r], r))
        for r, i in zip(by_sum, sorted(range(at, at + ranks), key=lambda i: (-costs[i], i)), strict=True):
            mine[r].append(i)
            sums[r] += costs[i]
    return mine
