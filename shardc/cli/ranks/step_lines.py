"""Report a run: a header, a line every few seconds with the remaining time, and steps.jsonl."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from shardc.api import Program
from shardc.cli.common import json_text
from shardc.ir.units import count, per_second, plural, size
from shardc.layer_names import note_lines
from shardc.runtime.zero.several_optimizers import class_of, learning_rates, rates_text

#: Bounds of the seconds between lines, which are a twentieth of the time so far.
SOONEST, LATEST = 1.0, 10.0


def header(program: Program, engine: Any, data: str, held_out: str, steps: int, weights: Sequence[str]) -> str:
    """Return the header of a run: model, mesh, weights, optimizer, precision, data, notes of compile.

    weights: lines that say where training begins.
    """
    numbers = sum(math.prod(p.shape) for p in program.params)
    trained = sum(math.prod(p.shape) for p in program.params if p.requires_grad)
    frozen = f", {count(numbers - trained)} of them frozen" if trained < numbers else ""
    mesh = " x ".join(f"{a}={n}" for a, n in program.mesh.axes) or "one device"
    nbytes = sum(p.nbytes for p in engine.owned.values())
    compute = program.spec.precision.compute
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in program.params})
    precision = ", ".join(dtypes) + (f", computed in {str(compute).removeprefix('torch.')}" if compute else "")
    parts = f"{program.microbatches} microbatches a step, " if program.microbatches > 1 else ""
    begun = f"from step {engine.step_count} to {steps}" if engine.step_count else f"{steps} steps"
    lines = [
        f"{program.meta.get('model', 'model')}: {count(numbers)} parameters{frozen}, {precision}",
        f"mesh {mesh}: {plural(program.mesh.world, 'rank')} on {engine.mesh.device.type},"
        f" {size(nbytes)} of parameters on rank 0",
        *weights,
        f"{_optimizer(engine.optimizer)}; {parts}{begun}",
        f"data: {data}",
        *([f"held-out data: {held_out}"] if held_out else []),
        *note_lines(program.notes),
    ]
    return "\n".join(lines)


def _optimizer(optimizer: torch.optim.Optimizer | None) -> str:
    if optimizer is None:
        return "no optimizer on this rank"
    rates = sorted(learning_rates(optimizer), key=lambda rate: rate or 0.0)
    groups = f", {len(optimizer.param_groups)} groups" if len(optimizer.param_groups) > 1 else ""
    return f"{class_of(optimizer)}, lr {rates_text(rates, '.3g')}{groups}"


class StepLines:
    """Prints lines of steps at intervals, and appends each step to LOG/steps.jsonl. On rank 0 only.

    steps: the last step of the run. out: stream for the lines; None: none. log: folder of steps.jsonl; None: no log.
    append: go on with the log that is there, after step `begun`: the run takes later steps again. tensorboard: also
    write the numbers for TensorBoard, into that folder.
    """

    def __init__(
        self,
        steps: int,
        out: TextIO | None,
        log: Path | None,
        *,
        append: bool,
        tensorboard: bool = False,
        begun: int = 0,
    ) -> None:
        self.steps, self._out, self._skipped = steps, out, 0
        self._begun = self._next = time.perf_counter()
        self._first: int | None = None
        self._last, self._at = dict[str, Any](), 0  # the last line of the log, and the byte at which it begins
        self._file: TextIO | None = None
        if log is not None:
            log.mkdir(parents=True, exist_ok=True)
            file = log / "steps.jsonl"
            if append and file.exists() and (lines := logged(file, begun)):
                self._last, self._at = json.loads(lines[-1]), file.stat().st_size - len(lines[-1]) - 1
            self._file = file.open("a" if append else "w", buffering=1)
        self._board: Any = None
        if log is not None and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(log), purge_step=begun + 1)

    def add(self, line: dict[str, Any], *, always: bool = False) -> None:
        """Log the facts of one step, and print its line if it is due. always: print it in any case."""
        if self._file is not None:
            self._last, self._at = line, self._file.tell()
            self._file.write(json_text(line) + "\n")
        now, step, self._skipped = time.perf_counter(), line["step"], line.get("skipped", self._skipped)
        self._plot(line, step)
        self._first = step - 1 if self._first is None else self._first
        if self._out is not None and (always or now >= self._next or step == self.steps):
            done = step - self._first
            left = (now - self._begun) / done * (self.steps - step)
            ending = f"  {duration(left)} left" if step < self.steps else ""
            print(text({"skipped": self._skipped, **line}) + ending, file=self._out, flush=True)
            self._next = now + min(LATEST, max(SOONEST, (now - self._begun) / 20))

    def add_held_out(self, step: int, held_out: Mapping[str, Any]) -> None:
        """Put held-out values into the logged line of this step, which is the last one, unless it has them."""
        if self._file is not None and held_out and self._last.get("step") == step and "held_out" not in self._last:
            self._file.truncate(self._at)
            self._last |= held_out
            self._file.write(json_text(self._last) + "\n")
            self._plot(held_out, step)

    def _plot(self, line: Mapping[str, Any], step: int) -> None:
        for name, value in _flat_numbers(line) if self._board is not None else ():
            self._board.add_scalar(name, value, step)

    def say(self, what: str) -> None:
        if self._out is not None:
            print(what, file=self._out, flush=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def logged(file: Path, begun: int) -> list[str]:
    """Return the lines of a log up to a step, and leave only them; keep the file as it was as steps.jsonl.old.

    Lines that a run which went back has logged again count once. A killed run may have left a part of a line.
    """
    kept: list[tuple[int, str]] = []
    text = file.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            step = int(json.loads(line)["step"])
            while kept and kept[-1][0] >= step:
                kept.pop()
            kept += [(step, line)] if step <= begun else []
    lines = [line for _, line in kept]
    if (left := "".join(f"{line}\n" for line in lines)) != text:
        file.replace(file.with_suffix(".jsonl.old"))
        file.write_text(left, encoding="utf-8")
    return lines


def _flat_numbers(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and name != "step":
            yield prefix + name, value


def duration(seconds: float) -> str:
    """Format seconds as 3 s, 12 min 5 s, 3 h 20 min or 2 d 4 h."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    return f"{s // 3600} h {s % 3600 // 60} min" if s < 86400 else f"{s // 86400} d {s % 86400 // 3600} h"


def text(line: dict[str, Any]) -> str:
    """Format the line of a step for people."""
    rate = f"lr {line['lr']:.2e}  " if line["lr"] is not None else ""
    skipped = f"  {line['skipped']} skipped" if line.get("skipped") else ""
    return (
        f"step {line['step']:>5}  loss {line['loss']:.4f}  {outputs_text(line.get('outputs', {}))}"
        f"grad norm {line['grad_norm']:.3f}  {rate}"
        f"{speed(line):>18}  {size(line['memory_mb'] * 2**20)} peak"
        + (f"  loss scale {line['loss_scale']:g}, {line['skipped']} skipped" if "loss_scale" in line else skipped)
        + (f"  held-out loss {line['held_out']:.4f}" if line.get("held_out") is not None else "")
        + f"  {outputs_text(line.get('held_out_outputs', {}))}".rstrip()
        + _experts(line.get("experts", ()))
    )


def speed(facts: dict[str, Any]) -> str:
    """Format the speed of a step or a run: tokens a second, or samples a second if it has no tokens."""
    unit = "tokens" if facts.get("tokens_per_second") is not None else "samples"
    return per_second(facts[f"{unit}_per_second"], unit)


def outputs_text(beside: dict[str, float]) -> str:
    """Format the values that the loss function returns beside the loss: `accuracy 0.8125  right 13  `."""
    return "".join(f"{name} {x:.4g}  " if isinstance(x, float) else f"{name} {x}  " for name, x in beside.items())


def _experts(layers: Sequence[dict[str, Any]]) -> str:
    """Format the experts of all layers: least and most tokens of an expert, busiest rank, drops."""
    if not layers:
        return ""
    tokens = [n for x in layers for n in x["tokens"]]
    dropped = sum(x["dropped"] for x in layers) / len(layers)
    spread = f"  experts {min(tokens)}-{max(tokens)} tokens, busiest rank x{max(x['imbalance'] for x in layers):.2f}"
    return spread + (f", {dropped:.1%} dropped" if dropped else "")
