"""Read the log that `shardc run --log` wrote: lines of steps, and steps whose ops were timed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from shardc.cost.measured.op_times import MeasuredStep
from shardc.errors import ShardcError

#: The first steps of a run or a resume, which are slower: memory is allocated, fused regions are compiled.
WARM = 2


@dataclass(frozen=True)
class RunLog:
    """The log of a run. lines: of steps.jsonl, in order. timed: steps whose ops were timed, per rank."""

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
        """The median seconds of a step."""
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


def read(folder: str | Path, *, timed: bool = True) -> RunLog:
    """Read a run's log. Raises ShardcError without a log or, if `timed`, without timed ops."""
    folder = Path(folder)
    file = folder / "steps.jsonl"
    if not file.is_file():
        raise ShardcError(f"there is no steps.jsonl in {folder}", where=str(folder), fix="shardc run ... --log DIR")
    try:
        lines = [json.loads(x) for x in file.read_text(encoding="utf-8").splitlines()]
        steps = [MeasuredStep.of_json(json.loads(x.read_text())) for x in sorted(folder.glob("ops-step*-rank*.json"))]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        fault = f"this is not a log of `shardc run`: {e}"
        raise ShardcError(fault, where=str(folder), fix="name another folder") from None
    if not lines or "seconds" not in lines[-1]:
        raise ShardcError(f"{file} has no step", where=str(folder), fix="run some steps first")
    if timed and not steps:
        fault, fix = "this run has no step with times of ops", "run it again with --breakdown 5 (a step's number)"
        raise ShardcError(fault, where=str(folder), fix=fix)
    return RunLog(folder, lines, steps)
