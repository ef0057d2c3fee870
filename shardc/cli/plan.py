"""`shardc plan`: a progress bar while it prices, then the table, the answers, and the spec."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardc.cli import model_file
from shardc.plan import plan
from shardc.plan.result import Plan
from shardc.plan.table import breakdown, gb, heading, table

#: Columns of a table that goes to a file.
WIDE = 200
#: Seconds between lines of progress.
EVERY = 5.0
#: What is done before anything is priced.
PLAIN = ("loading the model", "capturing")


@contextmanager
def progress(console: Console, *, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr that says what is being priced; where stderr is no terminal, a line every few seconds."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(30),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    ) as bar:
        task = bar.add_task("loading the model", total=None)
        started, said = time.monotonic(), -math.inf

        def on(what: str, done: int, of: int) -> None:
            nonlocal said
            doing = what if what in PLAIN else f"pricing {what}"
            bar.update(task, description=doing, completed=done, total=of or None)
            now = time.monotonic() - started
            if not quiet and not console.is_terminal and now - said >= EVERY:
                said = now
                console.print(f"{now:3.0f} s: {doing}" + (f" ({done + 1} of {of})" if of else ""), markup=False)

        on("loading the model", 0, 0)
        yield on


def command(
    source: str,
    *,
    batch: int | None,
    seq: int | None,
    output: Path | None,
    as_json: bool,
    show: Callable[[str], None],
    console: Console,
    **options: Any,
) -> int:
    """Returns the exit status: 0, or 1 if nothing fits."""
    with progress(console, quiet=as_json) as on:
        file = model_file.load(source, batch=batch, seq=seq)
        found = plan(file.on_meta(), file.batch, loss=file.loss, name=source, on=on, **options)
    fits = bool(found.candidates) and found.candidates[0].fits
    if output and fits:
        found.save(output)
    if as_json:
        lacking = {"errors": found.lacking().to_json()} if not fits and options.get("given") is None else {}
        show(json.dumps({**found.to_json(), "output": str(output) if output and fits else None, **lacking}))
    else:
        _print(found, given=options.get("given") is not None)
        if output and fits:
            show(f"written to {output}")
    if not fits and options.get("given") is None:
        console.print("[bold red]error[/] ", end="")
        console.print(str(found.lacking()), markup=False)
    return 0 if fits else 1


def _print(found: Plan, *, given: bool) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    plain = not console.is_terminal
    if given:
        console.print(heading(found))
    console.print(breakdown(found.candidates[0], plain=plain) if given else table(found, plain=plain))
    for name, answer in found.answers.items():
        if answer["value"] is None:
            console.print(f"{name}: none")
            continue
        line = (
            f"{name}: {answer['value']} {answer['what']}, peak {gb(answer['peak_bytes'])}"
            if answer["value"]
            else f"{name}: nothing fits"
        )
        if answer.get("next_peak_bytes"):
            line += f"; {answer['next']} would need {gb(answer['next_peak_bytes'])}"
        console.print(line)
