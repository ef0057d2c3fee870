"""`shardc inspect model.py --coverage` and `shardc.coverage`: what of a model has no rule, without any spec."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import shardc
from shardc.cli import app
from tests import zoo

MODEL = """
import torch
from torch import nn


@torch.library.custom_op("coverage::odd", mutates_args=())
def odd(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy(force=True)[::-1].copy())


odd.register_fake(lambda x: torch.empty_like(x))
odd.register_autograd(lambda ctx, g: g.flip(0))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return torch.ops.coverage.odd(self.fc(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        y = nn.functional.pixel_shuffle(self.blocks(x).view(4, 4, 1, 2), 2)
        return (y * torch.poisson(y.detach().abs())).sum() + torch.linalg.eigvalsh(x.T @ x).sum()


def model():
    return Net()


def batch():
    return {"x": torch.ones(4, 8)}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model.py"


def test_every_kind_is_listed_with_lines(file: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", "model.py", "--coverage"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Net: 16 calls of 13 ops; 2 without a rule\n")
    text = done.stdout
    assert (
        "refused: cannot be compiled\n     1×  aten.poisson.default: aten.poisson.default draws random numbers" in text
    )
    assert "no rule: refused by compile, unless the spec says `unknown_ops: replicate`" in text
    assert (
        "     2×  coverage.odd.default\n         model.py:21 (2×, first in blocks.0): return"
        " torch.ops.coverage.odd(self.fc(x))" in text
    )
    assert "decomposed: " in text
    assert "     1×  aten.pixel_shuffle.default\n         model.py:30: y = nn.functional.pixel_shuffle(" in text
    assert text.index("refused") < text.index("no rule:") < text.index("decomposed:")


def test_json(file: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", "model.py", "--coverage", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert not found["covered"]
    rows = {r["op"]: r for r in found["rows"]}
    assert {op: r["how"] for op, r in rows.items()} == {
        "aten.poisson.default": "refused",
        "coverage.odd.default": "no rule",
        "aten.pixel_shuffle.default": "decomposed",
        "aten.linalg_eigvalsh.default": "whole",
    }
    assert rows["coverage.odd.default"]["lines"] == [
        {"line": "model.py:21", "code": "return torch.ops.coverage.odd(self.fc(x))", "module": "blocks.0", "count": 2}
    ]


def test_a_folder_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(tmp_path), "--coverage"])
    assert done.exit_code == 2
    assert "every op of a compiled DIR has a rule" in done.stderr


@pytest.mark.parametrize("name", ["gpt", "bert", "resnet_bn"])
def test_models_that_are_covered(name: str) -> None:
    found = shardc.coverage(*zoo.ALL[name]())
    assert found.covered
    assert not found.rows
    assert str(found).endswith("every op has a rule")


def test_what_has_nothing_to_split() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.fc(x)).sum() + torch.linalg.det(self.fc.weight) + torch.arange(6).sum()

    found = shardc.coverage(Net(), torch.ones(6, 6))
    assert found.covered
    assert {r.op: r.how for r in found.rows} == {"aten.linalg_det.default": "whole"}
