"""README's first example, typed as it is there: its commands print what README shows. And its Python."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import shardc
from docs import generate
from shardc.cli import app
from tests.docs.pages import README


def shown() -> Iterator[tuple[list[str], str]]:
    """(the words after `shardc`, what README shows of the output) of every command."""
    for block in README.blocks("console"):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command.split()[1:], output


def same(text: str) -> str:
    """Without what differs from run to run and from processor to processor: seconds, speeds, memory, rounding."""
    text = re.sub(r"(?<=relative difference )\d\.\de-1[3-9]", "_", text)
    text = re.sub(r" +\d+ s left$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\b\d[\d.]* s\b", "_ s", text)
    return re.sub(r" +[\d.]+( [kM])? (samples|tokens)/s( +[\d.]+ MiB( peak)?)?", " _ a second", text)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    generate.example(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_its_commands(example: Path) -> None:
    """All but `run`, in order. A line `...` leaves out what follows."""
    done = []
    for words, output in shown():
        if words[0] == "run":
            continue
        result = CliRunner().invoke(app, words)
        printed = same(result.output)
        expected, cut, _ = same(output).partition("...\n")
        assert printed.startswith(expected) if cut else printed == expected, printed
        done.append(words[0])
    assert done == ["compile", "verify", "inspect", "compile"]


def test_what_a_rank_runs(example: Path) -> None:
    """Each value of the first block is a line of the program, with its type."""
    (block,) = (b for b in README.blocks("python") if "what a rank runs" in b.notes)
    program = " ".join(CliRunner().invoke(app, ["compile", "model.py", "spec.yaml"]).output.split())
    for line in re.split(r"\n(?=\w)", block.text):
        assert " ".join(line.split()) in program


def test_run(example: Path) -> None:
    """On real processes: the losses are those that README shows."""
    assert CliRunner().invoke(app, ["compile", "model.py", "spec.yaml", "-o", "out"]).exit_code == 0
    words, output = next((w, o) for w, o in shown() if w[0] == "run")
    done = subprocess.run([sys.executable, "-m", "shardc", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert same(done.stdout) == same(output)


def test_its_python(example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In one process: what each process of torchrun does is done by the one rank of a mesh of one."""
    monkeypatch.syspath_prepend(example)
    monkeypatch.setitem(sys.modules, "model", None)  # type: ignore[arg-type]  # so that it is forgotten after the test
    del sys.modules["model"]
    (example / "spec.yaml").write_text("shardc: 1\nmesh: {tp: 1}\nshard: {use: structure}\n")
    code = next(b.text for b in README.blocks("python") if "shardc.compile" in b.text)
    assert len(code.splitlines()) == 8
    whole, each = code.split("engine = ", 1)
    names: dict[str, Any] = {}
    exec(compile(whole, "README.md", "exec"), names)
    assert names["program"].mesh.axes == (("tp", 4),)
    assert names["sim"].loss.isfinite()
    assert "ops.all_reduce" in capsys.readouterr().out
    names["program"] = shardc.compile(names["model"], names["batch"], "spec.yaml")
    exec(compile("engine = " + each.replace("devices=64", "devices=2"), "README.md", "exec"), names)
    assert float(names["loss"]) == pytest.approx(float(names["sim"].loss), rel=1e-6)
    assert isinstance(names["module"], torch.nn.Module)
    assert names["plan"].best is not None
