"""The launchers' lines of launching.md: torchrun runs `shardc run`, and, in new processes, a program of one's own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser

from docs import generate
from shardc.cli import app
from tests import warm
from tests.docs.pages import ROOT, Page

LAUNCHING = Page(ROOT / "docs" / "how-to/launching.md")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    generate.example(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def launched(*words: str) -> str:
    for _ in range(3):
        done = subprocess.run([*TORCHRUN, *words], capture_output=True, text=True, check=False, timeout=150)
        if "terminate called without an active exception" not in done.stderr:
            break  # else torch has aborted a process that had done its work: github.com/pytorch/pytorch/pull/179291
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines() -> list[list[str]]:
    """The words after `torchrun` of every line that begins with it."""
    text = "".join(block.text for block in LAUNCHING.blocks("console"))
    return [shlex.split(x, comments=True) for x in re.findall(r"^\$ torchrun (.*)$", text, re.MULTILINE)]


def test_torchrun_runs_the_command(example: Path) -> None:
    """The first line that is complete on one machine, with fewer steps; in processes that have torch imported."""
    words = next(w for w in lines() if "--nnodes" not in w and "--save" in w)
    words[words.index("--steps") + 1] = "2"
    words[(at := words.index("shardc")) : at + 1] = [sys.executable, "-m", "shardc"]
    log = example / "log"
    log.touch()
    assert warm.start("-m", "torch.distributed.run", *words, log=log).wait(150) == 0, log.read_text()
    assert "loss 0.2649" in log.read_text()
    assert (example / "runs" / "a" / "model.safetensors").is_file()


@pytest.mark.parametrize("line", lines(), ids=lambda words: " ".join(words[1:3]))
def test_torchrun_lines_take_all_options_of_the_command(line: list[str]) -> None:
    """Its parser sees what follows the command, too: some versions of Python find `--log` ambiguous there."""
    command: Any = typer.main.get_command(app)
    options = [o for p in command.commands["run"].params for o in p.opts if o.startswith("-")]
    assert "--log" in options
    called = get_args_parser().parse_args([*line, *options])
    assert (called.no_python, called.training_script) == (True, "shardc")
    assert called.training_script_args == [*line[line.index("shardc") + 1 :], *options]


def test_torchrun_lines_are_of_one_and_of_several_machines() -> None:
    assert [("--nnodes" in words) for words in lines()] == [False, True]


def test_torchrun_runs_a_program_of_ones_own(example: Path) -> None:
    (block,) = (b for b in LAUNCHING.blocks("python") if any(n.startswith("train.py") for n in b.notes))
    (example / "train.py").write_text(block.text)
    assert re.fullmatch(r"loss 0\.\d{4}\n", launched("--nproc-per-node", "4", "train.py"))
