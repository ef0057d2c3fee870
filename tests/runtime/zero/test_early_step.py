"""Optimizers that step a bucket while others are still being summed: the same weights, and never where it would not be
the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from shardc.runtime.zero.bucket import Bucket
from shardc.runtime.zero.optimizer_check import OverlappedStep
from tests.runtime.offload.test_offload import Normalised

SIZES = (6, 10, 14, 9)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(SIZES))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@functools.cache
def model() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(step: int) -> Tensor:
    return torch.randn(8, SIZES[0], dtype=torch.float64, generator=torch.Generator().manual_seed(step))


@functools.cache
def program(zero: int) -> Program:
    """A bucket for each of the six parameters."""
    return shardc.compile(
        model(), batch(0), {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": zero, "bucket_mb": 1e-4}}
    )


class Counted(torch.optim.SGD):
    """Its steps get smaller with their number, which it keeps in the group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / group["count"])


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def run(
    zero: int, make: Any, step: Callable[[Engine, Tensor], Tensor] = Engine.step, **options: Any
) -> tuple[dict[str, Tensor], list[str]]:
    """(weights after three steps, what rank 0 did in the last one: "sum" when a bucket's came, "step" when an optimizer
    stepped).
    """

    def work(mesh: LoopbackMesh) -> tuple[dict[str, Tensor], list[str]]:
        done: list[str] = []

        def made(params: Any) -> torch.optim.Optimizer:
            optimizer = make(params)
            kind = type(optimizer)
            optimizer.__class__ = type(
                "Told", (kind,), {"step": lambda self, *a: done.append("step") or kind.step(self, *a)}
            )
            return optimizer  # type: ignore[no-any-return]

        engine = program(zero).engine(model(), optimizer=made, mesh=mesh, **options)
        for bucket in engine.buckets._all:
            _told(bucket, done)
        for i in range(3):
            done.clear()
            step(engine, batch(i))
        return engine.full_state_dict(), list(done)

    return loopback(program(zero).mesh, work)[0]


def _told(bucket: Bucket, done: list[str]) -> None:
    inner = bucket.finish
    bucket.finish = lambda: done.append("sum") or inner()  # type: ignore


def together(engine: Engine, x: Tensor) -> Tensor:
    loss = engine.backward(x)
    engine.update()
    return loss


@pytest.mark.parametrize(
    "make", [adamw, lambda ps: torch.optim.SGD(ps, lr=0.5, momentum=0.9), Counted], ids=["adamw", "sgd", "counted"]
)
@pytest.mark.parametrize("zero", range(4))
def test_buckets_step_as_their_sums_come_and_weights_are_the_same_bit_for_bit(zero: int, make: Any) -> None:
    weights, done = run(zero, make, scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    assert done == (["sum", "step"] * 6 if zero == 0 else ["sum"] * 6 + ["step"])
    whole, did = run(zero, make, together, scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    assert did == ["sum"] * 6 + ["step"]
    for name, x in whole.items():
        assert torch.equal(weights[name], x), name


@pytest.mark.parametrize("options", [{"clip_norm": 0.01}], ids=["clipping"])
def test_what_needs_all_gradients_first_steps_once(options: dict[str, Any]) -> None:
    assert run(0, adamw, **options)[1] == ["sum"] * 6 + ["step"]


def test_an_optimizer_that_looks_at_all_parameters_steps_once() -> None:
    weights, done = run(0, lambda ps: Normalised(ps, lr=1.0))
    assert done == ["sum"] * 6 + ["step"]
    alone = {n: x.clone() for n, x in model().state_dict().items()}
    for i in range(3):
        loss = torch.func.functional_call(
            model(), given := {n: x.requires_grad_() for n, x in alone.items()}, (batch(i),)
        )
        grads = torch.autograd.grad(loss, list(given.values()))
        total = nn.utils.get_total_norm(grads)
        alone = {n: (x - g / total).detach() for (n, x), g in zip(given.items(), grads, strict=True)}
    for name, x in alone.items():
        torch.testing.assert_close(weights[name], x, rtol=1e-12, atol=1e-14)


def test_hooks_run_once_a_step() -> None:
    w = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.SGD(w, lr=1.0)
    stepper = OverlappedStep(optimizer, {"a": w[0], "b": w[1]})
    assert stepper.begin_if_possible()
    hook = optimizer.register_step_post_hook(lambda *_: None)
    assert not stepper.begin_if_possible()
    hook.remove()
    assert stepper.begin_if_possible()


def test_groups_hold_all_parameters_again_after_a_step_that_fails() -> None:
    class Failing(torch.optim.SGD):
        failing = False

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if self.failing:
                raise ValueError("the culprit")

    w = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = Failing(w, lr=1.0)
    stepper = OverlappedStep(optimizer, {"a": w[0], "b": w[1]})
    optimizer.failing = stepper.begin_if_possible()
    with pytest.raises(ValueError, match="the culprit"):
        stepper.step(["a"])
    assert [p is q for p, q in zip(optimizer.param_groups[0]["params"], w, strict=True)] == [True, True]


def test_an_error_between_two_buckets_asks_for_a_checkpoint() -> None:
    def work(mesh: LoopbackMesh) -> str:
        engine = program(0).engine(model(), optimizer=adamw, mesh=mesh)
        last = engine.buckets._all[-1]
        inner = last.finish

        def fail() -> None:
            inner()
            raise ValueError("a link went down")

        last.finish = fail  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="a link went down"):
            engine.step(batch(0))
        with pytest.raises(shardc.ShardcError) as e:
            engine.step(batch(1))
        return str(e.value)

    assert all("load a checkpoint" in text for text in loopback(program(0).mesh, work))
