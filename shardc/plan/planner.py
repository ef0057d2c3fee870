"""The planner: the best spec of a model on one kind of device, the price of a given spec, the largest batch or
sequence, and the fewest devices that fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from shardc.cost.device import Device
from shardc.errors import ShardcError
from shardc.ir.patterns import nearest
from shardc.ir.program import Program
from shardc.plan.dry_runs import Library
from shardc.plan.exact_price import Priced, price
from shardc.plan.few_layers import UNITS, Subject, cuts, experts, regions, sequences, whole_inputs
from shardc.plan.headroom import usable
from shardc.plan.largest_that_fits import Largest
from shardc.plan.result import Candidate, Plan, Target
from shardc.plan.search import FAR, Core, Search
from shardc.plan.space import Choice, SpecTemplate, spec
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
    """A model on one kind of device. See shardc.plan.plan."""

    subject: Subject
    device: Device
    precision: str
    headroom: float
    name: str
    on: Callable[[str, int, int], None]

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            close = nearest(self.precision, PRECISIONS)
            fix = (f"did you mean {close}? " if close else "") + f"one of {', '.join(PRECISIONS)}"
            raise ShardcError(f"unknown precision {self.precision!r}", where="--precision", fix=fix)

    @property
    def usable(self) -> float:
        return usable(self.device, self.headroom)

    @cached_property
    def captured(self) -> Program:
        """The captured model with few of its layers, for two rows."""
        return self.subject.captured(2, UNITS if self.subject.layers else None)

    @cached_property
    def template(self) -> SpecTemplate:
        p = self.captured
        shard = {"use": "model" if self.subject.carried else "structure"}
        return SpecTemplate(
            shard, PRECISIONS[self.precision], regions(p), sequences(p), experts(p)[0], whole_inputs(p, 2)
        )

    @cached_property
    def library(self) -> Library:
        return Library(self.subject, self.template, self.device)

    @cached_property
    def finder(self) -> Search:
        layers = self.subject.layers
        number = layers.number if layers else cuts(self.captured)
        return Search(self.library, self.usable, cuts=number, experts=experts(self.captured)[1], on=self.on)

    def target(self, devices: int, batch: int, assumed: tuple[str, ...] = ()) -> Target:
        dtypes = (
            "products in bfloat16, master weights and AdamW's state in float32"
            if self.precision == "bfloat16"
            else f"precision {self.precision}"
        )
        reserve = f"{self.headroom:.0%} of memory left to the allocator, NCCL and workspaces (--headroom)"
        return Target(
            self.name,
            self.device,
            devices,
            batch,
            self.library.sequence or self.subject.sequence,
            self.library.flops,
            self._dtype(),
            self.usable,
            (*assumed, dtypes, reserve),
        )

    def _dtype(self) -> torch.dtype:
        section = PRECISIONS[self.precision]
        name = section.get("compute", section.get("params"))
        if name:
            return getattr(torch, name)  # type: ignore[no-any-return]
        return next((p.dtype for p in self.subject.model.parameters() if p.is_floating_point()), torch.float32)

    # --- which spec

    def search(self, devices: int, batch: int | None) -> Plan:
        finder = self.finder
        cores = finder.cores(devices)
        rows, note = self._batch(devices, batch, cores)
        estimates = finder.estimate(devices, rows, cores)
        if not any(p.peak <= self.usable for _, p in estimates):
            estimates += finder.estimate(devices, rows, finder.cores(devices, over_nodes=True))
        exact = finder.refine(finder.ranked(estimates))
        target = self.target(devices, rows, (note,))
        candidates = [self._candidate(c, p, target) for c, p in exact.items()]
        candidates.sort(key=lambda c: (not c.fits, c.step_seconds if c.fits else c.peak))
        refused = {k: e.what for k, e in finder.refused.items()}
        return Plan(target, tuple(candidates), finder.considered, refused)

    def _candidate(self, c: Choice, p: Priced, target: Target) -> Candidate:
        return Candidate(Spec.load(spec(c, self.template, p.counts if c.pp > 1 else ())), p, target)

    def _batch(self, devices: int, batch: int | None, cores: list[Core]) -> tuple[int, str]:
        """Rows of the global batch, and a note on their source. cores: the splits for so many devices."""
        rows = self.subject.rows
        if batch is not None:
            if not any(True for _ in self.finder.choices(cores, devices, batch)):
                what = f"a global batch of {batch} rows cannot be spread over {devices} devices"
                raise ShardcError(
                    what,
                    where="--global-batch",
                    fix=f"make it a multiple of the data-parallel ranks, such as {devices}",
                )
            return batch, f"global batch of {batch} rows (--global-batch)"
        for k in (1, *(2**i for i in range(1, 40) if 2**i * rows < 2 * devices), devices):
            if any(True for _ in self.finder.choices(cores, devices, k * rows)):
                times = (
                    f", times {k}: as some of {devices} devices would be idle with fewer"
                    if k > 1
                    else " (change it with --global-batch)"
                )
                return k * rows, f"global batch of {k * rows} rows: what batch() gives{times}"
        raise ShardcError(
            f"no way to use {devices} devices was found", where="--devices", fix="try another number of devices"
        )

    def given(self, source: str | Path | Mapping[str, Any] | Spec, devices: int | None, batch: int | None) -> Plan:
        one = Spec.load(source, world=devices)
        rows = batch or self.subject.rows
        self.on("the given spec", 0, 0)
        priced = price(self.library, one, rows)
        note = f"global batch of {rows} rows" + (
            "" if batch else ": what batch() gives (change it with --global-batch)"
        )
        name = one.precision.compute or one.precision.params
        target = replace(
            self.target(one.mesh.world, rows, (note,)), dtype=getattr(torch, name) if name else self._dtype()
        )
        return Plan(target, (Candidate(one, priced, target),), 1)

    # --- how much, how few

    def largest(self, plan: Plan, what: str) -> Plan:
        """Answers how many rows (what: "batch"), or how long a sequence, the best candidate can take."""
        best = plan.candidates[0] if plan.candidates else None
        if best is None:
            raise plan.lacking()
        data = best.spec.data_ranks * best.spec.batch.microbatches
        if what == "batch":

            def peak(n: int) -> float:
                self.on(f"a global batch of {n * data} rows", 0, 0)
                return price(self.library, best.spec, n * data).peak

            unit, start, name = data, max(best.priced.batch // data, 1), "rows of the global batch"
        else:
            long = self.subject.sequence
            if long is None:
                raise ShardcError(
                    "the inputs have no sequence dim in common",
                    where="--largest sequence",
                    fix="use --largest batch",
                )
            split = best.devices // best.spec.data_ranks
            unit = math.lcm(128 if long >= 128 else 1, split)
            start, name = max(long // unit, 1), "tokens of a row"

            def peak(n: int) -> float:
                self.on(f"a sequence of {n * unit} tokens", 0, 0)
                try:
                    return price(
                        Library(self.subject, self.template, self.device, n * unit), best.spec, best.priced.batch
                    ).peak
                except ShardcError:
                    return math.inf  # too long for the model

        solver = Largest(peak, self.usable)
        n = solver.solve(start)
        answer = {
            "what": name,
            "value": n * unit,
            "step": unit,
            "peak_bytes": solver.peaks.get(n),
            "next": (n + 1) * unit,
            "next_peak_bytes": solver.peaks.get(n + 1) if math.isfinite(solver.peaks.get(n + 1, math.inf)) else None,
            "spec": best.spec.to_dict(),
            "priced": len(solver.peaks),
        }
        return replace(plan, answers={**plan.answers, f"largest {what}": answer})

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
                "peak_bytes": fits.peak,
                "step_seconds": fits.step_seconds,
            }
            if n == 1:
                break
            n //= 2
            fits = self._smallest(n, batch)
        return replace(plan, answers={**plan.answers, "fewest devices": answer})

    def _smallest(self, devices: int, batch: int) -> Candidate | None:
        """A candidate that fits on so many devices, if there is one: tried in the order of estimated memory."""
        self.on(f"{devices} devices", 0, 0)
        finder = self.finder
        estimates = sorted(finder.estimate(devices, batch, finder.cores(devices)), key=lambda x: x[1].peak)
        target = self.target(devices, batch)
        for c, p in estimates[:3]:
            if p.peak > FAR * self.usable:
                break
            one = self._candidate(c, finder.exact(c), target)
            if one.fits:
                return one
        return None
