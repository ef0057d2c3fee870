"""Decide which rank and microbatch takes which row of a step: pure functions of lengths and seconds.

The rows of a step are fixed: the sampler names them, the same on every mesh. Any order of them is the same step, since
counts are global. So the order is free, and `arranged` takes the fastest of a few:

    as they come          row i at place i
    like lengths          sorted by length, so that a microbatch has little padding; microbatches are dealt to ranks
    in levels             the same, and the i-th microbatches of all ranks are like each other: for ranks that meet in
                          each microbatch (ZeRO 2 and 3)
    by seconds alone      rows are dealt one by one: for rows of one length with other documents

Where ranks share rows (context parallel), a microbatch of short rows may have several times as many, each on fewer
ranks. Then a step has fewer microbatches.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardc.runtime.data.ragged import Size

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


class Cell(NamedTuple):
    """A microbatch of one group of ranks. rows: numbers of its rows; seconds: predicted."""

    rows: tuple[int, ...]
    size: Size
    seconds: float


@dataclass(frozen=True)
class Step:
    """Where the rows of a step go. ranks: groups of ranks with rows of their own; rows: of one in a microbatch.

    meet: ranks wait for each other in each microbatch, and not only at the step's end. sizes: of microbatches, for
    which there are programs; () = all rows are `length` long. seconds: of a microbatch, by (its size, mean pairs of its
    rows); it is called for each candidate, so it should be cheap.
    """

    ranks: int
    microbatches: int
    rows: int
    seconds: Callable[[Size, float], float] = field(repr=False)
    meet: bool = False
    sizes: tuple[Size, ...] = ()
    length: int = 0
    left_out: bool = False

    @property
    def size(self) -> int:
        """Rows of a step."""
        return self.ranks * self.microbatches * self.rows

    def fitting(self, longest: int) -> list[Size]:
        """Return the shortest size for rows of this length, for each number of rows."""
        if not self.sizes:
            return [Size(max(longest, self.length))]
        by_times: dict[int, Size] = {}
        for size in sorted(self.sizes, reverse=True):
            if size.length >= longest:
                by_times[size.times] = size
        return [*by_times.values()]

    def cell(self, rows: Sequence[Row], numbers: Sequence[int], size: Size) -> Cell:
        """Return the microbatch of these rows, with its predicted seconds."""
        pairs = sum(rows[i].pairs for i in numbers) / len(numbers) if self.left_out else size.length**2
        return Cell(tuple(numbers), size, self.seconds(size, pairs))

    def cells(self, rows: Sequence[Row], order: Rows) -> list[Cell]:
        """Cut rows in this order into microbatches, equally many for each group, with the least sum of seconds."""
        runs = [order[at : at + self.rows] for at in range(0, len(order), self.rows)]
        longest = [max(rows[i].length for i in run) for run in runs]
        # of the runs from i: the least seconds by the number of their cells, modulo groups; and the first cell of these
        least = np.full((len(runs) + 1, self.ranks), np.inf)
        least[len(runs), 0] = 0.0
        first, choice = [list[Cell]() for _ in runs], np.zeros(least.shape, int)
        for i in reversed(range(len(runs))):
            for size in self.fitting(longest[i]):
                some = runs[i : i + size.times]
                if len(some) < size.times or max(longest[i : i + size.times]) > size.length:
                    continue
                cell = self.cell(rows, [j for run in some for j in run], size)
                seconds = np.roll(least[i + size.times], 1) + cell.seconds
                less = seconds < least[i]
                least[i, less], choice[i, less] = seconds[less], len(first[i])
                first[i].append(cell)
        cells, i, k = list[Cell](), 0, 0
        while i < len(runs):
            cells.append(first[i][choice[i, k]])
            i, k = i + cells[-1].size.times, (k - 1) % self.ranks
        return cells


@dataclass(frozen=True)
class Priced:
    """A step as predicted. groups: the microbatches of each group of ranks, in order.

    seconds: until the last rank ends; of_ranks: of each group alone; tokens: of the rows; padded: with what fills them
    up.
    """

    groups: tuple[tuple[Cell, ...], ...]
    seconds: float
    of_ranks: tuple[float, ...]
    tokens: int
    padded: int

    @property
    def order(self) -> list[int]:
        """The row at each place: by group, then microbatch, then row of it."""
        return [i for cells in self.groups for cell in cells for i in cell.rows]

    @property
    def slowest(self) -> float:
        """The slowest rank's seconds, of the mean of all."""
        mean = sum(self.of_ranks) / len(self.of_ranks)
        return max(self.of_ranks) / mean if mean else 1.0

    @property
    def padding(self) -> float:
        """The share of tokens that only fill up."""
        return 1 - self.tokens / self.padded if self.padded else 0.0


def priced(step: Step, rows: Sequence[Row], groups: Iterable[Sequence[Cell]]) -> Priced:
    """Predict a step of these microbatches of each group of ranks."""
    taken = tuple(map(tuple, groups))
    by_rank = [[cell.seconds for cell in cells] for cells in taken]
    of_ranks = tuple(map(sum, by_rank))
    seconds = sum(map(max, zip(*by_rank, strict=True))) if step.meet else max(of_ranks)
    padded = sum(len(cell.rows) * cell.size.length for cells in taken for cell in cells)
    return Priced(taken, seconds, of_ranks, sum(r.length for r in rows), padded)


def as_they_come(step: Step, rows: Sequence[Row]) -> Priced:
    """Predict a step with its rows in order."""
    cells = step.cells(rows, range(len(rows)))
    each = len(cells) // step.ranks
    return priced(step, rows, [cells[at : at + each] for at in range(0, len(cells), each)])


def arranged(step: Step, rows: Sequence[Row]) -> Priced:
    """Return the fastest order of a step's rows, as predicted; as they come if none is faster."""
    candidates = [as_they_come(step, rows), *(priced(step, rows, groups) for groups in _orders(step, rows))]
    return min(candidates, key=lambda p: (p.seconds, sum(p.of_ranks)))


def _orders(step: Step, rows: Sequence[Row]) -> list[list[list[Cell]]]:
    alone = [step.cell(rows, [i], step.fitting(r.length)[0]).seconds for i, r in enumerate(rows)]
    like = step.cells(rows, sorted(range(len(rows)), key=lambda i: (-rows[i].length, -alone[i], i)))
    like.sort(key=lambda cell: -cell.seconds)
    each = len(like) // step.ranks
    levels = [[k * step.ranks + (r if k % 2 else step.ranks - 1 - r) for k in range(each)] for r in range(step.ranks)]
    ways = [(like, levels), (like, dealt([cell.seconds for cell in like], step.ranks, each))]
    if not step.sizes:
        mixed = dealt(alone, step.ranks * step.microbatches, step.rows)
        cells = [step.cell(rows, some, step.fitting(max(rows[i].length for i in some))[0]) for some in mixed]
        ways.append((cells, dealt([cell.seconds for cell in cells], step.ranks, step.microbatches)))
    return [[[cells[i] for i in mine] for mine in of_ranks] for cells, of_ranks in ways]


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
