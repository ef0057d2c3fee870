"""How long a pipeline takes, as the longest of a few paths through its schedule: each is a number of forwards,
backwards and sends, whatever these take. A path is found by walking the schedule once, for many proportions of these at
a time.

    1f1b, 2 ranks, 1 microbatch     2 F + 2 B + 2 sends
    1f1b, 2 ranks, 4 microbatches   5 F + 5 B + 2 sends, or, where sends take longest, 4 F + 4 B + 6 sends

Which of them is the longest hangs on seconds, and all are known, so nothing is walked again for other seconds.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardc.runtime.schedule import make, timeline
from shardc.runtime.schedule.actions import links

#: What a path is made of.
WHAT = ("F", "B", "I", "W", "send")
_SEND = WHAT.index("send")
#: Proportions that are tried, beside a forward that takes 1: halves of a backward, and sends.
_TRIED = list(itertools.product((1.0,), (0.7, 1.0, 2.0), (0.7, 1.0), (0.0, 0.1, 0.5, 2.0, 10.0)))
_SECONDS = np.array([[f, i + w, i, w, send] for f, i, w, send in _TRIED])
#: Schedules of more actions are not walked.
MOST_ACTIONS = 1600
#: From so many rounds of as many microbatches as ranks on, every other round takes as long.
_ROUNDS = 2

Paths = NDArray[np.float64]


class Walked(NamedTuple):
    """paths: [paths, what it is made of]; further: likewise, of a round more; rounds: how many more there are."""

    paths: Paths
    further: Paths
    rounds: float

    def seconds(self, each: NDArray[np.float64]) -> NDArray[np.float64]:
        """Until the last action ends. each: [what a path is made of, cases]: seconds of each."""
        end = np.max(self.paths @ each, 0)
        return end + self.rounds * (np.max(self.further @ each, 0) - end) if self.rounds else end  # type: ignore[no-any-return]


@functools.cache
def walked(schedule: str, ranks: int, per_rank: int, microbatches: int) -> Walked | None:
    """None: it has too many actions."""
    more = max(microbatches // ranks - _ROUNDS, 0)
    few = microbatches - more * ranks
    if (few + (ranks if more else 0)) * ranks * per_rank * 3 > MOST_ACTIONS:
        return None
    paths = _paths(schedule, ranks, per_rank, few)
    return Walked(paths, _paths(schedule, ranks, per_rank, few + ranks) if more else paths, more)


@functools.cache
def _paths(schedule: str, ranks: int, per_rank: int, microbatches: int) -> Paths:
    made = make(schedule, stages=ranks * per_rank, ranks=ranks, microbatches=microbatches)
    before: dict[int, list[tuple[int, bool]]] = {}
    after: dict[int, list[tuple[int, bool]]] = {}
    for link in links(None, made.stages):
        far = made.placement[link.source] != made.placement[link.target]
        before.setdefault(link.target, []).append((link.source, far))
        after.setdefault(link.source, []).append((link.target, far))
    order = sorted(
        ((slot.end, rank, slot.action) for rank, each in enumerate(timeline(made).slots) for slot in each),
        key=lambda x: x[:2],
    )
    nothing = np.zeros(len(_TRIED)), np.zeros((len(_TRIED), len(WHAT)))
    last = [nothing] * made.ranks
    ends: dict[tuple[bool, int, int], tuple[Paths, Paths]] = {}
    for _, rank, action in order:
        begin, path = last[rank]
        for p in action.parts:
            for stage, far in () if p.kind == "W" else (before if p.kind == "F" else after).get(p.stage, ()):
                end, its = ends[p.kind == "F", stage, p.microbatch]
                if far:
                    end, its = end + _SECONDS[:, _SEND], its.copy()
                    its[:, _SEND] += 1
                later = end > begin
                begin, path = np.where(later, end, begin), np.where(later[:, None], its, path)
        path = path.copy()
        for p in action.parts:
            begin = begin + _SECONDS[:, WHAT.index(p.kind)]
            path[:, WHAT.index(p.kind)] += 1
        last[rank] = begin, path
        for p in action.parts:
            if p.kind != "W":
                ends[p.kind == "F", p.stage, p.microbatch] = last[rank]
    longest = np.argmax([begin for begin, _ in last], 0)
    found: Paths = np.unique(np.stack([path for _, path in last])[longest, np.arange(len(_TRIED))], axis=0)
    return found
