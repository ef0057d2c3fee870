"""`shardc score` on real processes: forward-only programs over gloo, all samples of a split once, in their order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from tests import warm

MODEL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 6)

    def forward(self, x):
        return self.head(self.body(x).tanh())

def model():
    return Net()

def numbers(rows):
    label = torch.arange(rows) % 6
    label[2] = -100
    return torch.linspace(-1, 1, rows * 8).sin().view(rows, 8), label

def batch():
    return dict(zip(("x", "label"), numbers(4)))

def loss(output, batch):
    return nn.functional.cross_entropy(output, batch["label"])

def data(split):
    return TensorDataset(*numbers(11)) if split == "valid" else None

def collate(samples):
    return {"x": torch.stack([x for x, _ in samples]), "label": torch.stack([y for _, y in samples])}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "spec.yaml").write_text("shardc: 1\nmesh: {dp: 1, tp: 2}\nshard: {use: structure, head: column}\n")
    return tmp_path


def score(folder: Path, *args: str) -> Any:
    done = warm.run("score", "model.py", "spec.yaml", *args, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("mesh", ["dp=1,tp=2", "dp=2,tp=1"])
def test_all_rows_are_scored_once(mesh: str, folder: Path) -> None:
    """11 rows in batches of 4: the last one is smaller, and of an odd number."""
    own: dict[str, Any] = {}
    exec(MODEL, own)
    torch.manual_seed(1)
    net: nn.Module = own["model"]()
    save_file(net.state_dict(), folder / "w.safetensors")
    x, label = own["numbers"](11)
    with torch.no_grad():
        want = -F.cross_entropy(net(x), label, reduction="none")
    found = json.loads(score(folder, "--weights", "w.safetensors", "--rows", "rows", "--mesh", mesh, "--json"))
    mean = float(want[label != -100].double().mean())
    assert found["tokens"] == 10
    assert found["logprob"] == pytest.approx(mean, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-6)
    lines = [json.loads(line) for line in (folder / "rows").read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(11))
    torch.testing.assert_close(torch.tensor([line["scores"] for line in lines]).flatten(), want)
    assert lines[2]["logprob"] == 0


def test_what_is_said_and_refused(folder: Path) -> None:
    said = score(folder)
    assert "data: 11 samples\n10 targets: log-probability -" in said
    done = warm.run("score", "model.py", "spec.yaml", "--split", "train", cwd=folder)
    assert done.returncode == 2
    assert "data('train') returns None" in done.stderr
