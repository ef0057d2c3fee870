"""Order DualPipe-V: two stages a rank in a V; in the steady state a forward runs beside a backward.

    rank 0 has stages 0 and 3    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+3B1 3F2+0B0 ...
    rank 1 has stages 1 and 2    1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 ...

They are of different microbatches, so that each hides what the other sends (`0F3+3B0`). (DeepSeek, "DualPipe"; cut in
half by Sea AI Lab.) The order of phases is that of torch.distributed.pipelining's ScheduleDualPipeV, after
deepseek-ai/DualPipe's dualpipev.py. Backward is split (I, W) at the start and at the end, where gradients of weights
fill the bubble. It needs as many microbatches as stages; with fewer it is the same order without the missing ones.
"""

from __future__ import annotations

from collections import Counter, deque

from shardc.runtime.schedule.actions import Action, Kind, pair
from shardc.runtime.schedule.one_f_one_b import one_f_one_b_idle


class _Order:
    """The order of one rank. Each call adds an action with the next microbatch of its stage."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._count: Counter[tuple[bool, int]] = Counter()  # (forward?, stage)
        self._weights: deque[Action] = deque()  # the Ws of the Is so far

    def _next(self, kind: Kind, stage: int) -> Action:
        key = kind == "F", stage
        self._count[key] += 1
        return Action(kind, stage, self._count[key] - 1)

    def add(self, kind: Kind, stage: int) -> None:
        a = self._next(kind, stage)
        self.actions.append(a)
        if kind == "I":
            self._weights.append(a._replace(kind="W"))

    def pair(self, forward: int, backward: int) -> None:
        self.actions.append(pair(self._next("F", forward), self._next("B", backward)))

    def weights(self) -> None:
        """Add the oldest waiting W, if there is one."""
        if self._weights:
            self.actions.append(self._weights.popleft())


def dualpipe_v(stages: int, ranks: int, microbatches: int) -> list[list[Action]]:
    assert stages == 2 * ranks
    return [_rank(rank, ranks, microbatches) for rank in range(ranks)]


def dualpipe_v_kept(ranks: int, per_rank: int, microbatches: int, first: bool) -> float:
    """Estimate the kept microbatches. See Maker.kept."""
    return min(2 * ranks + 1, 2 * microbatches) / 2


def dualpipe_v_idle(
    ranks: int, per_rank: int, microbatches: int, forward: float, backward: float, weights: float
) -> float:
    """Estimate the idle time: (p-1) (F + 2B - 3W) of stages half as large. See Maker.idle."""
    short = max(2 * ranks - microbatches, 0) / (2 * ranks)
    whole = one_f_one_b_idle(ranks, per_rank, microbatches, forward, backward, weights)
    return short * whole + (1 - short) * (ranks - 1) * max(forward + 2 * backward - 3 * weights, 0.0) / 2


def _rank(rank: int, ranks: int, microbatches: int) -> list[Action]:
    whole = max(microbatches, 2 * ranks)
    down, up = rank, 2 * ranks - 1 - rank
    order = _Order()
    for _ in range(2 * (ranks - rank - 1)):
        order.add("F", down)
    for _ in range(rank + 1):
        order.add("F", down)
        order.add("F", up)
    for _ in range(ranks - rank - 1):
        order.add("I", up)
        order.weights()
        order.add("F", up)
    for i in range(whole - 2 * ranks + rank + 1):
        if i == 0 and rank == ranks - 1:  # the stage before waits for this B
            order.add("F", down)
            order.add("B", up)
        else:
            order.pair(down, up)
        order.pair(up, down)
    for _ in range(ranks - rank - 1):
        order.add("B", up)
        order.pair(up, down)
    _end(order, rank, ranks, down, up)
    return [x for a in order.actions for x in a.among(lambda m: m < microbatches)]


def _end(order: _Order, rank: int, ranks: int, down: int, up: int) -> None:
    """Add backwards alone; from the middle on their gradients of weights wait, and fill the bubble."""
    switch = 2 * ((rank + 1) // 2) + (rank + 1) % 2
    for i in range(2 * (rank + 1)):
        order.add("I" if i >= switch else "B", down if i % 2 else up)
    for _ in range(ranks - rank - 1):
        order.weights()
        order.add("I", down)
    for _ in range(rank + 1):
        order.weights()
