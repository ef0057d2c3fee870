"""Order GPipe (arXiv 1811.06965): all microbatches forward, keeping all activations, then backward.

rank 0: 0F0 0F1 0F2     0B0 0B1 0B2
rank 1:     1F0 1F1 1F2 1B0 1B1 1B2
"""

from __future__ import annotations

from shardc.runtime.schedule.actions import Action


def gpipe(stages: int, ranks: int, microbatches: int) -> list[list[Action]]:
    """Return each rank's order. Several stages of a rank run one after the other, all microbatches each.

    ("Looped breadth first", arXiv 2211.05953.)
    """
    ms = range(microbatches)
    orders = []
    for rank in range(ranks):
        chunks = range(rank, stages, ranks)
        orders.append(
            [Action("F", s, m) for s in chunks for m in ms] + [Action("B", s, m) for s in reversed(chunks) for m in ms]
        )
    return orders


def gpipe_kept(ranks: int, per_rank: int, microbatches: int, first: bool) -> float:
    """Estimate the kept microbatches. See Maker.kept."""
    return float(microbatches)
