"""Which splits are dry-run: best first. Each that was not run yet has a bound, the best that it could come to; it is
run if that is better than what is known. A split that turns out to need recomputation or shorter rows adds new ones.

    tp=8           run       fits in 20 s at best
    tp=8, cheap    bound     14 s   ── run next: 16 s
    tp=4, cp=2     bound     18 s   ── cannot be near 16 s: not run
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardc.plan.bounds import optimistic, relatives
from shardc.plan.dry_runs import Stages
from shardc.plan.estimate import Rough
from shardc.plan.space import CHECKPOINTS, OFFLOADS, ON_HOST, Choice, Core, Keep

if TYPE_CHECKING:
    from shardc.plan.search import Search

#: A split is run if its bound is below so many times the best estimate: estimates are off by as much.
NEAR = 1.15
#: Where nothing can fit, so many are run in search of the nearest.
NEAREST = 4
#: (does its best choice not fit, seconds of that, or bytes where none fits)
Bound = tuple[bool, float]


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
    _known: dict[Core, Stages] = field(default_factory=dict)
    _from: dict[Core, object] = field(default_factory=dict)
    _choices: dict[Core, list[Choice]] = field(default_factory=dict)
    _queue: list[tuple[Bound, Core]] = field(default_factory=list)

    def go(self) -> None:
        """Run what may be among the best."""
        nearest = 0
        while self._queue:
            bound, core = heapq.heappop(self._queue)
            if self.pending.get(core) != bound:
                continue
            if relatives(core, self._known) != self._from[core]:  # more is known now
                now = self._bound(core)
                if now != bound and self._queue and now > self._queue[0][0]:
                    self._push(core, now)
                    continue
                bound = now
            short, amount = bound
            if not short and amount > NEAR * self.best:
                continue
            if short:
                if self.best < math.inf or nearest == NEAREST:
                    continue
                nearest += 1
            del self.pending[core]
            self.run(core)

    def run(self, core: Core) -> None:
        """Run a split, if compile accepts it, and add those that follow from it."""
        accepted = self.search.accepted(core)
        if accepted is None:
            return
        self._known[accepted] = self.search.library.core(Choice(**accepted._asdict()))
        found = self._estimate(accepted, self._known[accepted])
        self.estimates += found
        memory = self.search.memory
        fitting = [r.seconds for _, r in found if r.peak <= memory]
        self.best = min([self.best, *fitting])
        for other in self._following(accepted, found):
            self.may(other)

    def may(self, core: Core) -> None:
        """A split may be among the best: it is run if its bound is."""
        if core not in self._known and core not in self.pending:
            self._push(core, self._bound(core))

    def _push(self, core: Core, bound: Bound) -> None:
        self.pending[core] = bound
        heapq.heappush(self._queue, (bound, core))

    def _following(self, core: Core, found: list[tuple[Choice, Rough]]) -> Iterator[Core]:
        """What a split leads to: where it does not fit, everything recomputed; where that fits, less than everything;
        and parts of rows.
        """
        memory = self.search.memory
        fits = [r.peak <= memory for _, r in found]
        if core.checkpoint == "full" and (any(fits) or self.on_host):
            yield from (core._replace(checkpoint=keep) for keep in self._keeps())
        if core.checkpoint != "none":
            return
        if not all(fits):
            yield from self._full(core)
        ranks = self.devices // (core.tp * core.ep)
        if core.cp == 1 and (not any(fits) or self.batch < ranks):
            least = min((r.peak for _, r in found), default=0.0) / memory  # a part of a row takes a part of it
            for longer in self.search.longer(core, self.devices, math.ceil(max(least, ranks / self.batch))):
                yield longer
                yield from self._full(longer)

    def _full(self, core: Core) -> Iterator[Core]:
        if self.search.library.template.regions:
            yield core._replace(checkpoint="full")

    def _keeps(self) -> list[Keep]:
        return [k for k in CHECKPOINTS if k not in ("none", "full") and (self.on_host or k not in ON_HOST)]

    def _bound(self, core: Core) -> Bound:
        self._from[core] = relatives(core, self._known)
        stages = optimistic(core, self._known)
        if stages is None:
            return False, 0.0
        memory = self.search.memory
        found = self._estimate(core, stages)
        fitting = [r.seconds for _, r in found if r.peak <= memory]
        return (False, min(fitting)) if fitting else (True, min((r.peak for _, r in found), default=math.inf))

    def _estimate(self, core: Core, stages: Stages) -> list[tuple[Choice, Rough]]:
        some = self._choices.pop(core, None)
        if some is None:
            some = list(self.search.choices([core], self.devices, self.batch))
            if self.on_host:
                some += [replace(c, offload=offload) for c in some for offload in OFFLOADS if offload]
        if core not in self._known:
            self._choices[core] = some
        self.considered += len(some)
        if self.considered % 500 < len(some):
            self.search.on(f"{self.search.considered + self.considered} choices", 0, 0)
        return list(zip(some, self.search.estimates.of(some, stages), strict=True))
