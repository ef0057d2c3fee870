"""Order ZB-H1 (arXiv 2401.10241, section 2.1): 1F1B with W delayed, to fill the bubble at the end.

    rank 0: 0F0 0F1         0I0 0W0 0F2 0I1 0W1     0I2 0W2
    rank 1:     1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

Rank i delays its gradients of weights by i microbatches. So every rank keeps the activations of p microbatches, as many
as the first rank of 1F1B. With equal F, I and W the bubble is a third of 1F1B's. Several stages a rank: the same of
interleaved 1F1B.
"""

from __future__ import annotations

from collections import deque

from shardc.runtime.schedule.actions import Action
from shardc.runtime.schedule.one_f_one_b import one_f_one_b, one_f_one_b_kept


def zb_h1(stages: int, ranks: int, microbatches: int) -> list[list[Action]]:
    return [_split(order, rank) for rank, order in enumerate(one_f_one_b(stages, ranks, microbatches))]


def zb_h1_kept(ranks: int, per_rank: int, microbatches: int, first: bool) -> float:
    """Estimate the kept microbatches. See Maker.kept."""
    return one_f_one_b_kept(ranks, per_rank, microbatches, first=True)


def zb_h1_idle(ranks: int, per_rank: int, microbatches: int, forward: float, backward: float, weights: float) -> float:
    """Estimate the idle time: F + I - W for each rank but one; W fills the rest. See Maker.idle."""
    return (ranks - 1) * max(forward + backward - 2 * weights, 0.0)


def _split(order: list[Action], behind: int) -> list[Action]:
    ordered: list[Action] = []
    waiting: deque[Action] = deque()
    for a in order:
        if a.kind == "F":
            ordered.append(a)
            continue
        ordered.append(a._replace(kind="I"))
        waiting.append(a._replace(kind="W"))
        if len(waiting) > behind:
            ordered.append(waiting.popleft())
    return [*ordered, *waiting]
