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
from shardc.artifact.repeated_layers import fold
from shardc.cli import app
from tests import zoo

SPECS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}},
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
    (more,) = re.findall(r"    # (\d) more layers like this one: h\.(\d) to h\.(\d)", texts[8])
    assert int(more[0]) == int(more[2]) - int(more[1]) + 1 >= 6
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
    assert "# 1 more layer like this one: layers.1\n" in text
    assert "aten.tanh" in text
    assert "# 2 more layers like this one: layers.4 to layers.5\n" in text


class Pattern(nn.Module):
    """Local, local, global; and each layer has a list of its own."""

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
    assert "# 3 more layers like these 3 layers: h.3 to h.5\n" in text


def test_another_value_from_outside_is_another_layer() -> None:
    """Every layer adds another row of one parameter: nothing is equal."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(4, 8))
            self.h = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer, row in zip(self.h, self.rows.unbind(0), strict=True):
                x = layer(x + row)
            return x.pow(2).mean()

    program = compiled(Rows().double(), {"x": torch.ones(4, 8).double()}, {"mesh": {"dp": 2}})
    assert not any("layer" in note for note in fold(program).nodes["stage0"].values())


def test_equal_stages() -> None:
    spec = {"mesh": {"pp": 6}, "pipeline": {"axis": "pp", "stages": 6}, "batch": {"microbatches": 2}}
    text = str(compiled(*zoo.gpt(layers=12), spec))
    assert "\n# stage2 to stage4: as stage1, on their own layers\n" in text
    assert "def stage3" not in text
    assert "def stage5" in text


def test_the_commands_fold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`inspect` of a compiled folder: text, page and a stage alone are folded, unless --full."""
    monkeypatch.chdir(tmp_path)
    compiled(*zoo.gpt(layers=6), SPECS["tp"]).save("out")

    def shown(*words: str) -> str:
        return CliRunner().invoke(app, ["inspect", "out", *words]).stdout

    for words in ((), ("--stage", "0"), ("--before",)):
        assert "more layers like this one" in shown(*words)
        assert "more layers like this one" not in shown(*words, "--full")
    shown("--html", "page.html")
    assert "more layers like this one" in Path("page.html").read_text()
