"""Order ZB-V (arXiv 2401.10241, section 6): two stages a rank in a V, with a split backward.

    rank 0 has stages 0 and 3    0F0 0F1 0F2 3F0 3I0 3W0 3F1 ...
    rank 1 has stages 1 and 2        1F0 2F0 1F1 2F1 2I0 2W0 ...

The first rank also has the last stage. With equal F, I and W no rank waits between its first action and its last one,
and each keeps the activations of 1F1B's first rank: of 2p microbatches of stages half as large. The order of phases is
that of torch.distributed.pipelining's ScheduleZBVZeroBubble. It needs 2p-1 microbatches; with fewer it is the order of
2p-1, without the missing ones (see one_f_one_b.py).
"""

from __future__ import annotations

from collections import Counter

from shardc.runtime.schedule.actions import Action, Kind
from shardc.runtime.schedule.one_f_one_b import one_f_one_b_idle


class _Order:
    """The order of one rank: stages `down` and `up` the V. Each call takes the next microbatch."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.count: Counter[tuple[Kind, int]] = Counter()

    def add(self, stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            self.actions.append(Action(kind, stage, self.count[kind, stage]))
            self.count[kind, stage] += 1


def zb_v(stages: int, ranks: int, microbatches: int) -> list[list[Action]]:
    assert stages == 2 * ranks
    return [_rank(rank, ranks, microbatches) for rank in range(ranks)]


def zb_v_kept(ranks: int, per_rank: int, microbatches: int, first: bool) -> float:
    """Estimate the kept microbatches. See Maker.kept."""
    return min(2 * ranks, 2 * microbatches) / 2


def zb_v_idle(ranks: int, per_rank: int, microbatches: int, forward: float, backward: float, weights: float) -> float:
    """Estimate the idle time: (p-1) (F + I - W) of stages half as large. See Maker.idle.

    With equal F, I and W it is before a rank's first action and after its last one.
    """
    short = max(2 * ranks - 1 - microbatches, 0) / (2 * ranks - 1)
    whole = one_f_one_b_idle(ranks, per_rank, microbatches, forward, backward, weights)
    return short * whole + (1 - short) * (ranks - 1) * max(forward + backward - 2 * weights, 0.0) / 2


def _rank(rank: int, ranks: int, microbatches: int) -> list[Action]:
    whole = max(microbatches, 2 * ranks - 1)
    down, up = rank, 2 * ranks - 1 - rank
    order = _Order()
    count = order.count
    for _ in range(2 * (ranks - rank) - 1):
        order.add(down, "F")
    for _ in range(rank):
        order.add(up, "F")
        order.add(down, "F")
    for _ in range(ranks - rank):
        order.add(up, "F", "I", "W")
    while count["F", up] < whole:
        if count["F", down] < whole:
            order.add(down, "F")
        order.add(down, "I", "W")
        order.add(up, "F", "I", "W")
    for _ in range(rank):
        order.add(down, "I")
        order.add(up, "I")
    for _ in range(ranks - rank):
        order.add(down, "I", "W")
    for stage in (up, down):
        while count["W", stage] < whole:
            order.add(stage, "W")
    return [a for a in order.actions if a.microbatch < microbatches]
