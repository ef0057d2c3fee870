"""What a run says of itself: the unit of speed (tokens where ids are looked up, else samples), the log, columns."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardc
from shardc.cli.ranks.step_lines import StepLines, columns, fitted, speed
from tests import zoo

ONE = {"shardc": 1, "mesh": {"dp": 1}}


def test_ids_that_an_embedding_looks_up_are_tokens() -> None:
    model, batch = zoo.gpt()
    rows, positions = batch["ids"].shape
    assert shardc.compile(model, batch, ONE).tokens == rows * positions


def test_images_and_labels_are_not() -> None:
    model = torch.nn.Linear(4, 3)
    batch = {"input": torch.ones(2, 4), "target": torch.zeros(2, dtype=torch.long)}
    program = shardc.compile(
        model, batch, ONE, loss=lambda output, batch: torch.nn.functional.cross_entropy(output, batch["target"])
    )
    assert program.tokens is None


def test_speed() -> None:
    assert speed({"samples_per_second": 12.34}) == "12.3 samples/s"
    assert speed({"samples_per_second": 1.0, "tokens_per_second": 2048.0}) == "2.0 k tokens/s"


def strictly(text: str) -> list[Any]:
    """The values of lines of JSON; nan and inf, which Python writes and reads, are none."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def log(folder: Path, begun: int, *steps: int, **last: float) -> list[Any]:
    """Write the log of a run that goes on after a step. last: held-out values of its last step."""
    lines = StepLines(99, None, folder, append=True, begun=begun)
    for step in steps:
        lines.add({"step": step, "loss": float(begun), "lr": None})
    lines.add_held_out(max(steps, default=begun), last)
    lines.close()
    return strictly((folder / "steps.jsonl").read_text())


def test_a_log_that_goes_back_has_each_step_once(tmp_path: Path) -> None:
    log(tmp_path, 0, 1, 2, 3, 4, 5)
    with (tmp_path / "steps.jsonl").open("a") as f:
        f.write('{"step": 6, "lo')  # the process was killed
    before = (tmp_path / "steps.jsonl").read_text()
    found = log(tmp_path, 2, 3, 4, held_out=0.5)
    assert [(x["step"], x["loss"]) for x in found] == [(1, 0), (2, 0), (3, 2), (4, 2)]
    assert found[-1] == {"step": 4, "loss": 2, "lr": None, "held_out": 0.5}
    assert (tmp_path / "steps.jsonl.old").read_text() == before


def test_a_log_that_went_back_and_forth_is_read_as_one_run(tmp_path: Path) -> None:
    """As versions of shardc without `begun` wrote it; what is no line of a step is left out."""
    steps = [1, 2, 3, 4, 5, 6, 3, 4, 5]
    text = "".join(f'{{"step": {s}, "at": {i}}}\n' for i, s in enumerate(steps))
    (tmp_path / "steps.jsonl").write_text(f"\0\0\n{text}[]\n")
    assert [x["at"] for x in log(tmp_path, 5)] == [0, 1, 6, 7, 8]


def test_held_out_values_come_into_the_line_of_a_run_that_was_killed_before(tmp_path: Path) -> None:
    log(tmp_path, 0, 1, 2)
    assert log(tmp_path, 2, held_out=0.25)[-1] == {"step": 2, "loss": 0, "lr": None, "held_out": 0.25}
    assert log(tmp_path, 2, held_out=0.75)[-1]["held_out"] == 0.25, "it has one"
    assert not (tmp_path / "steps.jsonl.old").exists()


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    line = {"step": 1, "loss": float("nan"), "outputs": {"a": [float("inf"), 1.5]}, "lr": None}
    lines = StepLines(1, None, tmp_path, append=False)
    lines.add(line)
    lines.close()
    (found,) = strictly((tmp_path / "steps.jsonl").read_text())
    assert found == {"step": 1, "loss": None, "outputs": {"a": [None, 1.5]}, "lr": None}


def test_updates_that_were_left_out_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    lines = StepLines(3, sys.stdout, None, append=False)
    line = {"loss": 1.0, "grad_norm": 0.0, "lr": None, "samples_per_second": 1.0, "memory_mb": 1.0}
    for step, more in enumerate(({}, {"updated": False, "skipped": 1}, {}), 1):
        lines.add({"step": step, **line, **more}, always=True)
    printed = capsys.readouterr().out.splitlines()
    assert [" 1 skipped" in x for x in printed] == [False, True, True]
    assert "skipped" not in printed[0]


LINE = {"step": 120, "epoch": 1.5, "loss": 2.25, "grad_norm": 0.5, "lr": 3e-4, "samples_per_second": 99.0}
LINE |= {"memory_mb": 400.0, "held_out": 2.5, "outputs": {"accuracy": 0.5}}


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_a_line_fits_the_terminal_and_keeps_what_matters(width: int) -> None:
    line = fitted([*columns(LINE), (3, "2 h 10 min left")], width)
    assert len(line) <= width
    assert line.startswith("step   120") or line.startswith("step")
    assert "loss 2.2500" in line
    assert ("left" in line) == (width > 60)
    assert ("peak" in line) == (width == 200)


def test_a_terminal_shows_the_last_step_and_lines_that_do_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    lines = StepLines(100, out, None, append=False)
    for step in range(1, 101):
        lines.add({**LINE, "step": step})
        print("a word of the user")
    lines.close()
    shown = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n").split("\n")
    assert max(map(len, shown)) < 80
    assert any("  1%  step     1" in x for x in shown), "the live line"
    assert sum(x.startswith("step") for x in shown) == 2, "the first and the last line"


def test_lines_that_are_left_out_are_said_once_and_the_first_step_is_not_in_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    lines = StepLines(1000, sys.stdout, None, append=False)
    for step in range(1, 300):
        clock[0] += 600.0 if step == 1 else 0.5  # the first step compiles
        lines.add({**LINE, "step": step})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("step     1")
    assert "left" not in printed[0]
    (note,) = [x for x in printed if "left out" in x]
    assert note == "note: lines come every 1 to 10 s (19 left out): --log DIR keeps all"
    assert printed[2].endswith("8 min 10 s left")
