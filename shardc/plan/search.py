"""Search all choices: tier one (estimate) ranks them, tier two (price) prices the best by dry runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from shardc.errors import ShardcError
from shardc.plan import estimate
from shardc.plan.estimate import ROWS, Block, Rough, Table
from shardc.plan.price import Priced, price
from shardc.plan.runs import Library
from shardc.plan.space import KEEPS, OFFLOADS, Choice, Core, Keep, budget, choices, longer, spec, splits
from shardc.plan.stage import Vector
from shardc.runtime.schedule import SCHEDULES
from shardc.spec import Spec

#: The most blocks that tier one runs for each kind of splits, after those that it begins with.
BLOCKS = 10
#: A prediction is raised by this share for each doubling of an axis from the block that ran: it omits some collectives.
LESS_SURE = 0.02
#: The most choices that tier two prices, and the most dry runs for them; twice as many dry runs if nothing fits.
PRICED, DRY_RUNS = 24, 6
#: The most choices to price that differ only in ZeRO and schedule: their estimates have the same error.
ALIKE = 4
#: Once a choice fits, others are priced if their estimate is at most this many times its price, and the memory.
SLOWER, LARGER = 1.12, 1.3
#: A choice on fewer devices may be faster than the best although its estimate is up to this many times its price.
UNSURE = 1.15
#: Shares of memory to fill with live bytes: the next is tried if choices that should fit do not.
TIGHT = (1.0, 0.9, 0.75, 0.6)
#: The most choices of a split that fit and may be priced exactly.
BEST = 64
#: Choices whose estimate is this many times the memory are not priced.
FAR = 2.0
#: What recomputation makes of a block until one with it runs: seconds of forward that backward runs again, and bytes
#: that are kept, as shares.
AGAIN: dict[Keep, tuple[float, float]] = {
    "cheap": (0.05, 0.15),
    "products": (0.15, 0.15),
    "selective": (0.3, 0.11),
    "sent": (0.4, 0.11),
    "full": (1.0, 0.06),
    "host": (1.0, 0.01),
}
#: The most ranks of experts to begin with.
EXPERTS = 8
OnProgress = Callable[[str, int, int], None]
Ranked = list[tuple[Choice, Rough]]


@dataclass
class Search:
    """The search for one model on one kind of device.

    on: called with progress (subject, done, total). refused: compile's error for each refused split, by name.
    considered: number of ranked choices.
    """

    library: Library
    on: OnProgress = lambda subject, done, total: None
    refused: dict[str, ShardcError] = field(default_factory=dict)
    considered: int = 0
    _blocks: dict[Core, Block | None] = field(default_factory=dict)
    _tables: dict[object, Table | None] = field(default_factory=dict)
    _lines: dict[object, list[tuple[float, float]]] = field(default_factory=dict)
    _exact: dict[Choice, Priced | None] = field(default_factory=dict)

    @property
    def room(self) -> float:
        """Bytes for tensors in an estimate: the memory without the least that libraries take."""
        return max(self.library.usable - self.library.device.outside_bytes(0), 1.0)

    def best(self, devices: int, batch: int) -> dict[Choice, Priced]:
        """Price the best choices exactly, also on 1/2, 1/4, ... of the devices if that may be faster."""
        exact = dict[Choice, Priced]()

        def fastest() -> float:
            return min((p.step_seconds for p in exact.values() if p.fits), default=math.inf)

        for tight in TIGHT:  # reserved memory exceeds live memory: if nothing fits, leave room
            some = self.ranked(devices, batch, tight)
            exact |= self.refine(some)
            if fastest() < math.inf or not any(r.peak <= tight * self.room for _, r in some):
                break
        least = 3 * self.library.products
        while fastest() < math.inf and devices % 2 == 0:
            devices //= 2
            limit = UNSURE * fastest()
            if least * batch / devices > limit:  # fewer devices are even slower
                break
            some = self.ranked(devices, batch, below=limit)
            if some and some[0][1].peak <= self.room and some[0][1].seconds <= limit:
                exact |= self.refine(some)
        return exact

    # --- tier one

    def block(self, core: Core) -> Block | None:
        """Return a split's block, which runs once; None if compile refuses it, also without sequence parallelism."""
        if core not in self._blocks:
            axes = zip(("tp", "ep", "cp"), core[:3], strict=True)
            name = ", ".join(f"{a}={n}" for a, n in axes if n > 1 or a == "tp")
            name = name if core.checkpoint == "none" else f"{name}, recompute {core.checkpoint}"
            self.on(f"one block at {name}", 0, 0)
            self._blocks[core] = None
            for one in dict.fromkeys((core, core._replace(sequence_parallel=False))):
                try:
                    stages = [self.library.block(one, rows) for rows in ROWS]
                    self._blocks[core] = Block.of(stages, sequence_parallel=one.sequence_parallel)
                except ShardcError as e:
                    self.refused[name] = e
                else:
                    self.refused.pop(name, None)
                    break
        return self._blocks[core]

    def ranked(self, devices: int, batch: int, tight: float = 1.0, below: float = math.inf) -> Ranked:
        """Return choices with estimates: those that seem to fit, by time, then the others, by memory.

        Recomputation is tried only if some choice does not fit without it; cut rows only if nothing fits or there are
        few rows. If still nothing fits, recomputed layers keep values in host memory, tensor parallelism goes over
        nodes, and the state is in host memory.
        tight: share of the room that live bytes may take. below: seconds; slower choices are of no use.
        """
        facts, node, room = self.library.facts, self.library.device.node, tight * self.room
        cores, cut = splits(facts, devices, node), longer(facts, devices, node)
        few = batch * node < devices
        plain = [*cores, *cut]
        kinds: list[tuple[list[Core], tuple[Keep, ...], bool]] = [(plain if few else cores, KEEPS, False)]
        if below == math.inf:
            over_nodes = splits(facts, devices, node, over_nodes=True)
            kinds += [(cut, KEEPS, False), (plain, ("host",), False), (over_nodes, KEEPS, False)]
            kinds += [(plain, (*KEEPS, "host"), True)]
        found, runs = dict[tuple[Core, bool], _Estimate](), 0

        def add(core: Core, on_host: bool) -> None:
            if (table := self._table(core, devices, batch, on_host)) is not None:
                found[core, on_host] = self._estimate(core, table, room)

        while True:
            best = min((x.key for x in found.values() if x.ran), default=(True, math.inf))
            limit = best if best[0] else (False, min(best[1], below))
            left = [way for way, x in found.items() if not x.ran and x.key < limit]
            if left and runs < BLOCKS:
                core, _ = min(left, key=lambda way: found[way].key)
                refused = [x for x in _needed(core) if self.block(x) is None]
                runs += not refused
                found = {way: x for way, x in found.items() if not any(y in _needed(way[0]) for y in refused)}
                for way in [way for way, x in found.items() if not x.ran and x.sources != self._sources(way[0])]:
                    add(*way)
            elif best[0] and kinds:
                some, keeps, on_host = kinds.pop(0)
                runs = 0
                for core in _corners(some) if below == math.inf else ():
                    self.block(core)
                for core in some:
                    add(core, on_host)
                    x = found.get((core, on_host))
                    if x is not None and facts.regions and (x.peaks > room).any():
                        for keep in keeps:
                            add(core._replace(checkpoint=keep), on_host)
            else:
                break
        self.considered += sum(len(x.seconds) for x in found.values())
        every = [x for (core, _), e in found.items() if e.ran for x in self._fastest(core, e, room)]
        return sorted(every, key=lambda x: (x[1].peak > room, x[1].seconds if x[1].peak <= room else x[1].peak))

    def _estimate(self, core: Core, table: Table, room: float) -> _Estimate:
        ran, sources = all(self._blocks.get(x) for x in _needed(core)), self._sources(core)
        seconds, peaks = estimate.estimated(table, self._at(core), core, self.library)
        if not ran:
            seconds *= 1 + LESS_SURE * min(estimate.distance(near, core) for near in sources if near is not None)
        fits = peaks <= room
        key = (False, float(seconds[fits].min())) if fits.any() else (True, float(peaks.min()))
        return _Estimate(ran, table, seconds, peaks, key, sources)

    def _fastest(self, core: Core, x: _Estimate, room: float) -> Iterator[tuple[Choice, Rough]]:
        """Yield a split's fastest choices that fit, and those that need the least memory."""
        block = self._blocks[_needed(core)[0]]
        assert block is not None
        fits = x.peaks <= room
        some = [*np.argsort(np.where(fits, x.seconds, np.inf), kind="stable")[: min(BEST, int(fits.sum()))]]
        some += [*np.argsort(x.peaks, kind="stable")[: BEST // 4]]
        for i in dict.fromkeys(some):
            c = replace(x.table.choices[i], checkpoint=core.checkpoint, sequence_parallel=block.sequence_parallel)
            yield c, Rough(float(x.seconds[i]), float(x.peaks[i]))

    def _nearest(self, core: Core, keep: Keep) -> Core | None:
        ran = [c for c, b in self._blocks.items() if b is not None and c.checkpoint == keep]
        return min(ran, key=lambda c: estimate.distance(c, core), default=None)

    def _sources(self, core: Core) -> tuple[Core | None, ...]:
        """Return the nearest blocks that ran without recomputation, and with it."""
        return self._nearest(core, "none"), self._nearest(core, _needed(core)[0].checkpoint)

    def _at(self, core: Core) -> Block:
        """Return a split's block. If it did not run: the nearest one, divided among other ranks and recomputed."""
        if (block := self._blocks.get(core)) is not None:
            return block
        if core.checkpoint != "none":
            return self._at(core._replace(checkpoint="none")).again(*self._again(core))
        near = self._nearest(core, "none")
        assert near is not None
        block = self._blocks[near]
        assert block is not None
        return block.scaled(estimate.factors(near, core, block, self.library.device))

    def _again(self, core: Core) -> tuple[float, float]:
        """Return the share of forward that backward runs again, and that of bytes that are kept.

        Both are those of the nearest block that ran with the same recomputation; a budget's are between `full` and
        nothing.
        """
        if (share := budget(core.checkpoint)) is not None:
            seconds, kept = self._again(core._replace(checkpoint="full"))
            return (1 - share) * seconds, share + (1 - share) * kept
        near = self._nearest(core, core.checkpoint)
        if near is None:
            return AGAIN[core.checkpoint]
        one, none = self._at(near).unit, self._at(near._replace(checkpoint="none")).unit
        forward, kept = float(none[estimate.F].sum()), float(none[estimate.KEPT].sum())
        more = float((one - none)[estimate.B].sum())
        return more / forward if forward else 0.0, float(one[estimate.KEPT].sum()) / kept if kept else 1.0

    def _table(self, core: Core, devices: int, batch: int, on_host: bool) -> Table | None:
        key = core[:3], core.checkpoint == "none", devices, batch, on_host
        if key not in self._tables:
            most = batch if self.library.microbatches > 1 else 1
            some = list(choices(core, devices, batch, self.library.facts.cuts, most, self.library.device.node))
            if on_host:  # offloading parameters needs gathers before each use
                some += [replace(c, offload=o) for c in some for o in OFFLOADS if o and (o != "all" or c.zero == 3)]
            self._tables[key] = Table(some, self.library.device, self._lines) if some else None
        return self._tables[key]

    def spreads(self, devices: int, batch: int, cores: Iterable[Core]) -> bool:
        """Return whether so many rows can be spread over so many devices by one of these splits."""
        some = (core for core in cores if self._table(core, devices, batch, False) is not None)
        return any(self.block(core) is not None for core in some)

    # --- tier two

    def exact(self, c: Choice) -> Priced | None:
        """Return the exact price of a choice; None if compile refuses it."""
        if c not in self._exact:
            try:
                self._exact[c] = price(self.library, Spec.load(spec(c, self.library.facts)), c.batch, whole_layers=True)
            except ShardcError as e:
                self._exact[c], self.refused[str(c)] = None, e
        return self._exact[c]

    def refine(self, ranked: Ranked) -> dict[Choice, Priced]:
        """Return exact prices of the best; each corrects the estimates of similar choices. More if none fits."""
        prices: dict[Choice, Priced] = {}
        dry_runs, families = set[object](), Counter[object]()
        alike = ALIKE if self.library.facts.layers else ALIKE // 2  # each needs its own dry run
        off = dict[object, tuple[float, float]]()  # exact to estimated seconds and bytes, by kind of choice
        usable, outside = self.library.usable, self.library.device.outside_bytes(0)
        best, least = math.inf, 1.0

        def corrected(x: tuple[Choice, Rough]) -> tuple[bool, float]:
            """Return a key that puts first what fits, by time, then the rest, by memory."""
            seconds, nbytes = _of_kind(x[0], off)
            needs = (x[1].peak + outside) * nbytes
            return (True, needs) if needs > usable else (False, x[1].seconds * seconds)

        rest = list(ranked)
        while rest and len(prices) < PRICED:
            c, rough = one = min(rest, key=corrected)
            rest.remove(one)
            family, run = (c.core, c.pp, c.dp, c.rows), self._dry_run(c)
            if families[family] >= alike:
                continue
            if run not in dry_runs and len(dry_runs) >= (DRY_RUNS if best < math.inf else 2 * DRY_RUNS):
                continue
            if best < math.inf and rough.seconds * min(_of_kind(c, off)[0], least) > SLOWER * best:
                continue
            if prices and rough.peak > (LARGER if best < math.inf else FAR) * usable:
                continue
            families[family] += 1
            self.on(str(c), len(prices), PRICED)
            if (exact := self.exact(c)) is None:
                continue
            dry_runs.add(run)
            prices[c] = exact
            ratio = exact.step_seconds / rough.seconds
            off |= dict.fromkeys(_kinds(c), (ratio, exact.needs / max(rough.peak + outside, 1.0)))
            least = min(least, ratio)
            best = min(best, exact.step_seconds) if exact.fits else best
        self._vary(prices)
        return prices

    def _vary(self, prices: dict[Choice, Priced]) -> None:
        """Price variants of the best that tier one does not have, each on top of the best so far.

        Variants: no sequence parallelism, an encoder's rows split over more axes, compiled element-wise work.
        """

        def best() -> Choice | None:
            fits = {c: p.step_seconds for c, p in prices.items() if p.fits}
            return min(fits, key=lambda c: fits[c], default=None)

        facts = self.library.facts
        changes: tuple[dict[str, Any], ...] = {"sequence_parallel": False}, {"encoder_rows": True}, {"compiled": True}
        for change in changes:
            if (c := best()) is None:
                return
            other = replace(c, **change)
            on_cpu = self.library.device.kind == "cpu"
            if spec(c, facts) == spec(other, facts) or (on_cpu and other.compiled):
                continue
            self.on(str(other), len(prices), len(prices))
            if (exact := self.exact(other)) is not None:
                prices[other] = exact

    def _dry_run(self, c: Choice) -> object:
        """Return a key that is equal for choices priced from the same dry run.

        With repeated layers, pipelines of any length share a run if their schedules split backward in the same way.
        """
        few = SCHEDULES[c.schedule].splits_backward, c.pp == 1
        whole = (c.pp, c.schedule, c.per_rank) if self.library.facts.layers is None else few
        return c.core, c.dp, c.outer, c.over_experts, c.zero, c.kept, c.offload, c.rows, min(c.microbatches, 3), whole


class _Estimate(NamedTuple):
    """The estimates of a split's choices. ran: whether its block ran; sources: the blocks that it follows from.

    key: (whether nothing fits, seconds of the fastest that fits, or else the fewest bytes).
    """

    ran: bool
    table: Table
    seconds: Vector
    peaks: Vector
    key: tuple[bool, float]
    sources: tuple[Core | None, ...]


def _needed(core: Core) -> list[Core]:
    """Return the blocks that a split's estimate needs: with a budget, those of `full` and `none`."""
    keeps: tuple[Keep, ...] = (core.checkpoint,) if budget(core.checkpoint) is None else ("full", "none")
    return [core._replace(checkpoint=k) for k in keeps]


def _kinds(c: Choice) -> tuple[object, ...]:
    """Return the kinds of choices whose estimates have similar errors, the most similar first."""
    kind = c.zero, c.kept, c.offload, c.per_rank > 1, SCHEDULES[c.schedule].splits_backward
    return (kind, c.core), ("core", c.core), kind


def _of_kind(c: Choice, known: dict[object, tuple[float, float]]) -> tuple[float, float]:
    return next((known[k] for k in _kinds(c) if k in known), (1.0, 1.0))


def _corners(cores: Sequence[Core]) -> list[Core]:
    """Return the splits to begin with: no axis, each axis at its largest (ep: at most EXPERTS), and both."""
    tp, ep = max((c.tp for c in cores), default=1), [c.ep for c in cores if c.ep <= EXPERTS]
    ends = {1, tp}, {1, max(ep, default=1)}
    return [c for c in cores if c.tp in ends[0] and c.ep in ends[1] and c.cp == 1]
