"""Equal layers are shown once, others are not; what is saved is whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import shardc
from shardc.cli import app
from tests import zoo

SPECS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}},
    "zero 1": {"mesh": {"dp": 2}, "data": {"zero": 1}},  # a bucket's parameters are in the order of backward
    "zero 3": {"mesh": {"dp": 2}, "data": {"zero": 3, "bucket_mb": 0.05}},
    "checkpoint": {"mesh": {"tp": 2}, "shard": {"use": "structure"}, "checkpoint": [{"match": "h.*"}]},
}


def compiled(model: nn.Module, batch: Any, spec: dict[str, Any]) -> shardc.Program:
    return shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equal_layers(spec: dict[str, Any], tmp_path: Path) -> None:
    """A model of 8 layers has a text as long as one of 5, which says how many it leaves out."""
    texts = {n: str(compiled(*zoo.gpt(layers=n), spec)) for n in (5, 8)}
    assert len(texts[5].splitlines()) == len(texts[8].splitlines())
    *_, more = re.findall(r"\n    # (\d) more layers like h.0: h\.{1-(\d)}", texts[8].partition("):\n")[2])
    assert int(more[0]) == int(more[1]) >= 6
    program = compiled(*zoo.gpt(layers=8), spec)
    assert "more layers" not in program.text(full=True)
    assert len(program.text(full=True).splitlines()) > 1.8 * len(texts[8].splitlines())
    program.save(tmp_path / "out")
    assert shardc.load(tmp_path / "out").text(full=True) == program.text(full=True)


class Odd(nn.Module):
    """Six layers, of which the third has another activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh() if i == 2 else nn.ReLU()) for i in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, torch.zeros_like(x))


def test_a_layer_that_differs_is_shown() -> None:
    text = str(compiled(Odd().double(), {"x": torch.ones(4, 8).double()}, {"mesh": {"dp": 2}}))
    assert "# 1 more layer like layers.0: layers.1\n" in text
    assert "aten.tanh" in text
    assert "# 3 more layers like layers.0: layers.{3-5}\n" in text


class Pattern(nn.Module):
    """Each layer has its own list, and what comes after it is not always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(4)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.h):
            for linear in layer:
                x = linear(x)
            x = x.relu() if i % 3 == 2 else x.tanh()
        return x.pow(2).mean()


def test_patterns_of_layers_and_lists_in_lists() -> None:
    text = str(compiled(Pattern().double(), {"x": torch.ones(4, 8).double()}, {"mesh": {"dp": 2}}))
    lines = text.partition("):\n")[2].splitlines()
    kinds = [line.partition("  #")[0] if "aten" not in line else line.partition("aten.")[2][:4] for line in lines]
    outside = [k for k in kinds if k in ("tanh", "relu")]
    assert outside == ["tanh", "tanh", "relu"] * 2  # of no layer: all are shown
    assert kinds.count("line") == 1
    assert [line for line in lines if "more layer" in line] == [
        "    # 3 more layers like h.0.0: h.0.{1-3}",
        *(f"    # 1 more layer like h.0: h.{i}" for i in range(1, 6)),
    ]


def test_what_is_between_layers_is_shown() -> None:
    """Between layers another row of one parameter is added."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(4, 8))
            self.h = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer, row in zip(self.h, self.rows.unbind(0), strict=True):
                x = layer(x + row)
            return x.pow(2).mean()

    text = str(compiled(Rows().double(), {"x": torch.ones(4, 8).double()}, {"mesh": {"dp": 2}}))
    assert text.count("aten.add.Tensor") == 4
    assert text.count("aten.linear") == 4  # one op is as long as the line in its place


class Masked(nn.Module):
    """Local, local, global: layers differ in the mask that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(9))

    def forward(self, x: Tensor, local: Tensor, all_: Tensor) -> Tensor:
        local, all_ = local.tanh(), all_.tanh()
        for i, layer in enumerate(self.h):
            x = layer(x, all_ if i % 3 == 2 else local)
        return x.pow(2).mean()


def test_layers_that_take_other_values_from_outside_differ() -> None:
    batch = {name: torch.ones(4, 8).double() for name in ("x", "local", "all_")}
    text = str(compiled(Masked().double(), batch, {"mesh": {"dp": 2}})).partition("):\n")[2]
    assert re.findall(r"# (.* more layers? .*)\n", text) == [
        "1 more layer like h.0: h.1",
        "4 more layers like h.0: h.{3-4,6-7}",
        "2 more layers like h.2: h.{5,8}",
    ]


def test_equal_stages() -> None:
    spec = {"mesh": {"pp": 6}, "pipeline": {"axis": "pp", "stages": 6}, "batch": {"microbatches": 2}}
    text = str(compiled(*zoo.gpt(layers=12), spec))
    assert "\n# stage{2-4}: as stage1, on their own layers\n" in text
    assert "def stage3" not in text
    assert "def stage5" in text


def test_the_commands_fold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`inspect` of a compiled folder: text, page and a stage alone are folded, unless --full."""
    monkeypatch.chdir(tmp_path)
    compiled(*zoo.gpt(layers=6), SPECS["tp"]).save("out")

    def shown(*words: str) -> str:
        return CliRunner().invoke(app, ["inspect", "out", *words]).stdout

    for words in ((), ("--stage", "0"), ("--before",)):
        assert "more layers like h.0" in shown(*words)
        assert "more layers like h.0" not in shown(*words, "--full")
    shown("--html", "page.html")
    assert "more layers like h.0" in Path("page.html").read_text()
