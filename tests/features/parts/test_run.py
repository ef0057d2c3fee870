"""Parts in `shardc run`, on gloo: a run goes on with stages on their own meshes, and with one device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardc.cli import app

MODEL = """
import torch
from tests.features.parts.test_parts import ROWS, Seer

def model():
    return Seer().double()

def batch():
    generator = torch.Generator().manual_seed(1)
    patches = torch.randn(ROWS, 4, 12, generator=generator, dtype=torch.float64)
    return {"patches": patches, "ids": torch.randint(0, 48, (ROWS, 8), generator=generator)}
"""
SPECS = {
    "parts": """
shardc: 1
mesh: {dp: 2, tp: 2}
shard: {use: structure}
parts: {vision: {modules: vision, mesh: {dp: 4}}}
data: {zero: 3}
""",
    "stages": """
shardc: 1
mesh: {pp: 2, dp: 1, tp: 2}
shard: {use: structure}
batch: {microbatches: 2}
pipeline: {axis: pp, cut: layers, meshes: {0: {dp: 2}}}
data: {zero: 2}
""",
    "one": "{shardc: 1, mesh: {dp: 1}}",
}


def losses(folder: Path, *specs: tuple[str, int]) -> list[float]:
    """Return the losses of a run of 2 steps with each spec, on so many ranks; each goes on from the one before."""
    for i, (spec, nproc) in enumerate(specs):
        (folder / "spec.yaml").write_text(SPECS[spec])
        more = ["--resume", "saved"] if i else []
        command = ["run", "model.py", "spec.yaml", "--steps", str(2 * i + 2), "--save", "saved", "--lr", "0.01"]
        result = CliRunner().invoke(app, [*command, "--log", "log", "--nproc", str(nproc), *more])
        assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (folder / "log" / "steps.jsonl").read_text().splitlines()]
    return [x["loss"] for x in lines if "loss" in x and "step" in x]


def test_a_run_goes_on_with_parts_and_with_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    many = losses(tmp_path, ("parts", 4), ("stages", 4))
    for folder in ("saved", "log"):
        (tmp_path / folder).rename(tmp_path / f"{folder}-before")
    assert many == pytest.approx(losses(tmp_path, ("one", 1), ("one", 1)), rel=1e-12)
    assert len(many) == 4
