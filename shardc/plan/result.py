"""The result of a search: a `Plan` of `Candidate`s, the best first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardc.errors import ShardcError
from shardc.ir.units import seconds, size
from shardc.machine.device import Device
from shardc.plan.price import Priced
from shardc.spec import Spec


@dataclass(frozen=True)
class Target:
    """The model, devices and batch of a plan. sequence: tokens of a row (Program.tokens), None without any.

    batch: rows of the global batch. flops: of one row, forward and backward, nothing recomputed. dtype: of products.
    usable: bytes of a device's memory that a step may use. assumed: sentences on what the user left open.
    """

    model: str
    device: Device
    devices: int
    batch: int
    sequence: int | None
    flops: float
    dtype: str
    usable: float
    assumed: tuple[str, ...] = ()

    @property
    def rate(self) -> str:
        """What throughput counts: tokens if rows have any, else samples."""
        return "tokens" if self.sequence else "samples"

    def __repr__(self) -> str:
        rows = f"{self.batch} rows" + (f" of {self.sequence} tokens" if self.sequence else "")
        return f"<Target: {self.model} on {self.devices} x {self.device.name}, {rows}>"


@dataclass(frozen=True, repr=False)
class Candidate(Priced):
    """A spec and its price."""

    spec: Spec
    target: Target

    def __repr__(self) -> str:
        from shardc.plan.table import named

        fits = "fits" if self.fits else f"does not fit into {size(self.usable)}"
        return f"<Candidate {named(self)}: step {seconds(self.step_seconds)}, needs {size(self.needs)}, {fits}>"

    @property
    def devices(self) -> int:
        return self.spec.mesh.world

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (Chowdhery et al. 2022): share of the devices' peak, nothing recomputed."""
        peak = self.target.device.flops_per_second(self.target.dtype) * self.devices
        return self.target.flops * self.batch / (self.step_seconds * peak)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all devices; None if rows have none."""
        return self.rows_per_second * self.target.sequence if self.target.sequence else None

    @property
    def rows_per_second(self) -> float:
        return self.batch / self.step_seconds

    @property
    def shares(self) -> dict[str, float]:
        """Shares of a step's time, by cause."""
        total = sum(self.spent.values()) or 1.0
        return {k: v / total for k, v in self.spent.items() if v > 0}

    @property
    def waterfall(self) -> dict[str, float]:
        """Seconds of a step by cause, of the busiest rank.

        "peak": the model's products at the device's peak; "again": recomputation and uneven division; "below": products
        below the peak; and the other causes of `shares`.
        """
        peak = self.target.device.flops_per_second(self.target.dtype)
        ideal = self.target.flops * self.batch / self.devices / peak
        spent = dict(self.spent)
        computed = self.flops / peak
        below = spent.pop("compute", 0.0) - computed
        if below < 0 and "launch" in spent:  # small products take the time of their launch
            spent["launch"], below = max(spent["launch"] + below, 0.0), min(spent["launch"] + below, 0.0)
        parts = {"peak": ideal, "again": computed - ideal, "below": below}
        return {name: s for name, s in {**parts, **spent}.items() if s}

    def to_json(self) -> dict[str, Any]:
        same = "fits", "step_seconds", "mfu", "tokens_per_second", "rows_per_second", "limit", "shares", "waterfall"
        return {
            "spec": self.spec.to_dict(),
            "mesh": dict(self.spec.mesh.axes),
            **{name: getattr(self, name) for name in same},
            "peak_bytes": round(self.peak),
            "reserved_bytes": round(self.reserved),
            "outside_bytes": round(self.outside),
            "memory": {k: round(n) for k, n in self.memory.items()},
            "layers": list(self.counts),
        }


@dataclass(frozen=True)
class Plan:
    """The result of a search.

    candidates: those that fit first, the fastest first. considered: number of estimated choices. refused: compile's
    errors by split. answers: to questions such as "largest batch". what_if: what would make the best one faster
    (shardc.plan.what_if), the most helpful first.
    """

    target: Target
    candidates: tuple[Candidate, ...]
    considered: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    what_if: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0

    def __repr__(self) -> str:
        a = self.target
        best = repr(self.candidates[0]) if self.candidates and self.candidates[0].fits else "nothing fits"
        priced = f"{self.considered} choices, {len(self.candidates)} priced"
        return f"<Plan of {a.model} on {a.devices} x {a.device.name}: {priced}; best: {best}>"

    def __str__(self) -> str:
        """Return the table of `shardc plan`, without colours."""
        from shardc.plan.table import plain_table

        return plain_table(self)

    @property
    def best(self) -> Candidate:
        """The fastest candidate that fits. Raises ShardcError with the nearest one and a fix if nothing fits."""
        if not self.candidates or not self.candidates[0].fits:
            raise self.lacking()
        return self.candidates[0]

    def spec(self) -> str:
        """Return the best candidate's spec as YAML, annotated with reasons."""
        from shardc.plan.annotated_yaml import annotated

        return annotated(self.best, self)

    def save(self, path: str | Path) -> None:
        """Write the best candidate's spec to a file."""
        Path(path).write_text(self.spec(), encoding="utf-8")

    def html(self) -> str:
        """Return the plan as a page: the best spec, a plot, priced specs, time and memory, what would help."""
        from shardc.plan.page import html

        return html(self)

    def lacking(self) -> ShardcError:
        from shardc.plan.table import named

        a = self.target
        if not self.candidates:
            why = "; ".join(f"{k}: {v}" for k, v in list(self.refused.items())[:3])
            fault = f"no way to use {a.devices} devices was found{': ' + why if why else ''}"
            return ShardcError(fault, where=a.model, fix="see --global-batch")
        near = min(self.candidates, key=lambda c: c.needs)
        kind, most = max(near.memory.items(), key=lambda x: x[1])
        way = {
            "activations": "more devices, a shorter sequence, or a smaller global batch",
            "temporaries": "more tensor parallelism, a shorter sequence, or a smaller batch",
            "gathered": "more tensor parallelism",
        }.get(kind, "more devices, or another --precision")
        fault = (
            f"nothing fits into {size(a.usable)} of {a.device.name}: the nearest ({named(near)}) needs"
            f" {size(near.needs)}, {size(near.needs - a.usable)} more than that; {kind} are {size(most)} of it"
        )
        return ShardcError(fault, where=a.model, fix=f"{way}; --fewest finds out how many devices it takes")

    def to_json(self) -> dict[str, Any]:
        a = self.target
        return {
            "model": a.model,
            "device": a.device.name,
            "devices": a.devices,
            "global_batch": a.batch,
            "sequence": a.sequence,
            "usable_bytes": round(a.usable),
            "flops_per_row": a.flops,
            "assumed": list(a.assumed),
            "considered": self.considered,
            "seconds": self.seconds,
            "candidates": [c.to_json() for c in self.candidates],
            "refused": dict(self.refused),
            "answers": {k: dict(v) for k, v in self.answers.items()},
            "what_if": [dict(x) for x in self.what_if],
        }
