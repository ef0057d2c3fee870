"""`shardc cost`: what a step's time goes to; and of a real run on two processes, what of it was predicted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardc.cost import device
from shardc.cost.measured import run_log
from shardc.machine.device import Link
from tests import warm

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x):
        return (self.norm(self.down(self.up(x).relu())) - x).square().mean()

def model():
    return Net()

def batch():
    return {"x": torch.randn(16, 32)}

def optimizer(params):
    return torch.optim.SGD([p for _, p in params], lr=0.1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "spec.yaml").write_text("shardc: 1\nmesh: {dp: 2}\ndata: {zero: 1}\n")
    # made up: nobody looks at the times
    link = Link(bandwidth=1e9, latency=1e-4)
    cpu = device("h100-80g").model_copy(
        update={"name": "cpu", "kind": "cpu", "source": "made up", "within": link, "between": link, "node": 2}
    )
    (tmp_path / "here.yaml").write_text(cpu.to_yaml())
    return tmp_path


def test_a_run_is_compared_and_learnt_from(folder: Path) -> None:
    run = ["run", "model.py", "spec.yaml", "--steps", "5", "--log", "log", "--breakdown", "3", "--breakdown", "4"]
    done = warm.run(*run, cwd=folder)
    assert done.returncode == 0, done.stderr
    log = run_log.read(folder / "log")
    assert [bool(x.get("breakdown")) for x in log.lines] == [False, False, True, True, False]
    assert set(log.waited) == {"dp"}
    assert [(x.step, x.rank, x.mesh, x.kind) for x in log.timed] == [(n, 0, {"dp": 2}, "cpu") for n in (3, 4)]
    assert {x.part for x in log.timed[0].ops} == {"forward", "backward", "update"}
    assert not any("c10d" in x.op.name for x in log.timed[0].ops)

    compare = ["cost", "model.py", "spec.yaml", "--compare", "log", "--device", "here.yaml"]
    done = warm.run(*compare, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert {"host", "update", "waiting for dp", "data"} <= found["lines"].keys()
    measured = sum(x["measured"] for x in found["lines"].values())
    assert measured == pytest.approx(log.seconds + log.data_wait)
    assert found["step"]["measured"] == pytest.approx(measured)
    assert found["made_bytes"]["predicted"] == pytest.approx(found["made_bytes"]["measured"], abs=4096)
    products = [x for x in found["ops"] if x["flops"]]
    assert sum(x["flops"] * x["count"] for x in products) == 2 * 8 * 32 * 64 * 5  # of 8 rows; none for the input
    table = warm.run(*compare, cwd=folder).stdout.splitlines()
    assert table[0] == "log on cpu: 1 steps, and 2 whose ops were timed"
    assert table[1].split() == ["predicted", "measured", "difference"]
    assert any(line.startswith("waiting for dp") for line in table)


def test_what_a_step_goes_to(folder: Path) -> None:
    done = warm.run("cost", "model.py", "spec.yaml", "--device", "h200", cwd=folder)
    assert done.returncode == 0, done.stderr
    first, head, *lines = done.stdout.splitlines()
    words = r"on h200: a step of \S+ .s, in float32, SGD, with the norm of gradients, by what its seconds go to"
    assert re.fullmatch(words, first)
    assert head.split() == ["each", "rank"]
    shown = warm.run("inspect", "model.py", "spec.yaml", "--comm", "--device", "h200", cwd=folder).stdout
    assert re.search(r"\non h200: a step of \S+ .s, in float32, AdamW, without the norm of gradients\n", shown)
    assert [line.rpartition("  ")[0].strip() for line in lines][-2:] == ["waiting for dp", "step"]
    done = warm.run("cost", "model.py", "spec.yaml", "--device", "h200", "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert sum(found["ranks"][0]["lines"].values()) == pytest.approx(found["step_seconds"])


def test_without_a_run(folder: Path) -> None:
    done = warm.run("cost", "model.py", "spec.yaml", "--compare", "log", cwd=folder)
    assert done.returncode == 2
    assert "there is no steps.jsonl in log" in done.stderr
    done = warm.run("run", "model.py", "spec.yaml", "--breakdown", "3", cwd=folder)
    assert done.returncode == 2
    assert "breakdown needs a folder to write to" in done.stderr
