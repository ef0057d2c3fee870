"""Find the best spec of a model on one kind of device, price given specs, and answer questions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardc.cost.step import gradients_norm
from shardc.errors import ShardcError
from shardc.ir.similar_names import nearest
from shardc.machine.device import Device
from shardc.plan.price import Priced, price
from shardc.plan.questions import largest, what_if
from shardc.plan.result import Candidate, Plan, Target
from shardc.plan.runs import Library, Runs
from shardc.plan.search import FAR, Search
from shardc.plan.space import Choice, Facts, Keep, longer, spec, splits
from shardc.spec import Spec

#: `--precision`, as the section of a spec.
PRECISIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"params": "float32", "compute": "bfloat16", "reduce": "float32"},
    "float16": {"params": "float32", "compute": "float16", "reduce": "float32", "loss_scale": "dynamic"},
    "float32": {"params": "float32"},
    "pure-bfloat16": {"params": "bfloat16"},
    "model": {},
}


@dataclass
class Planner:
    """A planner for one model on one kind of device. See shardc.plan.plan."""

    runs: Runs
    device: Device
    precision: str
    headroom: float
    name: str
    on: Callable[[str, int, int], None]
    facts: Facts = field(init=False)
    library: Library = field(init=False)
    finder: Search = field(init=False)

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            close = nearest(self.precision, PRECISIONS)
            fix = (f"did you mean {close}? " if close else "") + f"one of {', '.join(PRECISIONS)}"
            raise ShardcError(f"unknown precision {self.precision!r}", where="--precision", fix=fix)
        if not 0 <= self.headroom < 1:
            fix = "a number from 0 to 1, such as 0.05"
            raise ShardcError(f"headroom {self.headroom} is not a share", where="--headroom", fix=fix)
        self.facts = replace(self.runs.facts, precision=PRECISIONS[self.precision])
        self.library = Library(self.runs, self.facts, self.device, self.headroom)
        self.finder = Search(self.library, self.on)

    def target(self, devices: int, batch: int, assumed: tuple[str, ...] = (), given: Spec | None = None) -> Target:
        """Return what a plan is for. given: the spec that names the precision, in place of `--precision`."""
        precision = self.facts.precision if given is None else given.to_dict().get("precision", {})
        params = precision.get("params", self.facts.dtype)
        dtype = str(precision.get("compute", params))
        state = f"products in {dtype}, weights and the optimizer's state in {params}"
        step = f"a step {gradients_norm(norm=False, clipped=False)} (`shardc run` and `shardc cost` include it)"
        left = "memory: what torch's allocator reserves, and what the process and its libraries take outside of it"
        left += f"; {self.headroom:.0%} is left (--headroom)" if self.headroom else ""
        library = self.library
        words = (*assumed, state, step, left)
        return Target(
            self.name, self.device, devices, batch, self.facts.tokens, library.flops, dtype, library.usable, words
        )

    # --- the best spec

    def search(self, devices: int, batch: int | None) -> Plan:
        finder = self.finder
        self.on("one microbatch", 0, 0)
        self.library.takes_microbatches()
        rows, note = self._batch(devices, batch)
        exact = finder.best(devices, rows)
        target = self.target(devices, rows, (note,))
        priced = sorted((self._candidate(c, p, target) for c, p in exact.items()), key=best_first)
        # of schedules with the same result, and of settings that nothing uses, the first
        first = {_result(c): c for c in reversed(priced)}
        candidates = tuple(c for c in priced if first[_result(c)] is c)
        return Plan(target, candidates, finder.considered, {k: e.what for k, e in finder.refused.items()})

    def _candidate(self, c: Choice, p: Priced, target: Target) -> Candidate:
        one = Spec.load(spec(c, self.facts, p.counts if c.pp > 1 else ()))
        return Candidate(**vars(p), spec=one, target=target)

    def _batch(self, devices: int, batch: int | None) -> tuple[int, str]:
        """Return the rows of the global batch, and a note on their source."""
        rows, finder = batch or self.facts.rows, self.finder
        more = [] if batch else [2**i for i in range(1, 40) if 2**i * rows < 2 * devices] + [devices]
        ways = self.facts, devices, self.device.node
        for k in (1, *more):
            if finder.spreads(devices, k * rows, [*splits(*ways), *(longer(*ways) if k == 1 else ())]):
                note = "(--global-batch)" if batch else " (change it with --global-batch)"
                times = f", times {k}: as some of {devices} devices would be idle with fewer"
                source = f": what batch() gives{times if k > 1 else note}" if not batch else f" {note}"
                return k * rows, f"global batch of {k * rows} rows{source}"
        if batch:
            fault = f"a global batch of {batch} rows cannot be spread over {devices} devices"
            fix = f"make it a multiple of the data-parallel ranks, such as {devices}"
            raise ShardcError(fault, where="--global-batch", fix=fix)
        fault = f"no way to use {devices} devices was found"
        raise ShardcError(fault, where="--devices", fix="try another number of devices")

    def given(self, specs: Sequence[Spec], batch: int | None) -> Plan:
        """Price these specs for the same global batch."""
        rows = batch or self.facts.rows
        source = "" if batch else ": what batch() gives (change it with --global-batch)"
        note = f"global batch of {rows} rows{source}"
        found = []
        for one in specs:
            self.on("the given spec", 0, 0)
            target = self.target(one.mesh.world, rows, (note,), given=one)
            found.append(Candidate(**vars(price(self.library, one, rows)), spec=one, target=target))
        found.sort(key=best_first)
        return Plan(found[0].target, tuple(found), len(found))

    # --- largest batch, sequence and model; fewest devices

    def largest(self, plan: Plan, kind: str, *, given: bool = False) -> Plan:
        """Add the largest batch, model or sequence that the best candidate can take to the answers.

        kind: "batch" (rows), "model" (layers) or "sequence" (tokens); without `given`, also on meshes for long rows.
        """
        best = _first(plan)
        one, rows = best.spec, best.batch
        if kind == "batch":
            unit = one.data_ranks * one.batch.microbatches
            words = "a global batch of {} rows"
            answer = self._most(one, unit, rows, words, lambda n: price(self.library, one, n).needs)
        elif kind == "model":
            answer = self._deepest(one, rows)
        else:
            answer = self._longest(one, rows)
            for other in () if given else self._for_long_rows(best, plan.target.devices):
                longer = self._longest(other, rows, above=answer["value"])
                if longer["value"] > answer["value"]:
                    answer = {**longer, "priced": answer["priced"] + longer["priced"]}
        units = {"batch": "rows of the global batch", "model": "layers", "sequence": "tokens of a row"}
        return replace(plan, answers={**plan.answers, f"largest {kind}": {**answer, "what": units[kind]}})

    def _most(
        self, one: Spec, unit: int, start: int, words: str, needs: Callable[[int], float], first: int = 0
    ) -> dict[str, Any]:
        """Find the largest number that fits: `first`, and a multiple of `unit`. start: the first to price."""

        def of(n: int) -> float:
            self.on(words.format(first + n * unit), 0, 0)
            return needs(first + n * unit)

        n, priced = largest(of, self.library.usable, max((start - first) // unit, 1))
        following = priced.get(n + 1, math.inf)
        return {
            "value": n and first + n * unit,
            "step": unit,
            "needs_bytes": priced.get(n),
            "next": first + (n + 1) * unit,
            "next_needs_bytes": following if math.isfinite(following) else None,
            "spec": one.to_dict(),
            "priced": len(priced),
        }

    def _for_long_rows(self, best: Candidate, devices: int) -> list[Spec]:
        """Return specs for the longest rows: one row at a time, cut over all ranks, all recomputed, ZeRO 3."""
        rows, found = best.batch, []
        ep = dict(best.spec.mesh.axes).get("ep", 1)
        for core in splits(self.facts, devices, self.device.node):
            cp, block = devices // (core.tp * ep), self.finder.block(core)
            if block is not None and cp > 1 and core.ep == ep and devices % (core.tp * ep) == 0:
                keep: Keep = "full" if self.facts.regions else "none"
                each = self.library.microbatches > 1
                choice = Choice(cp=cp, ep=ep, tp=core.tp, sequence_parallel=block.sequence_parallel, checkpoint=keep)
                choice = replace(choice, zero=3, rows=1 if each else rows, microbatches=rows if each else 1)
                found.append(Spec.load(spec(choice, self.facts)))
        return sorted(found, key=lambda s: -s.token_ranks)

    def _longest(self, one: Spec, rows: int, above: int = 0) -> dict[str, Any]:
        """Find the longest rows that a spec can take; an answer that is not longer than `above` is 0."""
        if self.facts.sequence is None:
            fault = "the inputs have no sequence dim in common"
            raise ShardcError(fault, where="--largest sequence", fix="use --largest batch")
        start = 2 * above or self.facts.sequence
        zigzag = 2 * one.token_ranks if one.token_axes else 1
        unit = math.lcm(128 if start >= 128 else 1, one.mesh.world // one.data_ranks, zigzag)

        def needs(n: int) -> float:
            try:
                return price(replace(self.library, sequence=n), one, rows).needs
            except ShardcError:
                return math.inf  # too long for the model

        if above and needs((above // unit + 1) * unit) > self.library.usable:
            return {"value": 0}
        return self._most(one, unit, start, "a sequence of {} tokens", needs)

    def _deepest(self, one: Spec, rows: int) -> dict[str, Any]:
        """Find how many layers a spec can take. A pipeline keeps its number of stages."""
        layers = self.facts.layers
        if layers is None or not self.runs.treats_layers_alike(one):
            fault = "the model has no long list of equal layers, or the spec tells them apart"
            raise ShardcError(fault, where="--largest model", fix="use --largest batch")
        document = one.to_dict()
        if balance := document.get("pipeline", {}).pop("balance", None):
            document["pipeline"]["stages"] = len(balance)
        spec, stages = Spec.load(document), len(balance or [0])

        def needs(n: int) -> float:
            return price(replace(self.library, number=n), spec, rows).needs if n >= stages else 0.0

        return self._most(spec, layers.period, layers.number, "{} layers", needs, layers.first)

    def fewest(self, plan: Plan) -> Plan:
        """Add the fewest devices for the same global batch: double until something fits, then halve."""
        n, batch = plan.target.devices, plan.target.batch
        while (fits := self._smallest(n, batch)) is None and n < 1 << 20:
            n *= 2
        while fits is not None and n > 1 and (fewer := self._smallest(n // 2, batch)) is not None:
            n, fits = n // 2, fewer
        answer: dict[str, Any] = {"what": "devices", "value": None}
        if fits is not None:
            spec = fits.spec.to_dict()
            answer |= {"value": n, "spec": spec, "needs_bytes": fits.needs, "step_seconds": fits.step_seconds}
        return replace(plan, answers={**plan.answers, "fewest devices": answer})

    # --- what would help, how long training takes

    def what_if(self, plan: Plan) -> Plan:
        """Add what would make the best candidate faster."""
        best = _first(plan)
        self.on("what would help", 0, 0)
        return replace(plan, what_if=tuple(what_if(self.library, best.spec, best.batch)))

    def duration(self, plan: Plan, tokens: float) -> Plan:
        """Add how long the best candidate takes for so many tokens."""
        best = _first(plan)
        if best.tokens_per_second is None:
            fault = "the rows of this model have no tokens: no embedding looks ids up"
            raise ShardcError(fault, where="--tokens", fix="leave it out")
        hours = tokens / best.tokens_per_second / 3600
        answer = {"what": "hours", "value": hours, "device_hours": hours * best.devices, "tokens": tokens}
        return replace(plan, answers={**plan.answers, "duration": answer})

    def _smallest(self, devices: int, batch: int) -> Candidate | None:
        """Return a candidate that fits, or None. Tries the three choices with the least estimated memory."""
        self.on(f"{devices} devices", 0, 0)
        finder, target = self.finder, self.target(devices, batch)
        estimates = sorted(finder.ranked(devices, batch), key=lambda x: x[1].peak)[:3]
        some = ((c, finder.exact(c)) for c, rough in estimates if rough.peak <= FAR * finder.room)
        return next((self._candidate(c, p, target) for c, p in some if p is not None and p.fits), None)


def _first(plan: Plan) -> Candidate:
    """Return the best candidate, whether it fits or not. Raises ShardcError if there is none."""
    if not plan.candidates:
        raise plan.lacking()
    return plan.candidates[0]


def _result(c: Candidate) -> object:
    """Return what a candidate comes to: its mesh, time and memory."""
    return c.spec.mesh.axes, f"{c.step_seconds:.4g}", f"{c.peak:.4g}", f"{c.needs:.4g}"


def best_first(c: Candidate) -> tuple[bool, float]:
    """Return a key that sorts candidates: the fastest that fits first, then those that need least."""
    return not c.fits, c.step_seconds if c.fits else c.needs
