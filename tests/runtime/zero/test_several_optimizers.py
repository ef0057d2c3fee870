"""Lists of optimizers: each parameter is stepped by its own, as on one device, on every mesh."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import shardc
from shardc.api import Program
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.step.engine import Engine

CLIP, STEPS = 0.5, 4


class Net(nn.Module):
    """Two blocks, so that a pipeline has something to cut, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x) + x)
        return y.square().mean()


NET = Net()  # ranks are threads: each of them would seed for the others
X = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def split(params: Any) -> tuple[list[Any], list[Any]]:
    pairs = list(params)
    return [p for p in pairs if "weight" in p[0]], [p for p in pairs if "weight" not in p[0]]


def two(params: Any) -> list[torch.optim.Optimizer]:
    weights, biases = split(params)
    return [torch.optim.SGD(weights, lr=0.1, momentum=0.9), torch.optim.AdamW(biases, lr=1e-2)]


def muon(params: Any) -> list[torch.optim.Optimizer]:
    weights, biases = split(params)
    return [torch.optim.Muon(weights, lr=0.1), torch.optim.AdamW(biases, lr=1e-2)]


def schedulers(optimizers: Any) -> list[Any]:
    first, second = optimizers
    return [StepLR(first, 2, 0.5), ExponentialLR(second, 0.9)]


def compiled(spec: dict[str, Any]) -> Program:
    return shardc.compile(NET, X, {"shardc": 1, **spec})


def alone(make: Any, steps: int = STEPS) -> dict[str, Tensor]:
    model = copy.deepcopy(NET)
    optimizers = make(model.named_parameters())
    rates = schedulers(optimizers)
    for _ in range(steps):
        for o in optimizers:
            o.zero_grad()
        model(X).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for part in (*optimizers, *rates):
            part.step()
    return {n: x.detach() for n, x in model.state_dict().items()}


def engine_of(p: Program, mesh: Any, make: Any = two, **options: Any) -> Engine:
    return p.engine(NET, make, mesh=mesh, clip_norm=CLIP, scheduler=schedulers, **options)


def train(p: Program, make: Any = two) -> list[dict[str, Tensor]]:
    def work(mesh: Any) -> dict[str, Tensor]:
        engine = engine_of(p, mesh, make)
        for _ in range(STEPS):
            engine.step(X)
        return engine.full_state_dict()

    return loopback(p.mesh, work)


SPECS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}},
    "tp": {"mesh": {"tp": 2}, "shard": {"*.0": "column", "*.2": "row"}},
    "zero1": {"mesh": {"dp": 2}, "data": {"zero": 1}},
    "zero3 tp": {"mesh": {"dp": 2, "tp": 2}, "data": {"zero": 3}, "shard": {"*.0": "column", "*.2": "row"}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "cut": ["b"]}, "batch": {"microbatches": 2}},
    "offload": {"mesh": {"dp": 2}, "data": {"zero": 2, "offload": {"optimizer": "cpu"}}},
}


@pytest.mark.parametrize("name", SPECS)
def test_each_parameter_is_stepped_by_its_own(name: str) -> None:
    """With one norm to clip by, and a schedule for each."""
    expected = alone(two)
    for state in train(compiled(SPECS[name])):
        for n, x in expected.items():
            torch.testing.assert_close(state[n], x, rtol=1e-10, atol=1e-12)


def test_muon_and_adamw() -> None:
    expected = alone(muon)
    for state in train(compiled(SPECS["dp"]), muon):
        for n, x in expected.items():
            torch.testing.assert_close(state[n], x, rtol=1e-3, atol=1e-4)


def test_bucket_by_bucket() -> None:
    """Without a norm, parameters are stepped as soon as their gradients are summed."""
    p = compiled({"mesh": {"dp": 2}, "data": {"bucket_mb": 1e-4}})

    def work(mesh: Any, overlapped: bool) -> dict[str, Tensor]:
        engine = p.engine(NET, two, mesh=mesh)
        assert engine._optimizer_half._overlapped is not None
        if not overlapped:
            engine._optimizer_half._overlapped = None
        for _ in range(STEPS):
            engine.step(X)
        return engine.full_state_dict()

    first, second = (loopback(p.mesh, lambda mesh, o=o: work(mesh, o))[0] for o in (True, False))
    assert all(torch.equal(x, second[n]) for n, x in first.items())


@pytest.mark.parametrize("name", ["zero3 tp", "pp", "offload"])
def test_checkpoints_load_on_another_mesh(name: str, tmp_path: Path) -> None:
    p, q = compiled(SPECS[name]), compiled(SPECS["tp"])

    def first(mesh: Any) -> None:
        engine = engine_of(p, mesh)
        for _ in range(2):
            engine.step(X)
        engine.save(tmp_path / "c")

    def second(mesh: Any) -> dict[str, Tensor]:
        engine = engine_of(q, mesh)
        engine.load(tmp_path / "c")
        for _ in range(STEPS - 2):
            engine.step(X)
        return engine.full_state_dict()

    loopback(p.mesh, first)
    expected = alone(two)
    for state in loopback(q.mesh, second):
        for n, x in expected.items():
            torch.testing.assert_close(state[n], x, rtol=1e-10, atol=1e-12)
    other = compiled({"mesh": {"dp": 1}})
    with pytest.raises(
        ShardcError, match=r"is of the optimizer AdamW, not SGD for a\.0\.bias\n.*use AdamW for a\.0\.b"
    ):
        loopback(other.mesh, lambda mesh: engine_of(other, mesh, swapped).load(tmp_path / "c"))


def swapped(params: Any) -> list[torch.optim.Optimizer]:
    weights, biases = split(params)
    return [torch.optim.SGD(biases, lr=0.1, momentum=0.9), torch.optim.AdamW(weights, lr=1e-2)]


def test_a_parameter_in_two_or_in_none(capsys: pytest.CaptureFixture[str]) -> None:
    p = compiled({"mesh": {"dp": 1}})

    def both(params: Any) -> list[torch.optim.Optimizer]:
        weights, biases = split(params)
        return [torch.optim.SGD([*weights, biases[0]], lr=0.1), torch.optim.AdamW(biases)]

    def all_twice(params: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(params, lr=0.1), torch.optim.Adam(params)]

    def neither(params: Any) -> list[torch.optim.Optimizer]:
        weights, biases = split(params)
        return [torch.optim.SGD(weights[1:], lr=0.1), torch.optim.AdamW(biases)]

    with pytest.raises(
        ShardcError, match=r"optimizer: a\.0\.bias is in SGD and in AdamW, which would both update it\n"
    ):
        loopback(p.mesh, lambda mesh: p.engine(NET, both, mesh=mesh))
    with pytest.raises(
        ShardcError, match=r"a\.0\.weight is in SGD and in Adam, .*, and so are \d more parameters\n"
    ) as e:
        loopback(p.mesh, lambda mesh: p.engine(NET, all_twice, mesh=mesh))
    assert len(e.value.errors) == 1
    with pytest.raises(AttributeError, match=r"pairs, and a pair has no \.ndim: write `for name, p in params`"):
        loopback(p.mesh, lambda mesh: p.engine(NET, lambda ps: torch.optim.SGD([q for q in ps if q.ndim]), mesh=mesh))
    loopback(p.mesh, lambda mesh: p.engine(NET, neither, mesh=mesh))
    assert "the optimizer has none of a.0.weight: nothing updates them" in capsys.readouterr().err

    def twice(params: Any) -> torch.optim.Optimizer:
        with pytest.warns(UserWarning, match="duplicate"):
            return torch.optim.SGD([*(q for _, q in params), params[0][1]], lr=0.1)

    with pytest.raises(ShardcError, match=r"a parameter of shape \[.*\] is in SGD twice"):
        loopback(p.mesh, lambda mesh: p.engine(NET, twice, mesh=mesh))
    loopback(p.mesh, lambda mesh: p.engine(NET, with_a_stranger, mesh=mesh))
    told = "the optimizer has 1 parameter of shape [3] not passed to it: no step computes a gradient for that"
    assert told in capsys.readouterr().err


def with_a_stranger(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([*(q for _, q in params), torch.nn.Parameter(torch.ones(3))], lr=0.1)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda ps: [], "returns a list of nothing"),
        (lambda ps: [torch.optim.SGD(ps, lr=0.1), None], "returns a list of SGD, NoneType"),
        (lambda ps: 3, "returns a int"),
        (lambda ps: [torch.optim.SGD([p for n, p in ps if "none" in n], lr=0.1)], "got no parameter on this rank"),
    ],
)
def test_what_is_no_list_of_optimizers(make: Any, error: str) -> None:
    p = compiled({"mesh": {"dp": 1}})
    with pytest.raises(ShardcError, match=error):
        loopback(p.mesh, lambda mesh: p.engine(NET, make, mesh=mesh))


def test_muon_is_refused_for_its_own_weights_only() -> None:
    """Biases are split before them, and are AdamW's."""
    p = compiled({"mesh": {"tp": 2}, "shard": {"*.0": "column", "*.2": "row"}})
    with pytest.raises(
        ShardcError, match=r"(?s)a\.0\.weight: the optimizer Muon needs whole .*or leave a\.0\.weight whole"
    ):
        train(p, muon)
