"""Order 1F1B and interleaved 1F1B: as soon as a rank can, it runs one backward for each forward.

    rank 0: 0F0 0F1             0B0 0F2     0B1     0B2
    rank 1:     1F0 1B0     1F1 1B1     1F2 1B2

(arXiv 1806.03377, 2006.09503, 2104.04473.) Rank i of p warms up by p-1-i forwards, so that it keeps the activations of
p-i microbatches, however many there are. With v stages a rank (stage s is on rank s mod p) microbatches go in rounds of
p: a round through the rank's first stage, then through its second, ...; the warm-up is (v-1)p + 2(p-1-i) forwards, and
the bubble becomes a v-th.

Rounds must be whole for these numbers: with fewer microbatches the order is that of the next multiple of p, without the
missing ones. A legal order without some microbatches is legal too, as microbatches do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardc.runtime.schedule.actions import Action


def one_f_one_b(stages: int, ranks: int, microbatches: int) -> list[list[Action]]:
    v = stages // ranks
    whole = -(-microbatches // ranks) * ranks if v > 1 else microbatches
    orders = []
    for rank in range(ranks):
        warm = _warm_up(ranks, v, rank)
        chunks = range(rank, stages, ranks)
        forward = [Action("F", s, m) for s, m in _rounds(chunks, ranks, whole)]
        backward = [Action("B", s, m) for s, m in _rounds(chunks[::-1], ranks, whole)]
        order = forward[:warm]
        for i, b in enumerate(backward):
            order += [*forward[warm + i : warm + i + 1], b]
        orders.append([a for a in order if a.microbatch < microbatches])
    return orders


def _warm_up(ranks: int, per_rank: int, rank: int) -> int:
    """Return the forwards of a rank before its first backward."""
    behind = ranks - 1 - rank
    return (per_rank - 1) * ranks + 2 * behind if per_rank > 1 else behind


def one_f_one_b_kept(ranks: int, per_rank: int, microbatches: int, first: bool) -> float:
    """Estimate the kept microbatches. See Maker.kept."""
    p, v, m = ranks, per_rank, microbatches
    if not first:
        return float(min(((v - 1) * p + 1) / v, m))
    return min(_warm_up(p, v, 0) + 1, m * v) / v


def one_f_one_b_idle(
    ranks: int, per_rank: int, microbatches: int, forward: float, backward: float, weights: float
) -> float:
    """Estimate the time that a rank waits for its first microbatch, and after its last. See Maker.idle."""
    return (ranks - 1) * (forward + backward) / per_rank


def _rounds(mine: range, size: int, microbatches: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, microbatches, size):
        for stage in mine:
            for m in range(begin, min(begin + size, microbatches)):
                yield stage, m
