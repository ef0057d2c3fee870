"""The planner: the best spec of a model on one kind of device, the price of a given spec, the largest batch or
sequence, and the fewest devices that fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from shardc.cost.premises import gradients_norm
from shardc.errors import ShardcError
from shardc.ir.patterns import nearest
from shardc.machine.device import Device
from shardc.plan.disk_cache import DiskCache
from shardc.plan.dry_runs import Library
from shardc.plan.estimate import Rough
from shardc.plan.exact_price import Priced, price
from shardc.plan.facts import Facts
from shardc.plan.headroom import usable
from shardc.plan.largest_that_fits import Largest
from shardc.plan.records import Records
from shardc.plan.result import Candidate, Plan, Target
from shardc.plan.search import FAR, Search
from shardc.plan.source import Source
from shardc.plan.space import Choice, Core, Keep, SpecTemplate, spec
from shardc.plan.what_if import what_if
from shardc.spec import Spec

#: `--precision`, as the section of a spec.
PRECISIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"params": "float32", "compute": "bfloat16", "reduce": "float32"},
    "float16": {"params": "float32", "compute": "float16", "reduce": "float32", "loss_scale": "dynamic"},
    "float32": {"params": "float32"},
    "pure-bfloat16": {"params": "bfloat16"},
    "model": {},
}


#: How often a search is made where less fits than was thought; each time with so much of the room, or less.
ROUNDS, SMALLER = 4, 0.95
#: Exact prices this much above what was thought are a reason to search again.
OFF = 1.1
#: What is estimated at so many times the best price may be faster all the same.
UNSURE = 1.15


@dataclass
class Planner:
    """A model on one kind of device. See shardc.plan.plan."""

    source: Source
    device: Device
    precision: str
    headroom: float
    name: str
    on: Callable[[str, int, int], None]
    disk: DiskCache | None = None
    processes: int = 1

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            close = nearest(self.precision, PRECISIONS)
            fix = (f"did you mean {close}? " if close else "") + f"one of {', '.join(PRECISIONS)}"
            raise ShardcError(f"unknown precision {self.precision!r}", where="--precision", fix=fix)

    @property
    def usable(self) -> float:
        return usable(self.device, self.headroom)

    @cached_property
    def records(self) -> Records:
        return Records(self.source, self.device.kind == "cpu", self.disk, self.processes)

    @property
    def facts(self) -> Facts:
        return self.records.facts

    @cached_property
    def template(self) -> SpecTemplate:
        f = self.facts
        shard = {"use": "model" if f.carried else "structure"}
        words = tuple(f.regions), tuple(f.sequences), tuple(f.experts)
        return SpecTemplate(shard, PRECISIONS[self.precision], *words, f.inputs)

    @cached_property
    def library(self) -> Library:
        return Library(self.records, self.template, self.device)

    @cached_property
    def finder(self) -> Search:
        layers = self.facts.layers
        number = layers.number if layers else self.facts.cuts
        return Search(self.library, self.usable, cuts=number, experts=self.facts.number, on=self.on)

    def target(self, devices: int, batch: int, assumed: tuple[str, ...] = ()) -> Target:
        dtypes = (
            "products in bfloat16, master weights and AdamW's state in float32"
            if self.precision == "bfloat16"
            else f"precision {self.precision}"
        )
        step = f"a step {gradients_norm(norm=False, clipped=False)} (`shardc run` takes it: `shardc cost`)"
        left = "memory: what torch's allocator reserves, and what the process and its libraries take outside of it"
        left += f"; {self.headroom:.0%} is left (--headroom)" if self.headroom else ""
        return Target(
            self.name,
            self.device,
            devices,
            batch,
            self.library.sequence or self.facts.sequence,
            self.library.flops,
            self._dtype(),
            self.usable,
            (*assumed, dtypes, step, left),
        )

    def _dtype(self) -> str:
        """Of products."""
        section = PRECISIONS[self.precision]
        return str(section.get("compute", section.get("params", self.facts.dtype)))

    # --- which spec

    def search(self, devices: int, batch: int | None) -> Plan:
        question = {"search": devices, "batch": batch, "usable": self.usable, "template": asdict(self.template)}
        question["on"] = self.device.model_dump(mode="json", exclude={"source", "nodes"})
        found = self.records.answer(question, lambda: self._search(devices, batch))
        self.library.microbatches = found["microbatches"]
        target = self.target(devices, found["rows"], (found["note"],))
        choices = [Choice(**c) for c in found["choices"]]
        candidates = [self._candidate(c, self.finder.exact(c), target) for c in choices]
        candidates.sort(key=lambda c: (not c.fits, c.step_seconds if c.fits else c.needs))
        return Plan(target, tuple(candidates), found["considered"], found["refused"])

    def _search(self, devices: int, batch: int | None) -> dict[str, Any]:
        """What a search comes to, as plain values: the choices that were priced are priced already, if it is asked
        again.
        """
        finder = self.finder
        cores = finder.splits(devices)
        rows, note = self._batch(devices, batch, cores)
        exact = self._refined(devices, rows, cores)
        return {
            "rows": rows,
            "note": note,
            "choices": [asdict(c) for c in exact],
            "considered": finder.considered,
            "refused": {k: e.what for k, e in finder.refused.items()},
            "microbatches": self.library.microbatches,
        }

    def _refined(self, devices: int, rows: int, cores: list[Core]) -> dict[Choice, Priced]:
        """Exact prices of the best for so many devices, and for half of them, a quarter, and so on, where an estimate
        says that these may be faster: others are idle then. What is found for fewer is what a search for so many finds,
        so more devices make nothing slower. (One may be faster where two are not: what these send may take longer than
        what they save.)
        """
        finder, exact = self.finder, self._refined_on(devices, rows, cores)

        def best() -> float:
            return min((p.seconds for p in exact.values() if p.needs <= self.usable), default=math.inf)

        while best() < math.inf and devices % 2 == 0:
            devices //= 2
            cores, limit = finder.splits(devices), UNSURE * best()
            if self.library.least_seconds * rows / devices > limit:  # still fewer are slower still
                break
            some = finder.estimate(devices, rows, cores, below=limit)
            if any(r.seconds <= limit for _, r in some if r.peak <= finder.room):
                exact |= self._refined_alone(devices, rows)
        return exact

    def _refined_alone(self, devices: int, rows: int) -> dict[Choice, Priced]:
        """What a search for so many devices comes to that knows of none before: with other splits known it prices other
        choices first. (Dry runs are not made again.)
        """
        other = copy(self)
        for name in ("library", "finder"):
            other.__dict__.pop(name, None)
        found = other._refined_on(devices, rows, other.finder.splits(devices))
        self.finder.considered += other.finder.considered
        self.finder.ruled_out += other.finder.ruled_out
        self.finder.refused |= other.finder.refused
        return found

    def _refined_on(self, devices: int, rows: int, cores: list[Core]) -> dict[Choice, Priced]:
        """Exact prices of the best for so many devices. Splits were left out for being slower than what was thought to
        fit: where that does not, as more is reserved than is live, the search is made again with as much less room for
        live bytes. Other questions begin with all of it.
        """
        finder, exact = self.finder, dict[Choice, Priced]()
        room = finder.room
        for _ in range(ROUNDS):
            some = dict(self.estimates(devices, rows, cores))
            exact |= finder.refine(finder.ranked(some.items()))
            thought = min((r.seconds for r in some.values() if r.peak <= finder.room), default=math.inf)
            best = min((p.seconds for p in exact.values() if p.needs <= self.usable), default=math.inf)
            over = [
                exact[c].needs / r.peak
                for c, r in some.items()
                if c in exact and r.peak <= finder.room and exact[c].needs > self.usable
            ]
            if not over or best <= OFF * thought:
                break
            finder.room = min(self.usable / min(over), SMALLER * finder.room)
        finder.room = room
        return exact

    def estimates(self, devices: int, rows: int, cores: list[Core]) -> list[tuple[Choice, Rough]]:
        """Of choices for so many devices: what is slow, or in the machine's memory, only where nothing fits without.
        cores: the splits for so many devices.
        """
        finder = self.finder

        def fits(some: list[tuple[Choice, Rough]]) -> bool:
            return any(r.peak <= finder.room for _, r in some)

        found = finder.estimate(devices, rows, cores)
        if not fits(found):
            found += finder.estimate(devices, rows, finder.splits(devices, over_nodes=True))
        if not fits(found):
            found += finder.estimate(devices, rows, cores, on_host=True)
        return found

    def _candidate(self, c: Choice, p: Priced, target: Target) -> Candidate:
        return Candidate(Spec.load(spec(c, self.template, p.counts if c.pp > 1 else ())), p, target)

    def _batch(self, devices: int, batch: int | None, cores: list[Core]) -> tuple[int, str]:
        """Rows of the global batch, and a note on their source. cores: the splits for so many devices."""
        rows, finder = self.facts.rows, self.finder

        def spreads(rows: int, cores: Iterable[Core] = cores) -> bool:
            some = (core for core in cores if any(True for _ in finder.choices([core], devices, rows)))
            return any(finder.accepted(core) for core in some)

        if batch is not None:
            if not spreads(batch) and not spreads(batch, finder.long_rows(cores, devices)):
                what = f"a global batch of {batch} rows cannot be spread over {devices} devices"
                raise ShardcError(
                    what,
                    where="--global-batch",
                    fix=f"make it a multiple of the data-parallel ranks, such as {devices}",
                )
            return batch, f"global batch of {batch} rows (--global-batch)"
        for k in (1, *(2**i for i in range(1, 40) if 2**i * rows < 2 * devices), devices):
            if spreads(k * rows) or (k == 1 and spreads(rows, finder.long_rows(cores, devices))):
                times = (
                    f", times {k}: as some of {devices} devices would be idle with fewer"
                    if k > 1
                    else " (change it with --global-batch)"
                )
                return k * rows, f"global batch of {k * rows} rows: what batch() gives{times}"
        raise ShardcError(
            f"no way to use {devices} devices was found", where="--devices", fix="try another number of devices"
        )

    def given(self, specs: Sequence[Spec], batch: int | None) -> Plan:
        """The prices of these specs, for the same global batch."""
        rows = batch or self.facts.rows
        note = f"global batch of {rows} rows" + (
            "" if batch else ": what batch() gives (change it with --global-batch)"
        )
        found = []
        for one in specs:
            self.on("the given spec", 0, 0)
            dtype = one.precision.compute or one.precision.params or self._dtype()
            target = replace(self.target(one.mesh.world, rows, (note,)), dtype=dtype)
            found.append(Candidate(one, price(self.library, one, rows), target))
        found.sort(key=lambda c: (not c.fits, c.step_seconds if c.fits else c.needs))
        return Plan(found[0].target, tuple(found), len(found))

    # --- how much, how few

    def largest(self, plan: Plan, what: str, *, given: bool = False) -> Plan:
        """Answers how many rows (what: "batch"), or how long a sequence, the best candidate can take. A sequence also
        with the meshes that take the longest, unless the candidate's spec was given.
        """
        best = plan.candidates[0] if plan.candidates else None
        if best is None:
            raise plan.lacking()
        if what == "batch":
            data = best.spec.data_ranks * best.spec.batch.microbatches

            def needs(n: int) -> float:
                self.on(f"a global batch of {n * data} rows", 0, 0)
                return price(self.library, best.spec, n * data).needs

            solver = Largest(needs, self.usable)
            answer = _answer(solver, solver.solve(max(best.priced.batch // data, 1)), data, best.spec)
            answer["what"] = "rows of the global batch"
            return replace(plan, answers={**plan.answers, "largest batch": answer})
        if what == "model":
            answer = {**self._deepest(best.spec, best.priced.batch), "what": "layers"}
            return replace(plan, answers={**plan.answers, "largest model": answer})
        if self.facts.sequence is None:
            raise ShardcError(
                "the inputs have no sequence dim in common", where="--largest sequence", fix="use --largest batch"
            )
        answer = self._longest(best.spec, best.priced.batch, self.facts.sequence)
        for one in () if given else self._for_long_rows(best, plan.target.devices):
            longer = self._longest(one, best.priced.batch, 2 * answer["value"], above=answer["value"])
            if longer["value"] > answer["value"]:
                answer = {**longer, "priced": answer["priced"] + longer["priced"]}
        answer["what"] = "tokens of a row"
        return replace(plan, answers={**plan.answers, "largest sequence": answer})

    def _for_long_rows(self, best: Candidate, devices: int) -> list[Spec]:
        """Specs for so many devices that take the longest rows: one row at a time, its tokens over all ranks
        that do not split weights, every layer recomputed, all state sharded.
        """
        rows, found = best.priced.batch, []
        ep = dict(best.spec.mesh.axes).get("ep", 1)
        for core in self.finder.cores(devices):
            cp = devices // (core.tp * ep)
            if cp > 1 and core.ep == ep and devices % (core.tp * ep) == 0:
                keep: Keep = "full" if self.template.regions else "none"
                each = self.library.microbatches > 1
                choice = Choice(cp=cp, ep=ep, tp=core.tp, sequence_parallel=core.sequence_parallel, checkpoint=keep)
                choice = replace(choice, zero=3, rows=1 if each else rows, microbatches=rows if each else 1)
                found.append(Spec.load(spec(choice, self.template)))
        return sorted(found, key=lambda s: -s.sequence_ranks)

    def _longest(self, one: Spec, rows: int, start: int, above: int = 0) -> dict[str, Any]:
        """How long rows may be for a spec. above: an answer is of no use unless it is longer."""
        split = one.mesh.world // one.data_ranks
        zigzag = 2 * one.sequence_ranks if one.sequence else 1
        unit = math.lcm(128 if start >= 128 else 1, split, zigzag)

        def needs(n: int) -> float:
            self.on(f"a sequence of {n * unit} tokens", 0, 0)
            try:
                return price(self.library.of_length(n * unit), one, rows).needs
            except ShardcError:
                return math.inf  # too long for the model

        solver = Largest(needs, self.usable)
        if above and solver.at(above // unit + 1) > self.usable:
            return {"value": 0, "priced": 1}
        return _answer(solver, solver.solve(max(start // unit, 1)), unit, one)

    def _deepest(self, one: Spec, rows: int) -> dict[str, Any]:
        """How many layers a spec takes: a pipeline has as many stages as before, with other numbers of layers."""
        layers = self.facts.layers
        if layers is None or not self.records.treats_layers_alike(one):
            raise ShardcError(
                "the model has no long list of equal layers, or the spec tells them apart",
                where="--largest model",
                fix="use --largest batch",
            )
        document = one.to_dict()
        if balance := document.get("pipeline", {}).pop("balance", None):
            document["pipeline"]["stages"] = len(balance)
        spec, stages = Spec.load(document), len(balance or [0])

        def needs(n: int) -> float:
            number = layers.first + n * layers.period
            self.on(f"{number} layers", 0, 0)
            return price(self.library.of_layers(number), spec, rows).needs if number >= stages else 0.0

        solver = Largest(needs, self.usable)
        n = solver.solve(max((layers.number - layers.first) // layers.period, 1))
        answer = _answer(solver, n, layers.period, spec)
        return answer | {
            "value": answer["value"] and answer["value"] + layers.first,
            "next": answer["next"] + layers.first,
        }

    def fewest(self, plan: Plan) -> Plan:
        """Answers on how few devices anything fits, for the same global batch: by halving the number while something
        does.
        """
        batch = plan.target.batch
        answer: dict[str, Any] = {"what": "devices", "value": None}
        n = plan.target.devices
        fits = self._smallest(n, batch)
        while fits is None and n < 1 << 20:
            n *= 2
            fits = self._smallest(n, batch)
        while fits is not None:
            answer |= {
                "value": n,
                "spec": fits.spec.to_dict(),
                "needs_bytes": fits.needs,
                "step_seconds": fits.step_seconds,
            }
            if n == 1:
                break
            n //= 2
            fits = self._smallest(n, batch)
        return replace(plan, answers={**plan.answers, "fewest devices": answer})

    # --- why, how long

    def what_if(self, plan: Plan) -> Plan:
        """Answers what would make the best candidate faster."""
        if not plan.candidates:
            raise plan.lacking()
        best = plan.candidates[0]
        self.on("what would help", 0, 0)
        return replace(plan, what_if=tuple(what_if(self.library, best.spec, best.priced.batch, self.usable)))

    def duration(self, plan: Plan, tokens: float) -> Plan:
        """Answers how long the best candidate takes for so many tokens."""
        best = plan.candidates[0] if plan.candidates else None
        if best is None:
            raise plan.lacking()
        if best.tokens_per_second is None:
            raise ShardcError(
                "the rows of this model are not sequences of tokens", where="--tokens", fix="leave it out"
            )
        hours = tokens / best.tokens_per_second / 3600
        answer = {"what": "hours", "value": hours, "device_hours": hours * best.devices, "tokens": tokens}
        return replace(plan, answers={**plan.answers, "duration": answer})

    def _smallest(self, devices: int, batch: int) -> Candidate | None:
        """A candidate that fits on so many devices, if there is one: tried in the order of estimated memory."""
        self.on(f"{devices} devices", 0, 0)
        finder = self.finder
        estimates = sorted(finder.estimate(devices, batch, finder.splits(devices)), key=lambda x: x[1].peak)
        target = self.target(devices, batch)
        for c, p in estimates[:3]:
            if p.peak > FAR * finder.room:
                break
            one = self._candidate(c, finder.exact(c), target)
            if one.fits:
                return one
        return None


def _answer(solver: Largest, n: int, unit: int, one: Spec) -> dict[str, Any]:
    """What was found out, of numbers that are multiples of a unit."""
    following = solver.peaks.get(n + 1, math.inf)
    return {
        "value": n * unit,
        "step": unit,
        "needs_bytes": solver.peaks.get(n),
        "next": (n + 1) * unit,
        "next_needs_bytes": following if math.isfinite(following) else None,
        "spec": one.to_dict(),
        "priced": len(solver.peaks),
    }
