"""The search: all choices, their estimated prices, and exact prices of the best.

1  dry_runs   a microbatch for (tp, ep) that compile accepts; recomputed where something does not fit otherwise, and
              with the sequence split where no row fits as it is, or rows are too few for the devices: the most
              promising of these first, until no other can be among the best (frontier)
2  estimate   a price of every mesh × ZeRO × schedule × microbatches
3  exact      a price of the best, from dry runs at their own mesh; these rank the result. How far off an estimate was
              corrects those of its kind before the next is chosen
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from shardc.errors import ShardcError
from shardc.plan.dry_runs import Library, Stages
from shardc.plan.estimate import Estimates, Rough
from shardc.plan.exact_price import Priced, price
from shardc.plan.frontier import Frontier
from shardc.plan.space import Choice, Core, choices, divisors, sequence_widths, spec, tensor_widths
from shardc.runtime.schedule import SCHEDULES
from shardc.spec import Spec

#: How many dry runs of whole choices are made, and how many choices are priced from them.
DRY_RUNS, PRICED = 6, 24
#: How many choices are priced that differ only in ZeRO and schedule: their estimates are off in the same way, so other
#: choices get a chance.
ALIKE = 4
#: How many more are priced in search of a second one that fits.
SECOND = 4
#: A choice estimated at so many times a device's memory is not priced: it will not fit.
FAR = 2
#: Where one fits, others are priced whose estimates are at most so many times its time, and so many times the memory
#: that there is. (If the estimates of all were as many times too long as the one that was most so.)
SLOWER, LARGER = 1.12, 1.3
OnProgress = Callable[[str, int, int], None]


@dataclass
class Search:
    """One model on one kind of device. memory: bytes of a device that a step may use. room: bytes that estimated live
    tensors may have, or it is taken that a choice does not fit: those of the memory that are not libraries', as what is
    reserved is never less than what is live; less where exact prices say that more is reserved. cuts: how many stages a
    pipeline may have. on: called with what is being priced: (subject, done, total). refused: why compile refused a
    split, by name. considered, ruled_out: how many choices were estimated, and how many splits were not run. bounded:
    the last bound of the stages of a split, and what it follows from: devices in all have no part in it.
    """

    library: Library
    memory: float
    cuts: int = 1
    experts: int = 0
    on: OnProgress = lambda subject, done, total: None
    refused: dict[str, ShardcError] = field(default_factory=dict)
    considered: int = 0
    ruled_out: int = 0
    room: float = field(init=False)
    bounded: dict[Core, tuple[object, Stages]] = field(default_factory=dict, repr=False)
    _exact: dict[Choice, Priced] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.estimates = Estimates(self.library)
        self.room = max(self.memory - self._outside, 1.0)

    @property
    def _outside(self) -> float:
        """Bytes that a process takes at least beside its tensors."""
        return self.library.device.outside_bytes(0)

    def splits(self, devices: int, *, over_nodes: bool = False) -> list[Core]:
        """Those of so many devices, without recomputation, whatever compile says of them: tensor parallelism inside a
        node, or over several.
        """
        self.on("one microbatch", 0, 0)
        self.library.takes_microbatches()
        sequences = bool(self.library.template.sequences)
        return [
            Core(tp, ep, sequence_parallel=tp > 1 and sequences)
            for tp in tensor_widths(devices, self.library.device.node)[over_nodes]
            for ep in (divisors(self.experts) if self.experts else [1])
            if devices % (tp * ep) == 0
        ]

    def cores(self, devices: int) -> Iterator[Core]:
        """The splits that compile accepts for so many devices, compiled as they are asked for."""
        found = (self.accepted(core) for core in self.splits(devices))
        return (core for core in found if core is not None)

    def accepted(self, core: Core) -> Core | None:
        """It, or the same without sequence parallelism, if compile accepts that; None if neither."""
        mesh = ", ".join([f"tp={core.tp}", *(f"{a}={n}" for a, n in (("ep", core.ep), ("cp", core.cp)) if n > 1)])
        name = mesh if core.checkpoint == "none" else f"{mesh}, recompute {core.checkpoint}"
        if name in self.refused:
            return None
        for sp in dict.fromkeys((core.sequence_parallel, False)):
            choice = Choice(**core._replace(sequence_parallel=sp)._asdict())
            if not self.library.knows(choice.core):
                self.on(f"one microbatch at {mesh}, recompute {core.checkpoint}", 0, 0)
            try:
                self.library.core(choice)
            except ShardcError as e:
                self.refused[name] = e
            else:
                self.refused.pop(name, None)
                return choice.core
        return None

    def begin(self, core: Core, likely: Iterable[Core]) -> None:
        """Other processes begin with splits that are likely to be run after this one."""
        asks = (partial(self.library.ask, k) for k in (core, *likely))
        self.library.records.begin(next(asks), asks)

    def choices(self, cores: Iterable[Core], devices: int, batch: int) -> Iterator[Choice]:
        """All choices of these cores."""
        most = batch if self.library.microbatches > 1 else 1
        return choices(list(cores), devices, batch, self.cuts, most, self.library.device.node)

    def estimate(
        self, devices: int, batch: int, cores: Iterable[Core], *, on_host: bool = False, below: float = math.inf
    ) -> list[tuple[Choice, Rough]]:
        """Choices with their estimates, unordered: of all cores that may be among the best; others are ruled out by
        bounds (shardc.plan.bounds). With recomputation, which costs time, only where something does not fit without;
        with the sequence split only where nothing does, or rows are too few for all devices. on_host: also with state
        or activations in the machine's memory. below: seconds; what is slower is of no use.
        """
        frontier = Frontier(self, devices, batch, on_host, best=below)
        for core in cores:
            frontier.may(core)
        frontier.go()
        self.considered += frontier.considered
        self.ruled_out += len(frontier.pending)
        return frontier.estimates

    def long_rows(self, cores: Iterable[Core], devices: int, least: int = 1) -> Iterator[Core]:
        """The splits that cut the sequence too, as compile accepts them: the fewest parts first, made as they are asked
        for.
        """
        found = (self.accepted(core) for base in cores for core in self.longer(base, devices, least))
        return (core for core in found if core is not None)

    def longer(self, core: Core, devices: int, least: int = 1) -> list[Core]:
        """A split with the sequence cut too, whatever compile says of it. least: of parts, or as many as there may be:
        with fewer than ranks / rows, pipelines have more stages than microbatches.
        """
        widths = sequence_widths(devices // (core.tp * core.ep), self.library.sequence or self.library.facts.sequence)
        return [core._replace(cp=cp) for cp in [cp for cp in widths if cp >= least] or widths[-1:]]

    def ranked(self, estimates: Iterable[tuple[Choice, Rough]]) -> list[tuple[Choice, Rough]]:
        """The best first: those that seem to fit by time, then the others by memory."""
        return sorted(
            estimates, key=lambda x: (x[1].peak > self.room, x[1].seconds if x[1].peak <= self.room else x[1].peak)
        )

    def exact(self, c: Choice) -> Priced:
        if c not in self._exact:
            first = Spec.load(spec(c, self.library.template))
            self._exact[c] = price(self.library, first, c.batch)
        return self._exact[c]

    def refine(self, ranked: list[tuple[Choice, Rough]]) -> dict[Choice, Priced]:
        """Exact prices of the best; of more of them where these turn out not to fit."""
        prices: dict[Choice, Priced] = {}
        dry_runs: set[object] = set()
        families: Counter[object] = Counter()
        alike = ALIKE if self.library.facts.layers else ALIKE // 2  # each needs a dry run of its own
        queue = Queue(ranked, self.memory, self._outside)
        for c, rough in queue:
            if prices and rough.peak > FAR * self.memory:
                break
            family, run = (c.core, c.pp, c.dp, c.rows), self._dry_run(c)
            fits = any(p.needs <= self.memory for p in prices.values())
            if run not in dry_runs and len(dry_runs) >= (DRY_RUNS if fits else 2 * DRY_RUNS):
                break
            if families[family] >= alike:
                continue
            families[family] += 1
            dry_runs.add(run)
            self.on(str(c), len(dry_runs) - 1, DRY_RUNS if len(dry_runs) <= DRY_RUNS else 2 * DRY_RUNS)
            likely = (x for x, _ in queue.likely() if families[x.core, x.pp, x.dp, x.rows] < alike)
            asks = (partial(self.exact, x) for x in itertools.chain((c,), self._others(likely, dry_runs)))
            self.library.records.begin(next(asks), asks)
            try:
                prices[c] = self.exact(c)
            except ShardcError as e:
                self.refused[str(c)] = e
                dry_runs.discard(run)  # it was none
            else:
                queue.priced(c, rough, prices[c])
            if families.total() >= PRICED:
                break
        self._second(ranked, prices)
        for c in [c for c in list(prices)[:1] if c.sequence_parallel]:
            prices[replace(c, sequence_parallel=False)] = self.exact(replace(c, sequence_parallel=False))
        return prices

    def _second(self, ranked: list[tuple[Choice, Rough]], prices: dict[Choice, Priced]) -> None:
        """Price choices of other kinds until a second one fits. Estimates are off by schedule: those of a schedule are
        scaled by what its exact prices were.
        """

        def kind(c: Choice) -> object:
            return c.core, c.pp, c.dp, c.schedule

        scale: dict[str, float] = {}
        for c, rough in ranked:
            if c in prices:
                scale[c.schedule] = max(scale.get(c.schedule, 1.0), prices[c].needs / rough.peak)
        fitting = {kind(c) for c, p in prices.items() if p.needs <= self.memory}
        rest = [c for c, rough in ranked if rough.peak * scale.get(c.schedule, 1.0) <= self.memory]
        tries = [c for c in rest if c not in prices and kind(c) not in fitting][:SECOND]
        for c in tries:
            if len(fitting) > 1:
                return
            self.on(str(c), 0, 0)
            try:
                prices[c] = self.exact(c)
            except ShardcError as e:
                self.refused[str(c)] = e
                continue
            if prices[c].needs <= self.memory:
                fitting.add(kind(c))

    def _others(self, likely: Iterable[Choice], dry_runs: Iterable[object]) -> Iterator[Choice]:
        """Those that want other dry runs than these, and than one another."""
        known = set(dry_runs)
        for c in likely:
            if (run := self._dry_run(c)) not in known:
                known.add(run)
                yield c
                if len(known) > DRY_RUNS:
                    return

    def _dry_run(self, c: Choice) -> object:
        """A key that is equal for choices priced from the same dry run: of a model of layers, for any schedule and
        stages.
        """
        whole = (
            (c.pp, c.schedule, c.per_rank)
            if self.library.facts.layers is None
            else (SCHEDULES[c.schedule].splits_backward, c.pp == 1)
        )
        return c.core, c.dp, c.outer, c.over_experts, c.zero, c.kept, c.offload, c.rows, min(c.microbatches, 3), whole


class Queue:
    """Choices with their estimates, the best first: those that seem to fit by time, then the others by memory. What one
    was priced at tells how far off the estimates of others like it are, in time, and by how much what is reserved is
    more than what is live; and the rest is put in order anew. What cannot be better than the best that fits is left
    out. ranked: in that order.
    """

    def __init__(self, ranked: list[tuple[Choice, Rough]], memory: float, outside: float) -> None:
        self._memory, self._outside = memory, outside
        self._rest: dict[_Alike, list[tuple[Choice, Rough]]] = {}
        for c, rough in ranked:
            self._rest.setdefault(_Alike.of(c), []).append((c, rough))
        self._off: dict[object, float] = {}
        self._reserved: dict[object, tuple[float, float]] = {}  # (times what is live, bytes beside it)
        self._next = {alike: self._first(alike) for alike in self._rest}
        self._best = math.inf
        self._least = 1.0

    def priced(self, c: Choice, rough: Rough, exact: Priced) -> None:
        """The exact price of a choice that was estimated."""
        alike = _Alike.of(c)
        self._off |= dict.fromkeys(alike.likest, exact.seconds / rough.seconds)
        times, beside = max(exact.reserved / rough.peak, 1.0), max(exact.reserved - rough.peak, 0.0)
        known = self._reserved.get(alike.kind, (math.inf, math.inf))
        self._reserved[alike.kind] = min(times, known[0]), min(beside, known[1])
        self._outside = max(self._outside, exact.outside)
        self._least = min(self._least, exact.seconds / rough.seconds)
        if exact.needs <= self._memory:
            self._best = min(self._best, exact.seconds)
        self._next = {alike: self._first(alike) for alike, some in self._rest.items() if some}

    def __iter__(self) -> Iterator[tuple[Choice, Rough]]:
        while self._next:
            alike = min(self._next, key=self._key)
            found = self._next.pop(alike)
            self._rest[alike].remove(found)
            if self._rest[alike]:
                self._next[alike] = self._first(alike)
            if not self._behind(alike, found[1]):
                yield found
            elif all(self._behind(other, rough) for other, (_, rough) in self._next.items()):
                return

    def _behind(self, alike: _Alike, rough: Rough) -> bool:
        """Whether one cannot be better than the best that fits."""
        slow, large = SLOWER * self._best / self._least, LARGER * self._most(alike.kind)
        return self._best < math.inf and (rough.seconds > slow or rough.peak > large)

    def likely(self) -> Iterator[tuple[Choice, Rough]]:
        """What may come next, the best first, as far as that is known."""

        def fitting(alike: _Alike) -> Iterator[tuple[float, tuple[Choice, Rough]]]:
            most, off = self._most(alike.kind), self._times(alike)
            return ((x[1].seconds * off, x) for x in self._rest[alike] if x[1].peak <= most)

        yield from (x for _, x in heapq.merge(*map(fitting, self._rest), key=itemgetter(0)))
        yield from (self._next[alike] for alike in sorted(self._next, key=self._key))

    def _first(self, alike: _Alike) -> tuple[Choice, Rough]:
        some, most = self._rest[alike], self._most(alike.kind)
        return next((x for x in some if x[1].peak <= most), None) or min(some, key=lambda x: x[1].peak)

    def _most(self, kind: object) -> float:
        """Live bytes with which one fits, as far as that is known: by the least that a choice of its kind reserved. A
        kind that has no exact price yet is taken for the best of the others: what these reserve beside live bytes may
        grow with them, or not.
        """
        room = self._memory - self._outside
        if (known := self._reserved.get(kind)) is not None:
            return room / known[0]
        return max((max(room / times, room - beside) for times, beside in self._reserved.values()), default=room)

    def _times(self, alike: _Alike) -> float:
        """How many times its estimate one takes, by the last exact price of those most like it."""
        return next((self._off[x] for x in alike.likest if x in self._off), 1.0)

    def _key(self, alike: _Alike) -> tuple[bool, float]:
        _, rough = self._next[alike]
        over = rough.peak > self._most(alike.kind)
        return over, rough.peak if over else rough.seconds * self._times(alike)


class _Alike(NamedTuple):
    """What choices have in common whose estimates are off alike. kind: what hides communication in the same way, has
    one stage a rank or several, which are less even, divides backward or not, and makes gaps in memory alike; split:
    what sends the same inside of layers, () if nothing does.
    """

    kind: tuple[object, ...]
    split: tuple[object, ...]

    @property
    def likest(self) -> list[object]:
        """Those whose estimates are off as these are: both alike, or the split, or the kind."""
        return [self, *([self.split] if self.split else []), self.kind]

    @staticmethod
    def of(c: Choice) -> _Alike:
        kind = c.zero, c.kept, c.offload, c.per_rank > 1, SCHEDULES[c.schedule].splits_backward
        split = ("tp", c.tp, "ep", c.ep, "cp", c.cp, c.sequence_parallel)
        return _Alike(kind, split if max(c.tp, c.ep, c.cp) > 1 else ())
