"""Search all choices: tier one (rank) estimates them, tier two (price) prices the best by dry runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from shardc.errors import ShardcError
from shardc.plan import rank
from shardc.plan.price import Priced, price
from shardc.plan.rank import ROWS, Block, Rough, Table
from shardc.plan.runs import Library
from shardc.plan.space import (
    CHECKPOINTS,
    OFFLOADS,
    Choice,
    Core,
    Keep,
    budget,
    choices,
    divisors,
    sequence_widths,
    spec,
    tensor_widths,
)
from shardc.plan.stage import Vector
from shardc.runtime.schedule import SCHEDULES
from shardc.spec import Spec

#: The most blocks that tier one runs after those that it begins with.
BLOCKS = 10
#: A prediction is raised by this share for each doubling of an axis from the block that ran: it omits some collectives.
LESS_SURE = 0.02
#: The most choices that tier two prices, and the most dry runs for them; twice as many dry runs if nothing fits.
PRICED, DRY_RUNS = 24, 6
#: The most choices to price that differ only in ZeRO and schedule: their estimates have the same error.
ALIKE = 4
#: Once a choice fits, others are priced if their estimate is at most this many times its price, and the memory.
SLOWER, LARGER = 1.12, 1.3
#: The most choices of a split that fit and may be priced exactly.
BEST = 64
#: Choices whose estimate is this many times the memory are not priced.
FAR = 2.0
#: Position of each recomputation between none and full at best, in time and in bytes, until a block of it runs.
SHARES: dict[Keep, tuple[float, float]] = {
    "cheap": (0.05, 0.9),
    "products": (0.15, 0.9),
    "selective": (0.3, 0.95),
    "sent": (0.4, 0.95),
    "half": (0.5, 0.5),
    "quarter": (0.75, 0.75),
    "eighth": (0.875, 0.875),
    "full": (1.0, 1.0),
    "host": (1.0, 1.05),
}
#: Recomputation to try if some choice does not fit without; `host` only if nothing else fits.
KEEPS: tuple[Keep, ...] = tuple(k for k in CHECKPOINTS if k not in ("none", "host"))
OnProgress = Callable[[str, int, int], None]


@dataclass
class Search:
    """The search for one model on one kind of device.

    on: called with progress (subject, done, total). refused: compile's error for each refused split, by name.
    considered: number of ranked choices. tight: the share of the room that live bytes may take in an estimate.
    """

    library: Library
    on: OnProgress = lambda subject, done, total: None
    refused: dict[str, ShardcError] = field(default_factory=dict)
    considered: int = 0
    tight: float = 1.0
    _blocks: dict[Core, Block | None] = field(default_factory=dict)
    _tables: dict[object, Table | None] = field(default_factory=dict)
    _lines: dict[object, tuple[float, float]] = field(default_factory=dict)
    _exact: dict[Choice, Priced | None] = field(default_factory=dict)

    @property
    def room(self) -> float:
        """Bytes for tensors in an estimate: `tight` of the memory, without the least that libraries take."""
        return max(self.tight * (self.library.usable - self.library.device.outside_bytes(0)), 1.0)

    @property
    def cuts(self) -> int:
        layers = self.library.facts.layers
        return layers.number if layers else self.library.facts.cuts

    # --- tier one

    def splits(self, devices: int, *, over_nodes: bool = False) -> list[Core]:
        """Return the splits of so many devices without recomputation, also those that compile refuses.

        Tensor parallelism is inside a node, or with `over_nodes` over several nodes.
        """
        facts = self.library.facts
        return [
            Core(tp, ep, sequence_parallel=tp > 1 and bool(facts.sequences))
            for tp in tensor_widths(devices, self.library.device.node)[over_nodes]
            for ep in (divisors(facts.number) if facts.number else [1])
            if devices % (tp * ep) == 0
        ]

    def longer(self, core: Core, devices: int) -> list[Core]:
        """Return the split with each number of ranks that can cut the sequence."""
        widths = sequence_widths(devices // (core.tp * core.ep), self.library.facts.sequence)
        return [core._replace(cp=cp) for cp in widths]

    def block(self, core: Core) -> Block | None:
        """Return a split's block, which runs once; None if compile refuses it."""
        if core not in self._blocks:
            axes = zip(("tp", "ep", "cp"), core[:3], strict=True)
            name = ", ".join(f"{a}={n}" for a, n in axes if n > 1 or a == "tp")
            name = name if core.checkpoint == "none" else f"{name}, recompute {core.checkpoint}"
            self.on(f"one block at {name}", 0, 0)
            try:
                self._blocks[core] = Block.of([self.library.block(core, rows) for rows in ROWS])
            except ShardcError as e:
                self._blocks[core] = None
                self.refused[name] = e
            else:
                self.refused.pop(name, None)
        return self._blocks[core]

    def accepted(self, core: Core) -> Core | None:
        """Return the split, or else the same without sequence parallelism; None if compile refuses both."""
        some = dict.fromkeys((core, core._replace(sequence_parallel=False)))
        return next((one for one in some if self.block(one) is not None), None)

    def ranked(
        self, devices: int, batch: int, cores: Sequence[Core], *, on_host: bool = False, below: float = math.inf
    ) -> list[tuple[Choice, Rough]]:
        """Return choices with estimates: those that seem to fit, by time, then the others, by memory.

        Recomputation is tried only if some choice does not fit without it. Cut rows are tried only if nothing fits or
        there are few rows. If still nothing fits, recomputed layers keep values in host memory.
        on_host: also with offload. below: seconds; slower choices are of no use.
        """
        found = self._explored(cores, devices, batch, on_host, below)

        def fits() -> bool:
            return any(not x.key[0] for x in found.values())

        if not fits() or batch * self.library.device.node < devices:  # cut rows
            longer = [longer for core in cores for longer in self.longer(core, devices)]
            found |= self._explored(longer, devices, batch, on_host, below)
        if not fits():  # recomputed layers keep values in host memory
            plain = [core for core in found if core.checkpoint == "none"]
            found |= self._explored(plain, devices, batch, on_host, below, ("host",))
        every = [x for core in found if found[core].run for x in found[core].best(core, self._sp(core))]
        self.considered += sum(len(x.seconds) for x in found.values())
        every.sort(key=lambda x: (x[1].peak > self.room, x[1].seconds if x[1].peak <= self.room else x[1].peak))
        return every

    def _explored(
        self,
        cores: Sequence[Core],
        devices: int,
        batch: int,
        on_host: bool,
        below: float,
        keeps: Sequence[Keep] = KEEPS,
    ) -> dict[Core, _Found]:
        """Estimate the choices of these splits, also with recomputation, and run the blocks of the best."""
        if below == math.inf:
            for core in _corners(cores):
                self.accepted(core)
        ways = dict.fromkeys(way for core in cores for way in self._ways(core, devices, batch, on_host, keeps))
        found, runs = dict[Core, _Found](), 0
        while True:
            for core in ways:
                if core not in found or not (found[core].run or found[core].known == self._sources(core)):
                    found[core] = self._found(core, devices, batch, on_host)
            best = min((found[core].key for core in ways if found[core].run), default=(True, math.inf))
            limit = best if best[0] else (False, min(best[1], below))
            left = [core for core in ways if not found[core].run and found[core].key < limit]
            if not left or runs == BLOCKS:
                return {core: found[core] for core in ways}
            core = min(left, key=lambda core: found[core].key)
            refused = [x for x in self._needed(core) if self.accepted(x) is None]
            ways = {c: None for c in ways if not any(x in self._needed(c) for x in refused)}
            runs += not refused

    def _sp(self, core: Core) -> bool:
        """Return whether the block that ran for a split has its sequence split along tp."""
        return core.sequence_parallel and self._blocks.get(self._needed(core)[0]) is not None

    def _ways(self, core: Core, devices: int, batch: int, on_host: bool, keeps: Sequence[Keep]) -> Iterator[Core]:
        """Yield a split, and the same with recomputation if one of its choices does not fit."""
        yield core
        if self.library.facts.regions and (self._found(core, devices, batch, on_host).peaks > self.room).any():
            yield from (core._replace(checkpoint=k) for k in keeps)

    def _needed(self, core: Core) -> list[Core]:
        """Return the blocks that a split's estimate follows from: with a budget, those of `full` and `none`."""
        keeps: tuple[Keep, ...] = (core.checkpoint,) if budget(core.checkpoint) is None else ("full", "none")
        return [core._replace(checkpoint=k) for k in keeps]

    def _sources(self, core: Core) -> tuple[Core | None, ...]:
        """Return the nearest block that ran with the same recomputation, with none, and with `full`."""
        ran = [c for c, b in self._blocks.items() if b is not None]
        keeps = dict.fromkeys((core.checkpoint, "none", "full"))
        near = ([c for c in ran if c.checkpoint == k] for k in keeps)
        return tuple(min(some, key=lambda c: rank.distance(c, core), default=None) for some in near)

    def _known(self, core: Core) -> Block | None:
        some = (core, core._replace(sequence_parallel=False))
        return next((b for one in some if (b := self._blocks.get(one)) is not None), None)

    def _found(self, core: Core, devices: int, batch: int, on_host: bool) -> _Found:
        table = self._table(core, devices, batch, on_host)
        each = [self._known(x) for x in self._needed(core)]
        if table is None:
            return _Found(all(each), None, np.zeros(0), np.zeros(0), self.room, ())
        if all(each):
            share = budget(core.checkpoint)
            block = each[0] if share is None else each[0].between(each[1], share, share)  # type: ignore[union-attr,arg-type]
        else:
            block = self._foretold(core)
        assert block is not None
        seconds, peaks = rank.priced(table, block, core, self.library)
        sources = self._sources(core)
        if not all(each):
            seconds = seconds * (1 + LESS_SURE * min(rank.distance(near, core) for near in sources if near is not None))
        return _Found(all(each), table, seconds, peaks, self.room, sources)

    def _foretold(self, core: Core) -> Block:
        """Predict the block of a split that did not run.

        Without recomputation: the nearest block that ran, divided among other ranks. With recomputation: as far between
        none and full as in the nearest block with the same recomputation.
        """
        keep, plain = core.checkpoint, core._replace(checkpoint="none")
        ran = [c for c, b in self._blocks.items() if b is not None and c.checkpoint == keep]
        near = min(ran, key=lambda c: rank.distance(c, core), default=None)
        if keep == "none":
            assert near is not None
            block = self._blocks[near]
            assert block is not None
            return block.scaled(rank.factors(near, core, block, self.library.device))
        none = self._at(plain)
        full = _all_again(none) if keep == "full" else self._at(core._replace(checkpoint="full"))
        seconds, nbytes = SHARES[keep] if near is None else self._shares(near)
        return none.between(full, seconds, nbytes)

    def _at(self, core: Core) -> Block:
        return self._known(core) or self._foretold(core)

    def _shares(self, near: Core) -> tuple[float, float]:
        """Return how far a recomputation is on the way from none to full, in time and in bytes."""
        none = self._at(near._replace(checkpoint="none"))
        full = _all_again(none) if near.checkpoint == "full" else self._at(near._replace(checkpoint="full"))
        one, less, more = self._at(near).unit, none.unit, full.unit
        each = []
        for columns in (rank.B, rank.KEPT):
            whole = float((more - less)[columns].sum())
            each.append(float((one - less)[columns].sum()) / whole if whole else 1.0)
        return each[0], each[1]

    def _table(self, core: Core, devices: int, batch: int, on_host: bool) -> Table | None:
        key = core[:3], core.checkpoint == "none", devices, batch, on_host
        if key not in self._tables:
            most = batch if self.library.microbatches > 1 else 1
            some = list(choices([core], devices, batch, self.cuts, most, self.library.device.node))
            if on_host:  # offloading parameters needs gathers before each use
                some += [replace(c, offload=o) for c in some for o in OFFLOADS if o and (o != "all" or c.zero == 3)]
            self._tables[key] = Table(some, self.library.device, self._lines) if some else None
        return self._tables[key]

    def spreads(self, devices: int, batch: int, cores: Iterable[Core]) -> bool:
        """Return whether so many rows can be spread over so many devices by one of these splits."""
        some = (core for core in cores if self._table(core, devices, batch, False) is not None)
        return any(self.accepted(core) is not None for core in some)

    # --- tier two

    def exact(self, c: Choice) -> Priced | None:
        """Return the exact price of a choice; None if compile refuses it."""
        if c not in self._exact:
            try:
                self._exact[c] = price(self.library, Spec.load(spec(c, self.library.facts)), c.batch)
            except ShardcError as e:
                self._exact[c], self.refused[str(c)] = None, e
        return self._exact[c]

    def refine(self, ranked: Sequence[tuple[Choice, Rough]]) -> dict[Choice, Priced]:
        """Return exact prices of the best; each corrects the estimates of similar choices. More if none fits."""
        prices: dict[Choice, Priced] = {}
        dry_runs, families = set[object](), Counter[object]()
        alike = ALIKE if self.library.facts.layers else ALIKE // 2  # each needs its own dry run
        off = _Off(self.library.usable, self.library.device.outside_bytes(0))
        rest = list(ranked)
        while rest and len(prices) < PRICED:
            c, rough = min(rest, key=lambda x: off.key(*x))
            rest.remove((c, rough))
            family, run = (c.core, c.pp, c.dp, c.rows), self._dry_run(c)
            most = DRY_RUNS if off.best < math.inf else 2 * DRY_RUNS
            if families[family] >= alike or (run not in dry_runs and len(dry_runs) >= most):
                continue
            if off.behind(c, rough) or (prices and rough.peak > FAR * self.library.usable):
                continue
            families[family] += 1
            dry_runs.add(run)
            self.on(str(c), len(prices), PRICED)
            if (exact := self.exact(c)) is None:
                dry_runs.discard(run)
            else:
                prices[c] = exact
                off.priced(c, rough, exact)
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
        whole = (
            (c.pp, c.schedule, c.per_rank)
            if self.library.facts.layers is None
            else (SCHEDULES[c.schedule].splits_backward, c.pp == 1)
        )
        return c.core, c.dp, c.outer, c.over_experts, c.zero, c.kept, c.offload, c.rows, min(c.microbatches, 3), whole


class _Found(NamedTuple):
    """The estimates of a split's choices. run: whether its block ran; known: the blocks it follows from."""

    run: bool
    table: Table | None
    seconds: Vector
    peaks: Vector
    room: float
    known: tuple[Core | None, ...]

    @property
    def key(self) -> tuple[bool, float]:
        """(Whether nothing fits, seconds of the fastest that fits, or else the fewest bytes)."""
        fits = self.peaks <= self.room
        if fits.any():
            return False, float(self.seconds[fits].min())
        return True, float(self.peaks.min()) if len(self.peaks) else math.inf

    def best(self, core: Core, sequence_parallel: bool) -> Iterator[tuple[Choice, Rough]]:
        """Yield the fastest choices that fit, and those that need the least memory."""
        if self.table is None:
            return
        fits = self.peaks <= self.room
        some = [*np.argsort(np.where(fits, self.seconds, np.inf), kind="stable")[: min(BEST, int(fits.sum()))]]
        some += [*np.argsort(self.peaks, kind="stable")[: BEST // 4]]
        for i in dict.fromkeys(some):
            c = replace(self.table.choices[i], checkpoint=core.checkpoint, sequence_parallel=sequence_parallel)
            yield c, Rough(float(self.seconds[i]), float(self.peaks[i]))


@dataclass
class _Off:
    """Ratios of exact prices to estimates, in seconds and in bytes, by kind of choice."""

    memory: float
    outside: float
    best: float = math.inf
    least: float = 1.0
    _seconds: dict[object, float] = field(default_factory=dict)
    _bytes: dict[object, float] = field(default_factory=dict)

    @staticmethod
    def _kinds(c: Choice) -> tuple[object, object, object]:
        kind = c.zero, c.kept, c.offload, c.per_rank > 1, SCHEDULES[c.schedule].splits_backward
        return (kind, c.core), ("core", c.core), kind

    def priced(self, c: Choice, rough: Rough, exact: Priced) -> None:
        self._seconds |= dict.fromkeys(self._kinds(c), exact.step_seconds / rough.seconds)
        self._bytes |= dict.fromkeys(self._kinds(c), exact.reserved / max(rough.peak, 1.0))
        self.outside = max(self.outside, exact.outside)
        self.least = min(self.least, exact.step_seconds / rough.seconds)
        if exact.fits:
            self.best = min(self.best, exact.step_seconds)

    def _of(self, c: Choice, known: dict[object, float]) -> float:
        return next((known[k] for k in self._kinds(c) if k in known), 1.0)

    def key(self, c: Choice, rough: Rough) -> tuple[bool, float]:
        nbytes = rough.peak * self._of(c, self._bytes)
        over = nbytes > self.memory - self.outside
        return over, nbytes if over else rough.seconds * self._of(c, self._seconds)

    def behind(self, c: Choice, rough: Rough) -> bool:
        """Return whether a choice cannot be better than the best that fits."""
        slow = rough.seconds * min(self._of(c, self._seconds), self.least)
        return self.best < math.inf and (slow > SLOWER * self.best or rough.peak > LARGER * self.memory)


def _corners(cores: Sequence[Core]) -> list[Core]:
    """Return the splits to begin with: no axis, each axis at its largest (ep: at most _EXPERTS), and both."""
    tp, ep = max((c.tp for c in cores), default=1), [c.ep for c in cores if c.ep <= _EXPERTS]
    ends = {1, tp}, {1, max(ep, default=1)}
    return [c for c in cores if c.tp in ends[0] and c.ep in ends[1] and c.cp == 1]


#: The most ranks of experts to begin with.
_EXPERTS = 8


def _all_again(none: Block) -> Block:
    """Return a block with everything recomputed from one with nothing: each backward runs another forward."""

    def again(v: Vector) -> Vector:
        made = v.copy()
        made[rank.B] += v[rank.F]
        made[rank.KEPT] *= _BOUNDARY
        made[rank.HEIGHT] += v[rank.KEPT] * (1 - _BOUNDARY)
        return made

    # one layer at a time is recomputed
    first, one, last = (again(v) for v in (none.first, none.one, none.last))
    unit = again(none.unit)
    unit[rank.HEIGHT] = none.unit[rank.HEIGHT]
    return replace(none, first=first, one=one, unit=unit, last=last)


#: The share of a fully recomputed layer's bytes that is kept.
_BOUNDARY = 0.06
