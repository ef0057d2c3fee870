"""Choices in `shardc run`: recorded by sample, and replayed in another order and on another mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from shardc.cli import app

MODEL = """
import torch
from tests.features.choices import models
from tests.features.choices.models import loss

def model():
    return models.built()[0].float()

def batch():
    return models.built()[1]

def data(split):
    if split == "valid":
        return None
    rows = torch.randint(models.VOCABULARY, (12, models.TOKENS + 1), generator=torch.Generator().manual_seed(3))
    return [{"ids": x[:-1], "labels": x[1:]} for x in rows]
"""


def run(folder: Path, choices: str, *options: str, mesh: str = "dp: 1") -> Any:
    (folder / "model.py").write_text(MODEL)
    (folder / "spec.yaml").write_text(f'shardc: 1\nmesh: {{{mesh}}}\nchoices: {{"*.gate": {choices}}}\n')
    return CliRunner().invoke(app, ["run", "model.py", "spec.yaml", "--lr", "0.01", *options])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return {x["step"]: x["loss"] for x in lines if "loss" in x and "step" in x}


def test_a_run_replays_what_another_recorded(folder: Path) -> None:
    first = run(
        folder, "record", "--steps", "3", "--choices", "taken", "--log", "a", "--save", "s", "--save-every", "2"
    )
    assert first.exit_code == 0, first.output
    files = sorted(Path("taken").glob("*"))
    assert [f.name for f in files] == [f"step-0000000{i}.safetensors" for i in (1, 2, 3)]
    before = load_file(files[2])
    assert before["layers.0.gate"].shape == (4, 8, 2)
    assert sorted(x for f in files for x in load_file(f)["sample"].tolist()) == list(range(12))
    files[2].unlink()
    again = run(
        folder, "record", "--steps", "3", "--choices", "taken", "--resume", "s/checkpoint/step-000002", mesh="dp: 2"
    )
    assert again.exit_code == 0, again.output
    assert all(x.equal(before[n]) for n, x in load_file(files[2]).items())  # resumed, on another mesh
    done = run(folder, "replay", "--steps", "3", "--choices", "taken", "--log", "b", mesh="dp: 2")
    assert done.exit_code == 0, done.output
    a, b = losses(folder / "a"), losses(folder / "b")
    assert a.keys() == b.keys() == {1, 2, 3}
    assert all(abs(a[i] - b[i]) < 1e-5 for i in a)
    shuffled = run(folder, "replay", "--steps", "2", "--choices", "taken", "--seed", "5", mesh="dp: 2")
    assert shuffled.exit_code == 0, shuffled.output


def test_errors(folder: Path) -> None:
    for choices, options, text in (
        ("replay", ["--choices", "nothing"], "cannot be read"),
        ("replay", [], "the program replays choices, and it was given none"),
        ("record", ["--choices", "new", "--set", "choices={}"], "the spec has no `choices`"),
    ):
        done = run(folder, choices, "--steps", "1", *options)
        assert done.exit_code
        assert text in done.output.replace("\n", " ")
