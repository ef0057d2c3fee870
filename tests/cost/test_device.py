"""`shardc device`: what there is, one of them, and this machine measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shardc.cli import app
from shardc.cost import device, measure
from shardc.cost.device import names
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
    monkeypatch.setattr(measure, "SECONDS", 0.02)
    monkeypatch.setattr(measure, "LARGE", 2**22)
    monkeypatch.setattr(measure, "MESSAGES", (2**22, 10, 1))
    file = tmp_path / "here" / "cpu.yaml"
    made = run("cpu", "--measure", "-o", str(file), "--json")
    assert made.exit_code == 0, made.output
    found = device(file)
    assert found.kind == "cpu"
    assert set(found.flops) == {"float64", "float32", "float16", "bfloat16"}
    assert found.within.bandwidth > 1e6
    assert 0 < found.within.latency < 1
    assert 1e8 < found.memory < 1e13
    assert "gloo" in found.source
    assert f'"name": "{found.name}"' in made.stdout


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
