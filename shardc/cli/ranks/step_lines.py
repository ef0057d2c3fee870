"""Report a run: a header, a line every few seconds with the remaining time, and steps.jsonl."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

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
        f"{optimizer_text(engine.optimizer)}; {parts}{begun}",
        f"data: {data}",
        *([f"held-out data: {held_out}"] if held_out else []),
        *note_lines(program.notes),
    ]
    return "\n".join(lines)


def optimizer_text(optimizer: torch.optim.Optimizer | None) -> str:
    """Format an optimizer for people: AdamW, lr 0.0003, 2 groups."""
    if optimizer is None:
        return "no optimizer on this rank"
    rates = sorted(learning_rates(optimizer), key=lambda rate: rate or 0.0)
    groups = f", {len(optimizer.param_groups)} groups" if len(optimizer.param_groups) > 1 else ""
    return f"{class_of(optimizer)}, lr {rates_text(rates, '.3g')}{groups}"


class StepLines:
    """Prints lines of steps at intervals, and appends each step to LOG/steps.jsonl. On rank 0 only.

    steps: the last step of the run. out: stream for the lines; None: none. In a terminal, lines fit its width, and the
    last step is shown below them. log: folder of steps.jsonl; None: no log. append: go on with the log that is there,
    after step `begun`: the run takes later steps again.
    """

    def __init__(self, steps: int, out: TextIO | None, log: Path | None, *, append: bool, begun: int = 0) -> None:
        self.steps, self._out, self._skipped = steps, out, 0
        self._begun = self._next = time.perf_counter()
        self._first: tuple[int, float] | None = None  # the first step, which compiles, and when it was done
        self._left_out = 0  # lines that were not printed since the last one; -1: a note has said so
        self._last, self._at = dict[str, Any](), 0  # the last line of the log, and the byte at which it begins
        self._file: TextIO | None = None
        self._live = LiveLine(out) if out is not None and out.isatty() and os.environ.get("TERM") != "dumb" else None
        if log is not None:
            log.mkdir(parents=True, exist_ok=True)
            file = log / "steps.jsonl"
            if not append:
                file.unlink(missing_ok=True)
            elif file.exists() and (lines := logged(file, begun)):
                self._last, self._at = json.loads(lines[-1]), file.stat().st_size - len(lines[-1]) - 1
            self._file = file.open("a", buffering=1)  # after a cut it goes on at the end

    def add(self, line: dict[str, Any], *, always: bool = False) -> None:
        """Log the facts of one step, and print its line if it is due. always: print it in any case."""
        if self._file is not None:
            self._last, self._at = line, self._file.tell()
            self._file.write(json_text(line) + "\n")
        now, step, self._skipped = time.perf_counter(), line["step"], line.get("skipped", self._skipped)
        self._first = self._first or (step, now)
        if self._out is None:
            return
        parts = columns({"skipped": self._skipped, **line})
        first, since = self._first
        if first < step < self.steps:
            parts.append((3, f"{duration((now - since) / (step - first) * (self.steps - step))} left"))
        if always or now >= self._next or step == self.steps:
            if self._left_out > 0:
                kept = "steps.jsonl has all" if self._file is not None else "--log DIR keeps all"
                self.say(f"note: lines come every {SOONEST:g} to {LATEST:g} s ({self._left_out} left out): {kept}")
                self._left_out = -1
            self.say(fitted(parts, self._live.width if self._live is not None else None))
            self._next = now + min(LATEST, max(SOONEST, (now - self._begun) / 20))
        elif self._left_out >= 0:
            self._left_out += 1
        if self._live is not None:
            self._live.show(f"{step / self.steps:4.0%}  {fitted(parts, self._live.width - 6)}")

    def add_held_out(self, step: int, held_out: Mapping[str, Any]) -> None:
        """Put held-out values into the logged line of this step, which is the last one, unless it has them."""
        if self._file is not None and held_out and self._last.get("step") == step and "held_out" not in self._last:
            self._file.truncate(self._at)
            self._last |= held_out
            self._file.write(json_text(self._last) + "\n")

    def say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text)
        elif self._out is not None:
            print(text, file=self._out, flush=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._live is not None:
            self._live.close()


class LiveLine:
    """The last line of a terminal, which shows the last step. It is rewritten at most four times a second."""

    def __init__(self, out: TextIO) -> None:
        self.console, self._next = Console(file=out, highlight=False, markup=False, soft_wrap=True), 0.0
        # what others print appears above the line; what goes to a file stays there
        self._live = Live(console=self.console, transient=True, auto_refresh=False, redirect_stderr=sys.stderr.isatty())

    @property
    def width(self) -> int:
        return self.console.width - 1  # a full line wraps in some terminals

    def show(self, text: str) -> None:
        if (now := time.monotonic()) >= self._next:
            if not self._live.is_started:
                self._live.start()
                self.console.show_cursor(True)  # a process that is killed cannot do that
            self._live.update(Text(text, no_wrap=True), refresh=True)
            self._next = now + 0.25

    def close(self) -> None:
        self._live.stop()


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


def duration(seconds: float) -> str:
    """Format seconds as 3 s, 12 min 5 s, 3 h 20 min or 2 d 4 h."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    return f"{s // 3600} h {s % 3600 // 60} min" if s < 86400 else f"{s // 86400} d {s % 86400 // 3600} h"


def columns(line: dict[str, Any]) -> list[tuple[int, str]]:
    """Return the columns of a step's line. The number: columns with higher ones are left out first (`fitted`)."""
    skipped = f"{line['skipped']} skipped" if line.get("skipped") else ""
    if "loss_scale" in line:
        skipped = f"loss scale {line['loss_scale']:g}, {line['skipped']} skipped"
    held_out = f"held-out loss {line['held_out']:.4f}" if line.get("held_out") is not None else ""
    return [
        (0, f"step {line['step']:>5}"),
        (5, f"epoch {line['epoch']:.2f}" if line.get("epoch") else ""),
        (0, f"loss {line['loss']:.4f}"),
        (7, outputs_text(line.get("outputs", {})).rstrip()),
        (6, f"grad norm {line['grad_norm']:.3f}"),
        (4, f"lr {line['lr']:.2e}" if line["lr"] is not None else ""),
        (3, f"{speed(line):>18}"),
        (8, f"{size(line['memory_mb'] * 2**20)} peak"),
        (2, skipped),
        (1, held_out),
        (7, outputs_text(line.get("held_out_outputs", {})).rstrip()),
        (9, _experts(line.get("experts", ())).strip()),
    ]


def fitted(parts: Sequence[tuple[int, str]], width: int | None = None) -> str:
    """Join columns to a line. If it is wider than this, leave out the least important ones."""
    shown = [part for part in parts if part[1]]
    while len(line := "  ".join(text for _, text in shown)) > (width or math.inf) and len(shown) > 1:
        if any(text != text.lstrip() for _, text in shown):
            shown = [(number, text.lstrip()) for number, text in shown]
        else:
            shown.remove(max(shown, key=lambda part: part[0]))
    return line


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
