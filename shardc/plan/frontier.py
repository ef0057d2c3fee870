"""Which splits are dry-run: what is expected to be best first. Each that was not run yet has a bound, the best that it
could come to; it is run if that is better than what is known. A split that needs recomputation or shorter rows, even at
best, adds new ones.

    tp=8           run       fits in 20 s at best
    tp=8, cheap    bound     14 s   ── run next: 16 s
    tp=4, cp=2     bound     18 s   ── cannot be near 16 s: not run
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardc.plan.bounds import optimistic, relatives, rests_on
from shardc.plan.columns import Columns
from shardc.plan.dry_runs import Stages, mixed
from shardc.plan.estimate import Rough
from shardc.plan.space import CHECKPOINTS, LESS, OFFLOADS, ON_HOST, Choice, Core, Keep, budget
from shardc.plan.stage_vectors import Vector

if TYPE_CHECKING:
    from shardc.plan.search import Search

#: A split is run if its bound is below so many times the best estimate, and its bound of bytes not above so many times
#: the memory that there is: a bound lies above what a run says by less.
NEAR, NEAR_BYTES = 1.09, 1.06
#: How many times its bound a split is expected to take, for each doubling of an axis and each other recomputation that
#: is between it and what its bound follows from: what is expected to be best is run first, and rules out the most.
UNKNOWN = 1.2
#: Where nothing can fit, so many are run in search of the nearest.
NEAREST = 4
#: So many of those that were run are asked first: most splits are ruled out by the nearest ones.
FIRST = 3
#: So many of the most promising splits may be begun with beside the one that is run.
LIKELY = 6
#: (does its best choice not fit, seconds of that, or bytes where none fits)
Bound = tuple[bool, float]
NOTHING: Bound = (False, math.inf)


@dataclass
class Frontier:
    """Of one search. on_host: also try state and activations in the machine's memory. estimates: of the choices of
    splits that were run. pending: splits that were not, each with its bound. considered: choices that were estimated,
    or bounded.
    """

    search: Search
    devices: int
    batch: int
    on_host: bool = False
    estimates: list[tuple[Choice, Rough]] = field(default_factory=list)
    pending: dict[Core, Bound] = field(default_factory=dict)
    considered: int = 0
    best: float = math.inf
    _done: set[Core] = field(default_factory=set)
    _refused: set[Core] = field(default_factory=set)
    _rests_on: dict[Core, tuple[Core, ...]] = field(default_factory=dict)
    _columns: dict[Core, Columns] = field(default_factory=dict)
    _queue: list[tuple[Bound, Bound, Core]] = field(default_factory=list)

    def go(self) -> None:
        """Run what may be among the best."""
        nearest = 0
        while self._queue:
            expected, bound, core = heapq.heappop(self._queue)
            if self.pending.get(core) != bound:
                continue
            if self._leads_nowhere(core) and self._ruled_out(bound):
                self._instead_of(core, bound)
                continue
            if rests_on(core, self.search.library.known) != self._rests_on[core]:  # more is known now
                now = self._bound(core)
                if now != bound and self._queue and self._expected(core, now) > max(self._queue[0][0], expected):
                    self._push(core, now)
                    continue
                bound = now
            if self._ruled_out(bound):
                self._instead_of(core, bound)
                continue
            if bound[0]:
                if nearest == NEAREST:
                    continue
                nearest += 1
            if (less := self._less(core)) is not None:
                self._push(core, bound)
                core = less
            del self.pending[core]
            self.run(core)

    def _less(self, core: Core) -> Core | None:
        """What keeps less of the same split, if that may be among the best, too: it is run first, as what keeps more
        takes as much memory at least.
        """
        less = core._replace(checkpoint=LESS.get(core.checkpoint, core.checkpoint))
        if less == core or less not in self.pending:
            return None
        self._push(less, self._bound(less))
        return None if self._ruled_out(self.pending[less]) else less

    def _ruled_out(self, bound: Bound) -> bool:
        """Whether something that was run is better in any case."""
        short, amount = bound
        return self.best < math.inf if short else amount > NEAR * self.best

    def _instead_of(self, core: Core, bound: Bound) -> None:
        """What recomputes less than a split that recomputes everything and is ruled out for its time: it gets a chance
        if the time of nothing, with the memory of everything, is not ruled out as well.
        """
        if core.checkpoint != "full" or bound[0]:
            return
        quickest = core._replace(checkpoint="cheap")
        some = [k for k in self._relatives(quickest) if k.checkpoint in ("none", "full")]
        if some and not self._ruled_out(self._bound_from(quickest, some)):
            for keep in self._keeps():
                self.may(core._replace(checkpoint=keep))

    @staticmethod
    def _leads_nowhere(core: Core) -> bool:
        """Whether that something of a split does not fit gives no others a chance (`_following`) which are not ruled
        out as it is: what is recomputed only takes longer.
        """
        return core.checkpoint != "none" or core.cp > 1

    def run(self, core: Core) -> None:
        """Run a split, if compile accepts it, and add those that follow from it."""
        self.search.begin(core, self._next(core))
        accepted = self.search.accepted(core)
        if accepted is None:
            self._refused.add(core)
            return
        self._done.add(accepted)
        stages = self.search.library.core(Choice(**accepted._asdict()))
        choices, found = self._estimate(accepted, stages)
        self.estimates += [
            (replace(c, checkpoint=accepted.checkpoint, sequence_parallel=accepted.sequence_parallel), Rough(*numbers))
            for c, *numbers in zip(choices, found.seconds.tolist(), found.peaks.tolist(), strict=True)
        ]
        memory = self.search.room
        fitting = found.fitting(memory)
        better = min(fitting, default=math.inf) < self.best
        self.best = min([self.best, *fitting])
        for other in self._following(accepted, found, memory):
            self.may(other)
        if accepted.checkpoint == "full" and (fitting or self.on_host):
            keeps = [accepted._replace(checkpoint=keep) for keep in self._keeps()]
            for other in keeps:
                self.may(other)
            # all shares follow from nothing and everything: what the best comes to is known early, and rules out more
            for other in keeps if better else ():
                if budget(other.checkpoint) is not None and not self._ruled_out(self.pending.get(other, NOTHING)):
                    del self.pending[other]
                    self.run(other)

    def _next(self, core: Core) -> Iterator[Core]:
        """Splits that are likely to be run after one. The first of which something fits is the best: its budgets want
        nothing recomputed, too.
        """
        if core.checkpoint == "full" and self.best == math.inf:
            yield core._replace(checkpoint="none")
        for _, bound, other in heapq.nsmallest(LIKELY, self._queue):
            if self.pending.get(other) == bound and not self._ruled_out(bound):
                yield other

    def may(self, core: Core) -> None:
        """A split may be among the best: it is run if its bound is."""
        if core in self._done or core in self.pending or core in self._refused:
            return
        if self.search.library.knows(core):  # it takes no time
            self.run(core)
        else:
            self._push(core, self._bound(core))

    def _push(self, core: Core, bound: Bound) -> None:
        self.pending[core] = bound
        heapq.heappush(self._queue, (self._expected(core, bound), bound, core))

    def _expected(self, core: Core, bound: Bound) -> Bound:
        """What a split is expected to come to: see UNKNOWN. Bytes are as a bound says."""
        short, amount = bound
        if short:
            return bound
        return short, amount * UNKNOWN ** min((_distance(near, core) for near in self._relatives(core)), default=0.0)

    def _following(self, core: Core, found: _Found, memory: float) -> Iterator[Core]:
        """What a split leads to where something does not fit into so much memory: the same with everything recomputed,
        and parts of rows. found: of its choices, or what these are at best.
        """
        if core.checkpoint != "none":
            return
        fitting = len(found.fitting(memory))
        if fitting < len(found.peaks):
            yield from self._full(core)
        ranks = self.devices // (core.tp * core.ep)
        if core.cp == 1 and (not fitting or self.batch < ranks):
            least = min(found.peaks, default=0.0) / memory  # a part of a row takes a part of it
            for longer in self.search.longer(core, self.devices, math.ceil(max(least, ranks / self.batch))):
                yield longer
                yield from self._full(longer)

    def _full(self, core: Core) -> Iterator[Core]:
        if self.search.library.template.regions:
            yield core._replace(checkpoint="full")

    def _keeps(self) -> list[Keep]:
        return [k for k in CHECKPOINTS if k not in ("none", "full") and (self.on_host or k not in ON_HOST)]

    def _bound(self, core: Core) -> Bound:
        """The best that a split could come to. What does not fit then does not fit: those that follow from that are
        added.
        """
        self._rests_on[core] = rests_on(core, self.search.library.known)
        some = self._relatives(core)
        if not some:
            return False, 0.0
        if self._leads_nowhere(core) and len(some) > 2 * FIRST:
            few = self._bound_from(core, sorted(some, key=lambda near: _distance(near, core))[:FIRST])
            if self._ruled_out(few):
                return few
        return self._bound_from(core, some)

    def _relatives(self, core: Core) -> tuple[Core, ...]:
        """Of all that were run, also for another number of devices."""
        return relatives(core, self.search.library.known)

    def _bound_from(self, core: Core, some: Sequence[Core]) -> Bound:
        _, found = self._estimate(core, self._optimistic(core, tuple(some)))
        memory = NEAR_BYTES * self.search.room
        for other in self._following(core, found, memory):
            self.may(other)
        fitting = found.fitting(memory)
        return (False, min(fitting)) if fitting else (True, min(found.peaks, default=math.inf))

    def _optimistic(self, core: Core, some: tuple[Core, ...]) -> Stages:
        """A share of what is kept follows from all and nothing, and so do its bounds."""
        library = self.search.library
        if (share := budget(core.checkpoint)) is not None:
            ends = (core._replace(checkpoint=keep) for keep in ("full", "none"))
            full, none = (self._optimistic(end, some) for end in ends)
            return mixed(full, none, share)
        known, made = library.known, self.search.bounded.get(core)
        of = some, rests_on(core, known)
        if made is None or made[0] != of:
            bound = optimistic(core, {k: library.elsewhere(k, core) for k in some}, known, library.device)
            made = self.search.bounded[core] = of, bound
        return made[1]

    def _estimate(self, core: Core, stages: Stages) -> tuple[Sequence[Choice], _Found]:
        """Choices of a core, but for what they recompute; and their estimates."""
        any_keep = core._replace(checkpoint="none" if core.checkpoint == "none" else "full", sequence_parallel=False)
        columns = self._columns.get(any_keep)
        if columns is None:
            some = list(self.search.choices([any_keep], self.devices, self.batch))
            if self.on_host:
                # parameters can be elsewhere where they are gathered before each use
                some += [replace(c, offload=o) for c in some for o in OFFLOADS if o and (o != "all" or c.zero == 3)]
            columns = self._columns[any_keep] = self.search.estimates.columns(some)
        number = len(columns.choices)
        self.considered += number
        if self.considered % 500 < number:
            self.search.on(f"{self.search.considered + self.considered} choices", 0, 0)
        if not number:
            return (), _Found(np.zeros(0), np.zeros(0))
        return columns.choices, _Found(*self.search.estimates.at_once(columns, stages, core.checkpoint))


def _distance(near: Core, core: Core) -> float:
    """How far apart two splits are: how many times each axis is doubled, and whether other things are recomputed."""
    apart = sum(abs(math.log2(a / b)) for a, b in zip(near[:3], core[:3], strict=True))
    return apart + (near.checkpoint != core.checkpoint)


class _Found(NamedTuple):
    """Estimates of choices: seconds, and bytes at the peak, of each."""

    seconds: Vector
    peaks: Vector

    def fitting(self, memory: float) -> list[float]:
        """Seconds of those that fit."""
        return [float(s) for s in self.seconds[self.peaks <= memory]]
