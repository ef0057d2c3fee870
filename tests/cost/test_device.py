"""`shardc device`: what there is, one of them, and this machine measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import shardc
from shardc.api import Program
from shardc.cli import app
from shardc.cost import device
from shardc.cost.measured import measure
from shardc.cost.measured.device_file import names
from shardc.errors import ShardcError

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*words: str) -> Any:
    return RUNNER.invoke(app, ["device", *words])


def test_the_list_has_units_and_sources() -> None:
    lines = run().stdout.splitlines()
    assert lines[0].split()[:2] == ["device", "memory"]
    assert all("datasheet" in line or "whitepaper" in line for line in lines[1:-1])
    assert lines[-1] == "cpu and cuda: not measured on this machine yet (shardc device --measure)"
    assert set(names()) == {d["name"] for d in json.loads(run("--json").stdout)}
    assert {"a100-40g", "b200", "gb200-nvl72", "h100-80g", "h100-pcie", "l40s", "mi300x", "rtx-4090"} <= set(names())


@pytest.mark.parametrize("name", names())
def test_a_device_prints_as_a_file_that_is_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "same.yaml").write_text(device(name).to_yaml())
    assert device(tmp_path / "same.yaml") == device(name)


@pytest.mark.parametrize(
    ("pods", "what"),
    [
        ("pod: 64", "pod and beyond belong together"),
        ("pod: 12\nbeyond: {bandwidth: 1.0e+9, latency: 1.0e-5}", "a pod has several whole nodes of 8 devices, not 12"),
    ],
)
def test_pods_are_checked(pods: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(device("h200").to_yaml() + pods)
    with pytest.raises(ShardcError, match=what):
        device(tmp_path / "mine.yaml")


def test_one_of_them() -> None:
    text = run("h100-80g").stdout
    assert 'source: "NVIDIA H100 SXM5 80 GB' in text
    assert "# bytes of memory per second" in text
    assert json.loads(run("h100-80g", "--json").stdout)["within"]["bandwidth"] == 450e9


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a hurry: the numbers are rough, and nobody looks at them."""
    for name, value in {"CALLS": 3, "ROUNDS": 2, "OP_ROUNDS": 1, "BESIDE": 2**14}.items():
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(measure, "MESSAGES", (2**8, 2**12, 2**16, 2**20))
    monkeypatch.setattr(measure, "SIZES", {"cpu": ((16, 32), (128, 128))})
    file = tmp_path / "here" / "cpu.yaml"
    result = run("cpu", "--measure", "-o", str(file), "--json")
    assert result.exit_code == 0, result.output
    measured = device(file)
    assert measured.kind == "cpu"
    assert measured.flops.keys() == {"float32", "bfloat16"}
    assert measured.ops
    assert measured.within.bandwidth > 1e6
    assert 0 < measured.within.latency < 1
    assert 0.05 <= measured.reaches.computing <= 1
    assert 0 <= measured.host < 0.1
    assert 1e8 < measured.memory < 1e13
    assert "gloo" in measured.source
    assert f'"name": "{measured.name}"' in result.stdout


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (("-o", "x.yaml"), "-o names the file that --measure writes", "add --measure"),
        (("h200", "--measure"), "only this machine can be measured, not 'h200'", "shardc device cpu --measure"),
        (("cpu",), "this machine's cpu has not been measured", "shardc device cpu --measure"),
        (("h900",), "there is no device 'h900'", "h100-80g, h100-pcie, h200, l40s"),
    ],
)
def test_what_cannot_be(words: tuple[str, ...], what: str, fix: str) -> None:
    found = run(*words)
    assert found.exit_code == 2
    assert what in found.stderr
    assert fix in found.stderr


def test_no_gpu_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds no GPU here" in run("cuda", "--measure").stderr


def mlp() -> tuple[torch.nn.Module, torch.Tensor]:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)), torch.ones(16, 8)


def compiled(**sections: Any) -> Program:
    model, batch = mlp()
    spec = {"shardc": 1, "mesh": {"dp": 2}, **sections}
    return shardc.compile(model, batch, spec, loss=lambda out, _: out.square().mean())


def test_a_spec_names_its_device() -> None:
    program = compiled(device={"name": "a100-40g", "nodes": 2})
    assert program.spec is not None
    assert program.spec.to_dict()["device"] == {"name": "a100-40g", "nodes": 2}
    assert (program.cost().device.name, program.cost().device.nodes) == ("a100-40g", 2)
    assert program.cost("h200").device.name == "h200"
    assert compiled(device="h200").cost().device.name == "h200"
    assert compiled().cost().device.name == "h100-80g"
    assert compiled().text() == compiled(device="h200").text()  # a program is the same on all


def test_a_file_beside_the_spec(tmp_path: Path) -> None:
    """Of one's own cluster, which says how large it is."""
    (tmp_path / "ours.yaml").write_text(device("h200").to_yaml().replace('name: "h200"', "name: ours") + "nodes: 3\n")
    (tmp_path / "spec.yaml").write_text("shardc: 1\nmesh: {dp: 2}\ndevice: ours.yaml\n")
    model, batch = mlp()
    cost = shardc.compile(model, batch, tmp_path / "spec.yaml", loss=lambda out, _: out.mean()).cost()
    assert (cost.device.name, cost.device.nodes) == ("ours", 3)
    planned = shardc.plan(model, batch, device=tmp_path / "ours.yaml", loss=lambda out, _: out.mean(), global_batch=24)
    assert planned.target.devices == 24
    with pytest.raises(ShardcError, match="32 ranks have no room on 3 nodes of 8 devices, which are 24"):
        shardc.plan(model, batch, device=tmp_path / "ours.yaml", devices=32)


@pytest.mark.parametrize(
    ("section", "what", "fix"),
    [
        ("h100", "there is no device 'h100'", "did you mean 'h100-80g'"),
        ({"name": "h200", "node": 2}, "unknown key 'node'", "did you mean 'nodes'"),
        ({"nodes": 2}, "`name`", "h100-80g"),
        ({"name": "h200", "nodes": 0}, "nodes", "1"),
        ({"name": "rtx-4090", "nodes": 1}, "8 ranks have no room on 1 node of 4 devices, which are 4", "nodes: 2"),
    ],
)
def test_a_spec_whose_device_cannot_be(section: Any, what: str, fix: str) -> None:
    with pytest.raises(ShardcError) as found:
        compiled(device=section, mesh={"dp": 8})
    assert what in str(found.value)
    assert fix in str(found.value)
    assert "spec" in found.value.where


def test_a_key_of_a_device_file_has_a_nearest(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(device("h200").to_yaml().replace("latency:", "latancy:", 1) + "prodcts: {}\n")
    with pytest.raises(ShardcError) as found:
        device(tmp_path / "ours.yaml")
    assert "did you mean 'products'" in str(found.value)
    assert "did you mean 'latency'" in str(found.value)
