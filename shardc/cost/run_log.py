"""What `shardc run --log` left of a run: steps as they went, and those whose ops were timed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from shardc.cost.fit import Fitted, LinkSample, OpSample, fit, merged
from shardc.cost.op_times import MeasuredStep
from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.machine.device import Device

#: First steps of a run, or of its part after a resume, that are slower: memory is taken, fused regions are compiled.
WARM = 2
#: So many waits say by how much ranks come late; of one collective, how long it takes where none is late.
WAITS = 8
#: A wait is long that lasts so many times as long as ranks are late: it says how long its collective takes.
LONG = 4.0


@dataclass(frozen=True)
class RunLog:
    """lines: of steps.jsonl, in their order. timed: steps whose ops were timed, of each rank that did."""

    folder: Path
    lines: Sequence[Mapping[str, Any]]
    timed: Sequence[MeasuredStep]

    @property
    def quiet(self) -> Sequence[Mapping[str, Any]]:
        """Lines of steps that nothing slowed down; of a short run as many as there are."""
        plain = [x for x in self.lines if not x.get("breakdown")] or list(self.lines)
        return plain[WARM:] or plain[-1:]

    @property
    def seconds(self) -> float:
        """Of a step: half of them take longer."""
        return median(float(x["seconds"]) for x in self.quiet)

    @property
    def data_wait(self) -> float:
        return median(float(x["data_wait"]) for x in self.quiet)

    @property
    def waited(self) -> dict[str, float]:
        """Seconds of a step in which rank 0 waits for collectives, by their axes."""
        axes = sorted({a for x in self.quiet for a in x.get("waited", {})})
        return {a: median(float(x.get("waited", {}).get(a, 0.0)) for x in self.quiet) for a in axes}

    @property
    def memory(self) -> dict[str, float]:
        """The most bytes of the device's allocator, or of a CPU's process: "memory", "reserved"."""
        names = {"memory": "memory_mb", "reserved": "reserved_mb"}
        return {k: max(float(x[n]) for x in self.lines) * 2**20 for k, n in names.items() if n in self.lines[-1]}

    def host(self, collective: float = 0.0) -> float | None:
        """Seconds that the host takes for an op. On a CPU, what is left of a step beside its ops and waits; on a GPU,
        where the host is what a step waits for, all of a step; else None: it may take anything less. collective:
        seconds that it takes for a collective.
        """
        first = [s for s in self.timed if s.rank == 0]
        each = [(sum(x.seconds for x in s.ops) + collective * len(s.waits), sum(x.count for x in s.ops)) for s in first]
        if not each or not all(count for _, count in each):
            return None
        busy, count = median(busy for busy, _ in each), median(count for _, count in each)
        left = self.seconds - busy - sum(self.waited.values())
        if self.timed[0].kind == "cpu":
            return max(left, 0.0) / count
        return self.seconds / count if left > 0.1 * self.seconds else None

    def ops(self) -> list[OpSample]:
        """Of each op, its mean in a step: half of the steps have more."""
        each = (OpSample(x.op, x.seconds / x.count, x.count) for step in self.timed for x in step.ops)
        return merged(each, median)

    def links(self, skew: float = 0.0) -> list[LinkSample]:
        """Of each collective that was waited for from its begin on, the quickest: all others were there already. One
        that was waited for a few times only, and not for long, tells more about ranks that come late. skew: seconds by
        which they do.
        """
        waits = {key: (min(seconds), len(seconds)) for key, seconds in self._whole_waits().items()}
        return [LinkSample(*key, least) for key, (least, n) in waits.items() if n >= WAITS or least >= LONG * skew]

    @property
    def skew(self) -> float | None:
        """Seconds by which half of the waits are longer than the quickest one of their collective; None of a few.
        (Their mean would be that of timed steps, in which ranks are later than in others.)
        """
        longer = [x - min(seconds) for seconds in self._whole_waits().values() if len(seconds) > 1 for x in seconds]
        return median(longer) if len(longer) >= WAITS else None

    def _whole_waits(self) -> dict[tuple[str, int, tuple[int, ...]], list[float]]:
        """Seconds of those that lasted from a collective's begin on, by its kind, bytes and ranks."""
        found: defaultdict[tuple[str, int, tuple[int, ...]], list[float]] = defaultdict(list)
        for step in self.timed:
            mesh = Mesh(tuple(step.mesh.items()))
            for wait in step.waits:
                if wait.whole:
                    found[wait.kind, wait.bytes, mesh.group(step.rank, wait.axes)].append(wait.seconds)
        return found


def read(folder: str | Path, *, timed: bool = True) -> RunLog:
    """Raises ShardcError where no run has logged there, or, `timed`, none of its ops were timed."""
    folder = Path(folder)
    file = folder / "steps.jsonl"
    if not file.is_file():
        raise ShardcError(f"there is no steps.jsonl in {folder}", where=str(folder), fix="shardc run ... --log DIR")
    try:
        lines = [json.loads(x) for x in file.read_text(encoding="utf-8").splitlines()]
        steps = [MeasuredStep.of_json(json.loads(x.read_text())) for x in sorted(folder.glob("ops-step*-rank*.json"))]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ShardcError(
            f"this is no log of `shardc run`: {e}", where=str(folder), fix="name another folder"
        ) from None
    if not lines or "seconds" not in lines[-1]:
        raise ShardcError(f"{file} has no step", where=str(folder), fix="let the run make some steps")
    if timed and not steps:
        what, fix = "no step of this run has times of ops", "run it again with --breakdown 5 (a step's number)"
        raise ShardcError(what, where=str(folder), fix=fix)
    return RunLog(folder, lines, steps)


def fitted_to(base: Device, logs: Sequence[RunLog]) -> Fitted:
    """`base` with the numbers of runs of it, which its source then names. Raises ShardcError for a device of another
    kind.
    """
    for log in logs:
        for step in log.timed:
            if (step.kind == "cpu") != (base.kind == "cpu"):
                what = f"the run was on {step.device}, and {base.name} is no {step.kind} device"
                raise ShardcError(what, where=str(log.folder), fix="name the device that it was on")
    ops = merged((x for log in logs for x in log.ops()), median)
    found = fit(base, ops, [x for log in logs for x in log.links(base.skew if log.skew is None else log.skew)])
    source = f"{base.source}; fitted to {', '.join(str(log.folder) for log in logs)} ({date.today()}): {found}"
    each = [seconds for log in logs if (seconds := log.host(base.host_collective)) is not None]
    host = min(each, default=found.device.host)
    skew = min((x for log in logs if (x := log.skew) is not None), default=found.device.skew)
    return replace(found, device=found.device.model_copy(update={"source": source, "host": host, "skew": skew}))
