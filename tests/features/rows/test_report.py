"""What balancing gains, predicted from a distribution of lengths: `--lengths` of cost and plan."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardc.cli import app
from shardc.errors import ShardcError
from shardc.features.rows import lengths
from tests.features.rows.test_arrangement import talks

MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.qkv = nn.Embedding(256, 64), nn.Linear(64, 192)
        self.up, self.down, self.head = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 256)

    def forward(self, ids, labels):
        h = self.table(ids)
        q, k, v = (x.unflatten(-1, (4, 16)).transpose(1, 2) for x in self.qkv(h).chunk(3, -1))
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = h + self.down(self.up(h).relu())
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())

def model():
    return LM()

def batch():
    ids = torch.zeros(32, 1024, dtype=torch.long)
    return {"ids": ids, "labels": ids}

class Rows(torch.utils.data.Dataset):
    lengths = [8 + (i * i) % 700 for i in range(100)]

    def __len__(self):
        return 100

    def __getitem__(self, i):
        raise AssertionError("nothing needs to be read")

def data(split):
    return Rows()
"""
SPEC = """
shardc: 1
mesh: {dp: 2}
batch: {microbatches: 16, lengths: [64, 128, 256, 512, 1024], pad: {ids: 0, labels: -100}}
"""


COST = ("cost", "model.py", "spec.yaml", "--device", "slow.yaml", "--lengths")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("spec.yaml").write_text(SPEC)
    # so slow that a microbatch's seconds are those of its numbers, and not of starting ops
    slow = (resources.files("shardc.machine") / "devices" / "h100-80g.yaml").read_text()
    slow = re.sub(r"^(launch|host): \S+", r"\1: 1.0e-12", slow, flags=re.MULTILINE)
    Path("slow.yaml").write_text(re.sub(r"^bandwidth: \S+", "bandwidth: 1.0e+9", slow, flags=re.MULTILINE))
    Path("lengths.txt").write_text("\n".join(map(str, talks(2000, 0, 1024))))
    return tmp_path


def shown(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result.output


def test_cost_of_a_file(folder: Path) -> None:
    text = shown(*COST, "lengths.txt")
    assert "2,000 rows of up to 1,024 tokens" in text
    assert "a step: 32 rows on 2 groups of ranks with lengths of their own, 16 microbatches of 1 row" in text
    found: dict[str, Any] = json.loads(shown(*COST, "lengths.txt", "--json"))
    ways = found["ways"]
    assert list(ways) == ["one length for all", "as they come", "balanced", "packed, balanced"]
    assert ways["balanced"]["slowest"] <= 1.05 <= ways["as they come"]["slowest"]
    assert (
        ways["balanced"]["step_seconds"]
        < ways["as they come"]["step_seconds"]
        < ways["one length for all"]["step_seconds"]
    )
    assert (
        ways["packed, balanced"]["padding"]
        <= 0.02
        < ways["balanced"]["padding"]
        < ways["one length for all"]["padding"]
    )
    assert 0 < found["hidden"] < 1


def test_a_histogram_is_the_same_as_its_rows(folder: Path) -> None:
    counts = lengths.read("lengths.txt")
    Path("counts.txt").write_text("\n".join(f"{n} {k}" for n, k in counts.items()))
    Path("counts.json").write_text(json.dumps(counts))
    Path("rows.json").write_text(json.dumps([[300, 17], [8], 8]))
    assert lengths.read("counts.txt") == lengths.read("counts.json") == counts
    assert lengths.read("rows.json") == {300: 1, 17: 1, 8: 2}


def test_the_dataset_of_the_model_file(folder: Path) -> None:
    assert "100 rows of up to 689 tokens (half up to 289, mean 302)" in shown(*COST, "data")


def test_a_spec_without_lengths_gets_powers_of_two(folder: Path) -> None:
    Path("spec.yaml").write_text("shardc: 1\nmesh: {dp: 2}\nbatch: {microbatches: 16}\n")
    assert "balancing: " in shown(*COST, "lengths.txt")


def test_plan_says_it_of_the_best_spec(folder: Path) -> None:
    text = shown("plan", "model.py", "--devices", "2", "--device", "h100-80g", "--lengths", "lengths.txt")
    assert "balancing: " in text
    out = shown("plan", "model.py", "--devices", "2", "--device", "h100-80g", "--lengths", "lengths.txt", "--json")
    assert json.loads(out)["lengths"]["rows"] == 2000


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.txt", "12\nmany\n", r"a.txt:2: a length and its number are whole numbers above 0, and this is many 1"),
        ("a.txt", "12 3 4", "this is 12 3 4"),
        ("a.txt", "\n# none\n", "the file has no lengths"),
        ("a.json", "{", "cannot be read: Expecting property name"),
        ("a.json", '{"12": -1}', "a.json:12: .* this is 12 -1"),
        ("a.json", "[2.5]", "this is 2.5 1"),
    ],
)
def test_what_is_no_file_of_lengths(name: str, text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ShardcError, match=fault):
        lengths.read(tmp_path / name)
    with pytest.raises(ShardcError, match="cannot be read"):
        lengths.read(tmp_path / "none.txt")
