"""Compute when each action of a schedule runs, from the costs of stages: bubbles, activations kept.

A rank runs its actions in their order, one at a time; each starts when the rank is free and its inputs have arrived.
Sends take no time of their rank, as nothing waits for them; REDUCE and STEP are not counted. So the end is the longest
path through the actions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardc.runtime.schedule.actions import COMPUTE, PAIRS, Action, Edges, Schedule, links, live


@dataclass(frozen=True)
class Costs:
    """Costs of each stage and one microbatch, in any one unit. B costs inputs + weights.

    transfer: of (source stage, target stage) between two ranks; the same again for its gradients. pairs: of two actions
    beside each other, by `Action.of_pair`; by default the sum of both. single: of an action that differs from others of
    its kind, by (kind, stage, microbatch), as the last backward, which sums gradients over data axes. begin: of each
    rank, when its first action may start, by default 0.
    """

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    transfer: Mapping[tuple[int, int], float] = field(default_factory=dict)
    pairs: Mapping[tuple[str, int, int], float] = field(default_factory=dict)
    single: Mapping[tuple[str, int, int], float] = field(default_factory=dict)
    begin: Sequence[float] = ()

    @staticmethod
    def even(stages: int, forward: float = 1, inputs: float = 1, weights: float = 1) -> Costs:
        return Costs((forward,) * stages, (inputs,) * stages, (weights,) * stages)

    def of(self, a: Action) -> float:
        if a.kind in PAIRS:
            known = self.pairs.get(a.of_pair)
            return sum(map(self.of, a.parts)) if known is None else known
        if (known := self.single.get((a.kind, a.stage, a.microbatch))) is not None:
            return known
        if a.kind == "F":
            return self.forward[a.stage]
        return (self.inputs[a.stage] if a.kind in ("B", "I") else 0) + (
            self.weights[a.stage] if a.kind in ("B", "W") else 0
        )


class Slot(NamedTuple):
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When actions run. slots: of each rank, F, B, I, W and pairs in order.

    live: of each rank the peak number of microbatches of stages with activations.
    """

    schedule: Schedule
    slots: tuple[tuple[Slot, ...], ...]
    live: tuple[int, ...]

    def __repr__(self) -> str:
        return f"<Timeline of {self.schedule!r}: bubble {100 * self.bubble():.1f} %>"

    @property
    def end(self) -> float:
        return max((row[-1].end for row in self.slots if row), default=0.0)

    def busy(self, rank: int) -> float:
        return sum(s.end - s.start for s in self.slots[rank])

    def bubble(self, rank: int | None = None) -> float:
        """Return the part of the time in which the rank (None: all, on average) waits for others."""
        if len(self.slots) == 1:
            return 0.0
        ranks = range(len(self.slots)) if rank is None else (rank,)
        return 1 - sum(map(self.busy, ranks)) / (len(ranks) * self.end) if self.end else 0.0


def timeline(schedule: Schedule, costs: Costs | None = None, edges: Edges | None = None) -> Timeline:
    """Compute the timeline of a proven schedule. costs: None: F, I and W take 1 each, in every stage."""
    costs = costs or Costs.even(schedule.stages)
    before: list[list[tuple[int, float]]] = [
        [] for _ in range(schedule.stages)
    ]  # by stage: the stages whose values it uses
    after: list[list[tuple[int, float]]] = [[] for _ in range(schedule.stages)]  # ... whose gradients it uses
    for link in links(edges, schedule.stages):
        far = schedule.placement[link.source] != schedule.placement[link.target]
        time = costs.transfer.get((link.source, link.target), 0.0) if far else 0.0
        before[link.target].append((link.source, time))
        if link.gradient:
            after[link.source].append((link.target, time))
    ends: dict[tuple[bool, int, int], float] = {}  # (forward?, stage, microbatch)
    actions = [[a for a in row if a.kind in COMPUTE] for row in schedule.actions]
    slots: list[list[Slot]] = [[] for _ in actions]
    ready = deque(range(len(actions)))
    waiters: dict[tuple[bool, int, int], list[int]] = {}
    while ready:
        rank = ready.popleft()
        done = slots[rank]
        for a in actions[rank][len(done) :]:
            start = done[-1].end if done else costs.begin[rank] if costs.begin else 0.0
            late = None
            for p in a.parts:
                forward = p.kind == "F"
                for stage, time in () if p.kind == "W" else (before if forward else after)[p.stage]:
                    end = ends.get((forward, stage, p.microbatch))
                    if end is None:
                        late = forward, stage, p.microbatch
                        break
                    start = max(start, end + time)
            if late is not None:
                waiters.setdefault(late, []).append(rank)
                break
            done.append(Slot(a, start, start + costs.of(a)))
            for p in a.parts:
                if p.kind != "W":
                    result = p.kind == "F", p.stage, p.microbatch
                    ends[result] = done[-1].end
                    ready.extend(waiters.pop(result, ()))
    assert all(len(d) == len(row) for d, row in zip(slots, actions, strict=True)), "prove the schedule first"
    return Timeline(schedule, tuple(map(tuple, slots)), tuple(map(live, schedule.actions)))
