"""Search all choices: tier one ranks them by arithmetic, tier two prices the best by dry runs.

A split is a way to divide a layer: (tp, ep, cp, what is recomputed). Tier one (shardc.plan.rank) climbs: it runs a
block of a few splits, then of the neighbours of the best so far, one step along an axis or with a little more or less
recomputed, until the best has no better neighbour. Tier two (shardc.plan.price) runs each spec.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
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
    choices,
    divisors,
    sequence_widths,
    spec,
    tensor_widths,
)
from shardc.plan.stage import Vector
from shardc.spec import Spec

#: The most blocks that a climb runs.
BLOCKS = 24
#: The most ranks of experts to begin with.
EXPERTS = 8
#: The most choices that tier two prices, and of those that differ only in ZeRO and schedule: their estimates have the
#: same error.
PRICED, ALIKE = 24, 6
#: Once a choice fits, others are priced if their estimate is at most this many times the best price.
SLOWER = 1.12
#: Choices whose estimate is this many times the memory are not priced.
FAR = 2.0
#: The most choices of a split that fit and may be priced exactly.
BEST = 64
#: Recomputation, from nothing to everything; the last keeps values in host memory, if nothing else fits.
KEEPS: tuple[Keep, ...] = tuple(CHECKPOINTS)
OnProgress = Callable[[str, int, int], None]


@dataclass
class Search:
    """The search for one model on one kind of device. on: called with progress (subject, done, total).

    refused: compile's error for each refused split, by name. considered: number of ranked choices. tight: the share of
    the memory that live bytes may take in an estimate.
    """

    library: Library
    on: OnProgress = lambda subject, done, total: None
    refused: dict[str, ShardcError] = field(default_factory=dict)
    considered: int = 0
    tight: float = 1.0
    _blocks: dict[Core, Block | None] = field(default_factory=dict)
    _tables: dict[object, Table | None] = field(default_factory=dict)
    _lines: dict[object, tuple[float, float]] = field(default_factory=dict)
    _exact: dict[Choice, Priced | ShardcError] = field(default_factory=dict)

    @property
    def memory(self) -> float:
        return self.library.device.memory

    @property
    def room(self) -> float:
        """Bytes for tensors in an estimate: `tight` of the memory, without the least that libraries take."""
        return max(self.tight * (self.memory - self.library.device.outside_bytes(0)), 1.0)

    @property
    def cuts(self) -> int:
        """The largest number of stages of a pipeline."""
        layers = self.library.facts.layers
        return layers.number if layers else self.library.facts.cuts

    # --- tier one

    def splits(self, devices: int, *, longer: bool = False, over_nodes: bool = False) -> list[Core]:
        """Return the splits of so many devices without recomputation, also those that compile refuses.

        longer: also those that cut the sequence; over_nodes: also tensor parallelism over several nodes.
        """
        facts, tokens = self.library.facts, self.library.sequence or self.library.facts.sequence
        inside, over = tensor_widths(devices, self.library.device.node)
        return [
            Core(tp, ep, cp, sequence_parallel=tp > 1 and bool(facts.sequences))
            for tp in (*inside, *(over if over_nodes else ()))
            for ep in (divisors(facts.number) if facts.number else [1])
            if devices % (tp * ep) == 0
            for cp in (1, *(sequence_widths(devices // (tp * ep), tokens) if longer else ()))
        ]

    def block(self, core: Core) -> Block | None:
        """Run a split's block once; if refused, without sequence parallelism; None if that is refused, too."""
        if core not in self._blocks:
            axes = zip(("tp", "ep", "cp"), core[:3], strict=True)
            name = ", ".join(f"{a}={n}" for a, n in axes if n > 1 or a == "tp")
            name = name if core.checkpoint == "none" else f"{name}, recompute {core.checkpoint}"
            self.on(f"one block at {name}", 0, 0)
            try:
                self._blocks[core] = self._run(core)
                self.refused.pop(name, None)
            except ShardcError as e:
                self.refused[name] = e
                plain = core._replace(sequence_parallel=False)
                self._blocks[core] = self.block(plain) if plain != core else None
        return self._blocks[core]

    def _run(self, core: Core) -> Block | None:
        share = (CHECKPOINTS[core.checkpoint] or {}).get("budget")
        if share is None:
            return Block.of(core, [self.library.block(core, rows) for rows in ROWS], self.library.device)
        full, none = (self.block(core._replace(checkpoint=keep)) for keep in ("full", "none"))
        return full and none and none.between(full, core.checkpoint, share)

    def ranked(self, devices: int, batch: int, below: float = math.inf) -> list[tuple[Choice, Rough]]:
        """Return choices with estimates: those that seem to fit, by time, then the others, by memory.

        If nothing fits, it tries more, step by step: cut rows (always if there are few); tensor parallelism over nodes,
        and recomputed layers that keep values in host memory; offload, whose copies have no price. below: seconds;
        slower choices are of no use.
        """
        few = batch * self.library.device.node < devices
        estimates = dict[Core, _Found]()
        for level in range(4):
            cores = self.splits(devices, longer=few or level > 0, over_nodes=level > 1)
            keeps = KEEPS if level > 1 else tuple(k for k in KEEPS if k != "host")
            estimates |= self._climbed(cores, keeps, devices, batch, level == 3, below)
            if any(not x.key[0] for x in estimates.values()) or below < math.inf:
                break
        ranking = [x for one in estimates.values() for x in one.best()]
        self.considered += sum(len(x.seconds) for x in estimates.values())
        ranking.sort(key=lambda x: (x[1].peak > self.room, x[1].seconds if x[1].peak <= self.room else x[1].peak))
        return ranking

    def _climbed(
        self, cores: Sequence[Core], keeps: Sequence[Keep], devices: int, batch: int, on_host: bool, below: float
    ) -> dict[Core, _Found]:
        """Return estimates of splits: climb to the best from the splits that were run, and from the corners."""
        estimates, tried, before = dict[Core, _Found](), set[Core](), len(self._blocks)

        def visit(some: Sequence[Core]) -> None:
            for core in some:
                tried.add(core)
                if (one := self._found(core, devices, batch, on_host)) is not None:
                    estimates[core] = one

        def recomputed(core: Core, keeps: Sequence[Keep]) -> list[Core]:
            """Return the split with other recomputation, if some choices do not fit without."""
            less = core in estimates and (core.checkpoint != "none" or (estimates[core].peaks > self.room).any())
            return [core._replace(checkpoint=keep) for keep in keeps] if less and self.library.facts.regions else []

        visit([c for c in self._blocks if c._replace(checkpoint="none") in cores and c.checkpoint in keeps])
        if below == math.inf:
            visit(corners := _corners(cores))
            visit([x for core in corners for x in recomputed(core, ["full"])])
        while estimates and len(self._blocks) - before < BLOCKS:
            best = min(estimates, key=lambda core: estimates[core].key)
            if below < math.inf and estimates[best].key > (False, below):
                break
            near = [*_neighbours(best, cores, tried), *recomputed(best, keeps)]
            if (core := next((x for x in near if x not in tried), None)) is None:
                break
            visit([core])
        return estimates

    def _found(self, core: Core, devices: int, batch: int, on_host: bool) -> _Found | None:
        table = self._table(core, devices, batch, on_host)
        if table is None or (block := self.block(core)) is None:
            return None
        return _Found(table, block.core, *rank.priced(table, block, self.library), self.room)

    def _table(self, core: Core, devices: int, batch: int, on_host: bool) -> Table | None:
        key = core[:3], core.checkpoint == "none", devices, batch, on_host
        if key not in self._tables:
            most = batch if self.library.microbatches > 1 else 1
            some = list(choices([core], devices, batch, self.cuts, most, self.library.device.node))
            if on_host:  # parameters can be on the host if they are gathered before each use
                some += [replace(c, offload=o) for c in some for o in OFFLOADS if o and (o != "all" or c.zero == 3)]
            self._tables[key] = Table(some, self.library.device, self._lines) if some else None
        return self._tables[key]

    def spreads(self, devices: int, batch: int, cores: Iterable[Core]) -> bool:
        """Return whether so many rows can be spread over so many devices by one of these splits."""
        possible = (core for core in cores if self._table(core, devices, batch, False) is not None)
        return any(self.block(core) is not None for core in possible)

    # --- tier two

    def exact(self, c: Choice) -> Priced:
        """Return the exact price of a choice. Raises ShardcError if compile refuses it."""
        if c not in self._exact:
            try:
                self._exact[c] = price(self.library, Spec.load(spec(c, self.library.facts)), c.batch)
            except ShardcError as e:
                self._exact[c] = e
        result = self._exact[c]
        if isinstance(result, ShardcError):
            raise result
        return result

    def refine(self, ranked: Sequence[tuple[Choice, Rough]]) -> dict[Choice, Priced]:
        """Return exact prices of the best choices, and of more of them if these do not fit.

        The last exact price of a split corrects the estimates of its other choices.
        """
        prices: dict[Choice, Priced] = {}
        off: dict[Core, tuple[float, float]] = {}
        families = Counter[object]()
        best, rest, room = math.inf, list(ranked), self.memory - self.library.device.outside_bytes(0)

        def key(x: tuple[Choice, Rough]) -> tuple[bool, float]:
            slower, larger = off.get(x[0].core, (1.0, 1.0))
            over = x[1].peak * larger > room
            return over, x[1].peak * larger if over else x[1].seconds * slower

        while rest and len(prices) < PRICED:
            c, rough = one = min(rest, key=key)
            rest.remove(one)
            family = c.core, c.pp, c.dp, c.rows
            if families[family] == ALIKE or (prices and rough.peak > FAR * self.memory):
                continue
            if best < math.inf and key(one) > (False, SLOWER * best):
                break
            families[family] += 1
            self.on(str(c), len(prices), PRICED)
            try:
                prices[c] = cost = self.exact(c)
            except ShardcError as e:
                self.refused[str(c)] = e
                continue
            off[c.core] = cost.step_seconds / rough.seconds, cost.needs / self.memory * room / max(rough.peak, 1.0)
            best = min(best, cost.step_seconds if cost.needs <= self.memory else math.inf)
        self._vary(prices)
        return prices

    def _vary(self, prices: dict[Choice, Priced]) -> None:
        """Price variants of the best that tier one does not have, each on top of the best so far.

        Variants: no sequence parallelism, an encoder's rows split over more axes, compiled element-wise work.
        """
        facts = self.library.facts
        changes: tuple[dict[str, Any], ...] = {"sequence_parallel": False}, {"encoder_rows": True}, {"compiled": True}
        for change in changes:
            fits = {c: p.step_seconds for c, p in prices.items() if p.needs <= self.memory}
            if not fits:
                return
            c = min(fits, key=fits.__getitem__)
            other = replace(c, **change)
            on_cpu = self.library.device.kind == "cpu"
            if spec(c, facts) == spec(other, facts) or (on_cpu and other.compiled):
                continue
            self.on(str(other), len(prices), len(prices))
            try:
                prices[other] = self.exact(other)
            except ShardcError as e:
                self.refused[str(other)] = e


class _Found(NamedTuple):
    """The estimates of a split's choices. core: as it was run."""

    table: Table
    core: Core
    seconds: Vector
    peaks: Vector
    room: float

    @property
    def key(self) -> tuple[bool, float]:
        """(Whether nothing fits, seconds of the fastest that fits, or else the fewest bytes)."""
        fits = self.peaks <= self.room
        return (False, float(self.seconds[fits].min())) if fits.any() else (True, float(self.peaks.min()))

    def best(self) -> Iterator[tuple[Choice, Rough]]:
        """Yield the fastest choices that fit, and those that need the least memory."""
        fits = self.peaks <= self.room
        indices = [*np.argsort(np.where(fits, self.seconds, np.inf), kind="stable")[: min(BEST, int(fits.sum()))]]
        indices += [*np.argsort(self.peaks, kind="stable")[: BEST // 4]]
        for i in dict.fromkeys(indices):
            c = replace(self.table.choices[i], **self.core._asdict())
            yield c, Rough(float(self.seconds[i]), float(self.peaks[i]))


def _corners(cores: Sequence[Core]) -> list[Core]:
    """Return the splits to begin with: no axis, each axis at its largest, and both."""
    tp, ep = max((c.tp for c in cores), default=1), max((c.ep for c in cores if c.ep <= EXPERTS), default=1)
    return [c for c in cores if c.tp in (1, tp) and c.ep in (1, ep) and c.cp == 1]


def _neighbours(core: Core, cores: Sequence[Core], tried: Container[Core]) -> list[Core]:
    """Return splits that differ along one axis: halfway to the nearest tried one, or by a step."""
    near = []
    for i in range(3):
        line = sorted((c for c in cores if _but(c, i) == _but(core, i)), key=itemgetter(i))
        line = [c._replace(checkpoint=core.checkpoint) for c in line]
        at, known = (
            next(j for j, c in enumerate(line) if c[i] == core[i]),
            [j for j, c in enumerate(line) if c in tried],
        )
        after = (at + min((j for j in known if j > at), default=at + 2)) // 2
        before = (at + max((j for j in known if j < at), default=at - 2) + 1) // 2
        near += [line[j] for j in (after, before) if 0 <= j < len(line) and j != at]
    return near


def _but(core: Core, i: int) -> tuple[object, ...]:
    """Return the axes of a split without axis `i`."""
    return (*core[:i], *core[i + 1 : 3])
