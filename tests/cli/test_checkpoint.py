"""`shardc checkpoint`, and `shardc run` on the checkpoints that it writes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardc.cli import app
from tests.cli.test_run import folder, run  # noqa: F401 (a fixture)
from tests.runtime.state.faults import save


def call(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["checkpoint", *map(str, args)])
    return done.exit_code, done.output


def said(*args: object) -> tuple[int, Any]:
    done = CliRunner().invoke(app, ["checkpoint", *map(str, args), "--json"])
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path / "checkpoint", step)
    return tmp_path


def test_checkpoints_are_listed_and_verified(saved: Path) -> None:
    status, text = call("ls", saved)
    assert status == 0
    assert text.splitlines()[0].startswith("step-000002  Net, tp=2, 36 tensors, ")
    status, found = said("ls", saved / "checkpoint")
    assert [x["name"] for x in found["checkpoints"]] == ["step-000002", "step-000001"]
    assert call("verify", saved) == (0, "step-000002  whole\nstep-000001  whole\n")
    file = saved / "checkpoint" / "step-000001" / "model-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    status, found = said("verify", saved)
    assert status == 1
    assert not found["ok"]
    (problem,) = found["checkpoints"]["step-000001"]
    assert problem["where"] == str(file)
    assert "differs from the saved data" in problem["what"]
    assert said("verify", saved / "checkpoint" / "step-000002")[0] == 0
    os.truncate(file, 100)
    assert "the file has 100 bytes, and had" in call("ls", saved)[1].splitlines()[1]
    assert call("ls", saved / "nowhere")[0] == 2


def test_two_are_compared_whatever_their_meshes(saved: Path) -> None:
    save(saved / "other", 2, {"dp": 2, "tp": 2})
    status, found = said("diff", saved, saved / "other")
    assert {d["what"] for d in found["differences"]} == {"mesh", "program"}
    status, text = call("diff", saved / "checkpoint" / "step-000001", saved)
    assert status == 1
    assert "step: 1 | 2" in text
    assert re.search(r"model.emb.weight: \d+ of its numbers differ, by 0\.2 at most", text)
    assert call("diff", saved, saved) == (0, "the checkpoints are the same\n")


def test_a_model_of_other_shapes_is_not_exported(saved: Path) -> None:
    model = "def model():\n    net = Net()\n    net.qkv.weight = torch.nn.Parameter(torch.zeros(99, 8))\n    return net"
    net = "import torch\nfrom tests.runtime.state.test_state import Net"
    text = f"{net}\n\n{model}\n\ndef batch():\n    return torch.ones(4)\n"
    (saved / "larger.py").write_text(text)
    done = CliRunner().invoke(app, ["export", str(saved / "larger.py"), str(saved), str(saved / "out")])
    assert done.exit_code == 2
    assert "qkv.weight has the shape" in done.output
    assert "name the model file of the training" in done.output
    assert not (saved / "out").exists()


def test_old_ones_are_removed(saved: Path) -> None:
    assert said("prune", saved, "--keep", 1)[1] == {"removed": [str(saved / "checkpoint" / "step-000001")]}
    assert call("prune", saved) == (0, "there was nothing to remove\n")


def test_torchs_format_is_written_and_read(saved: Path) -> None:
    assert call("export", saved, saved / "torch")[0] == 0
    assert "the folder is not empty" in call("export", saved, saved / "torch")[1]
    assert {d["what"] for d in said("diff", saved, saved / "torch")[1]["differences"]} == {"program"}


def test_a_run_goes_on_with_the_last_good_one_on_fewer_ranks(folder: Path) -> None:  # noqa: F811
    (folder / "spec.yaml").write_text("shardc: 1\nmesh: {dp: -1}\nbatch: {rows: 2}\n")
    straight = run(folder, "loader", "--steps", "6", "--nproc", "1", "--json")
    done = run(folder, "loader", "--steps", "4", "--save", "out", "--save-every", "2", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert "saved step 2" in done.stdout
    names = sorted(os.listdir(folder / "out" / "checkpoint"))
    assert names == [".lock", "step-000002", "step-000004"]
    (folder / "out" / "checkpoint" / "step-000004" / "model-00000.safetensors").unlink()
    again = ("--nproc", "1", "--resume", "out", "--save", "out", "--last-good", "--json")
    done = run(folder, "loader", "--steps", "6", *again)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["losses"] == pytest.approx(json.loads(straight.stdout)["losses"][2:], rel=1e-5)
