"""README's Python snippet runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardc
from tests import zoo

README = Path(__file__).parents[1] / "README.md"


def test_the_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All in one process: what each process of torchrun does is run on one rank."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text("shardc: 1\nmesh: {tp: 1}\nshard: {use: structure}\n")
    found = re.search(r"In Python:\n\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    whole, each = found[1].split("engine = ", 1)
    model, batch = zoo.mlp()
    names: dict[str, Any] = {"model": model, "batch": batch}
    exec(compile(whole, "README.md", "exec"), names)
    assert names["program"].mesh.axes == (("tp", 4),)
    assert names["sim"].loss.isfinite()
    assert "ops.all_reduce" in capsys.readouterr().out
    names["program"] = shardc.compile(model, batch, "spec.yaml")
    exec(compile("engine = " + each.replace("devices=64", "devices=2"), "README.md", "exec"), names)
    assert float(names["loss"]) == pytest.approx(float(names["sim"].loss), rel=1e-6)
    assert names["found"].best is not None


def test_its_loss_is_one_of_a_model_that_returns_none() -> None:
    found = re.search(r"compile\(\.\.\., loss=(lambda .*\))\)\n", README.read_text())
    assert found is not None
    loss = eval(found[1], {"F": F})
    model = torch.nn.Linear(8, 4)
    batch = {"input": torch.randn(2, 8), "labels": torch.zeros(2, dtype=torch.long)}

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = model

        def forward(self, input: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.fc(input)  # type: ignore[no-any-return]

    program = shardc.compile(Net(), batch, {"shardc": 1, "mesh": {"dp": 2}}, loss=loss)
    sim = shardc.simulate(program, Net(), batch)
    assert float(sim.loss.detach()) == pytest.approx(float(loss(model(batch["input"]), batch).detach()), rel=1e-6)
