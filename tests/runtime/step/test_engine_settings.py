"""Options that change in the middle of a training, norms for a log, and the two halves of a step on all ranks."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import LoopbackMesh
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.module import ShardedModule
from tests.runtime.step.small import on_engines, on_modules


class Net(nn.Module):
    """7 hidden units: tp pads them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 7), nn.PReLU(), nn.Linear(7, 8)
        self.still = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.act(self.up(x))) - x + self.still.sum()).square().mean()


torch.manual_seed(0)
NET = Net().double()
BATCH = {"x": torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8).sin()}
SPLIT = {"use": "structure"}
SPECS: dict[str, dict[str, Any]] = {
    "tp, padded": {"mesh": {"dp": 2, "tp": 2}, "shard": SPLIT, "uneven": "pad"},
    "zero 1": {"mesh": {"dp": 4}, "data": {"axis": "dp", "zero": 1}},
    "zero 3": {"mesh": {"dp": 2, "tp": 2}, "shard": SPLIT, "uneven": "pad", "data": {"axis": "dp", "zero": 3}},
    "stages": {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2}},
}


@functools.cache
def compiled(name: str) -> shardc.Program:
    return shardc.compile(NET, BATCH, {"shardc": 1, **SPECS[name]})


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def plain(clip: list[float | None]) -> tuple[nn.Module, list[float]]:
    """One device: the model after a step for each clip, and the norms before it."""
    model = Net().double()
    model.load_state_dict(NET.state_dict())
    optimizer, norms = sgd(p for p in model.parameters() if p.requires_grad), []
    for most in clip:
        optimizer.zero_grad()
        model(**BATCH).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf if most is None else most)))
        optimizer.step()
    return model, norms


@pytest.mark.parametrize("spec", SPECS)
def test_norms_and_clipping_set_in_the_middle(spec: str) -> None:
    model, want = plain([None, 0.01, None])
    weights = {n: float(p.detach().norm()) for n, p in model.named_parameters()}
    grads = {n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None}

    @on_engines(compiled(spec), NET, sgd)
    def _(engine: Engine, mesh: LoopbackMesh) -> None:
        engine.step(BATCH)
        assert engine.grad_norm is None
        engine.set(clip_norm=0.01)
        engine.step(BATCH)
        assert engine.clip_norm == 0.01
        assert float(engine.grad_norm) == pytest.approx(want[1], rel=1e-12)  # type: ignore[arg-type]
        engine.set(clip_norm=None, norm=True)
        engine.step(BATCH)
        assert float(engine.grad_norm) == pytest.approx(want[2], rel=1e-12)  # type: ignore[arg-type]
        assert engine.norms() == pytest.approx(weights, rel=1e-12)
        assert engine.norms(grad=True) == pytest.approx(grads, rel=1e-12)


@pytest.mark.parametrize("spec", ["tp, padded", "zero 3"])
def test_norms_of_a_module(spec: str) -> None:
    model = Net().double()
    model.load_state_dict(NET.state_dict())
    model(**BATCH).backward()
    weights = {n: float(p.detach().norm()) for n, p in model.named_parameters()}
    grads = {n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None}

    @on_modules(compiled(spec), NET)
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        assert set(module.norms(grad=True).values()) == {0.0}
        module(**module.local(BATCH)).backward()
        assert module.norms() == pytest.approx(weights, rel=1e-12)
        assert module.norms(grad=True) == pytest.approx(grads, rel=1e-12)


def test_options_that_are_set_on_some_ranks_or_mean_nothing_are_refused() -> None:
    @on_engines(compiled("zero 1"), NET, sgd)
    def _(engine: Engine, mesh: LoopbackMesh) -> None:
        said = r"engine.set: clip_norm differs on rank 3 \(dp=3\): 0.5 on rank 0, 0.1 on rank 3\n  fix: set the same"
        with pytest.raises(ShardcError, match=said):
            engine.set(clip_norm=0.1 if mesh.rank == 3 else 0.5)
        for options, text in (
            ({"clip_norm": 0}, "clip_norm: must be a positive number or None, not 0"),
            ({"norm": 2}, "norm: must be True or False, not 2"),
            ({"clip": 1.0}, r"engine.set\(clip=...\): there is no such option\n  fix: did you mean 'clip_norm'"),
            ({"lr": 0.1}, r"engine.set\(lr=...\): (.|\n)*engine.optimizer.param_groups"),
            (
                {"seed": 1},
                r"engine.set\(seed=...\): an engine cannot change this(.|\n)*program.engine\(model, seed=...\)",
            ),
        ):
            with pytest.raises(ShardcError, match=text):
                engine.set(**options)
        assert engine.clip_norm is None
        engine.backward(BATCH)
        with pytest.raises(ShardcError, match=r"gradients of engine.backward need an update"):
            engine.set(clip_norm=1.0)


def test_what_is_set_goes_to_an_engine_of_another_plan() -> None:
    one, other = compiled("zero 1"), compiled("zero 3")  # not in the ranks, which are threads

    @on_engines(one, NET, sgd)
    def _(engine: Engine, mesh: LoopbackMesh) -> None:
        engine.set(clip_norm=0.5, nonfinite="skip")
        assert engine.to(other).clip_norm == 0.5


@pytest.mark.parametrize("spec", ["zero 1", "stages"])
def test_an_update_of_one_rank_alone_is_an_error_on_all(spec: str) -> None:
    @on_engines(compiled(spec), NET, sgd)
    def _(engine: Engine, mesh: LoopbackMesh) -> None:
        engine.backward(BATCH)
        with pytest.raises(ShardcError, match=r"call of this rank differs .*: an update on rank 0, a step on rank 1"):
            engine.update() if mesh.rank == 0 else engine.step(BATCH)


def test_an_update_without_a_backward_is_refused() -> None:
    """Gradients of the last step still stand there: they would be taken a second time."""

    @on_engines(compiled("zero 1"), NET, sgd)
    def _(engine: Engine, mesh: LoopbackMesh) -> None:
        for act in (engine.step, engine.backward):
            act(BATCH)
            if act == engine.backward:
                engine.update()
            with pytest.raises(
                ShardcError, match=r"engine.update: no backward was called since(.|\n)*fix: engine.backward"
            ):
                engine.update()
