"""`verify` and `simulate`: what they draw and compare, and what they say of numbers that are nan or inf on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from shardc.ir.program import Program
from shardc.rules.core import finite_padding
from shardc.verify.equality import difference, verify
from shardc.verify.random_batch import random_inputs, random_state
from tests import zoo


class Poles(nn.Module):
    def __init__(self, *, forward: bool) -> None:
        super().__init__()
        self.up, self.down, self.of_forward = nn.Linear(4, 4), nn.Linear(4, 4), forward

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.up(x)).sigmoid() * self.down.bias.abs() + self.down.weight.square().sum(1)
        y = h.log() * h if self.of_forward else h.sqrt()
        return y.square().sum()


def without_fills(monkeypatch: pytest.MonkeyPatch, *, forward: bool) -> tuple[shardc.Program, nn.Module, Any]:
    """A program that leaves zeros in padding where an op has a pole."""
    monkeypatch.setattr(finite_padding, "_table", lambda *_: None)
    torch.manual_seed(0)
    model, batch = Poles(forward=forward).double(), {"x": torch.rand(4, 4, dtype=torch.float64)}
    with zoo.Wide():
        spec = {"shardc": 1, "mesh": {"tp": 3}, "shard": {"down": "column"}, "uneven": "pad"}
        return shardc.compile(model, batch, spec), model, batch


@pytest.mark.parametrize(
    ("forward", "said"),
    [(True, "log of .* is the first result that is not finite"), (False, "backward of sqrt of .* makes the first")],
)
def test_the_op_that_makes_nan_on_ranks_is_named(monkeypatch: pytest.MonkeyPatch, forward: bool, said: str) -> None:
    program, model, batch = without_fills(monkeypatch, forward=forward)
    with pytest.raises(shardc.ShardcError, match=f"gradient of .*it is .*nan.*{said}") as e:
        shardc.simulate(program, model, batch)
    assert Path(__file__).name in str(e.value)
    assert e.value.fix
    report = verify(program)
    assert not report.ok
    (finding,) = report.findings
    assert "nan" in finding.what
    assert Path(__file__).name in finding.what


def backward_of(program: Program) -> fx.Graph:
    joint = program.stages[0].joint
    assert joint is not None
    return joint.backward


def _nan(x: Tensor, y: Tensor) -> Tensor:
    return x.mm(y) * float("nan")


def test_a_gradient_that_is_nan_on_all_ranks_alike_is_a_finding_with_its_op() -> None:
    model, batch = zoo.mlp()
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"tp": 2}, "shard": {"use": "structure"}})
    first = next(n for n in backward_of(program).nodes if n.target is torch.ops.aten.mm.default)
    first.target = _nan
    report = verify(program)
    assert not report.ok
    assert all("nan on the ranks, and finite on one device; backward of " in f.what for f in report.findings)
    assert all(".py:" in f.what for f in report.findings)
    assert report.worst != report.worst, "nan is the worst"


# --- dtypes


class Spectrum(nn.Module):
    """Weights and inputs of every dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 8, dtype=torch.complex64))
        self.table = nn.Parameter(torch.randn(300, 8))
        self.register_buffer("mixed", torch.randn(8, dtype=torch.complex64))

    def forward(self, z: Tensor, keep: Tensor, small: Tensor) -> Tensor:
        y = (z @ self.w) * self.mixed + self.table[small.long()] * keep
        return (y * y.conj()).real.mean() + y.real.mean()


def spectrum() -> tuple[shardc.Program, nn.Module, Any]:
    torch.manual_seed(0)
    z, keep = torch.randn(4, 6, dtype=torch.complex64), torch.rand(4, 8) > 0.5
    model, batch = Spectrum(), {"z": z, "keep": keep, "small": torch.arange(4, dtype=torch.uint8)[:, None].expand(4, 8)}
    batch["small"] = batch["small"][:, 0].contiguous()
    return shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}}), model, batch


def test_each_dtype_is_drawn_as_it_is() -> None:
    program, _, _ = spectrum()
    batch, state = random_inputs(program, 0), random_state(program, 0)
    for x in (batch["z"], state["w"], state["mixed"]):
        assert x.dtype == torch.complex64
        assert x.real.std() > 0.01
        assert x.imag.std() > 0.01
    assert batch["keep"].dtype == torch.bool
    assert set(batch["keep"].flatten().tolist()) == {False, True}
    assert batch["small"].dtype == torch.uint8


def test_imaginary_parts_count() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    assert difference(x, x.clone()) == 0
    assert difference(x, x.conj()) > 0.1
    assert difference(x, torch.complex(x.real, x.imag + 1)) > 0.1


def test_a_conjugate_that_is_missing_is_noticed() -> None:
    """Complex weights split in pairs: a sum over ranks whose gradient has the other sign of imaginary parts."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(6, 8, dtype=torch.complex64))
            self.down = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))

        def forward(self, z: Tensor) -> Tensor:
            y = (z @ self.up) @ self.down
            return (y * y.conj()).real.mean()

    torch.manual_seed(0)
    spec = {"shardc": 1, "mesh": {"tp": 2}, "shard": {"up": {1: "tp"}, "down": {0: "tp"}}}
    program = shardc.compile(Net(), {"z": torch.randn(4, 6, dtype=torch.complex64)}, spec)
    assert any("all_reduce" in str(n.target) for n in program.stages[0].graph.nodes)
    assert verify(program).ok
    conjugate = next(n for n in backward_of(program).nodes if n.target is torch.ops.aten._conj.default)
    conjugate.replace_all_uses_with(conjugate.args[0])
    assert not verify(program).ok
