"""ZeRO where it is hard: odd parameters and buckets, optimizers that need whole parameters, errors in the middle of a
step.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from tests.features.matrices.optimizers import Lamb

State = dict[str, Tensor]
LEVELS = pytest.mark.parametrize("zero", [0, 1, 2, 3])


class Mixed(nn.Module):
    """Parameters of several dtypes and sizes: also of none, of one, frozen, complex, tied, and some that no loss
    reaches.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(5, 7, dtype=torch.float64)
        self.single = nn.Linear(7, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.gain, self.idle = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.again = nn.Linear(7, 3)
        self.again.weight = self.single.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.wide(x)).float()
        h = self.frozen(torch.tanh(self.single(h))) + self.again(h) + self.nothing.sum()
        z = h * self.turn
        return (z.abs().square().sum(1) * self.gain).mean()


def compile_(model: nn.Module, x: Any, ranks: int, zero: int, **more: Any) -> Program:
    spec = {"shardc": 1, "mesh": {"dp": ranks}, "data": {"zero": zero, "bucket_mb": 1e-4}, **more}
    return shardc.compile(model, x, spec)


@LEVELS
@pytest.mark.parametrize("ranks", [2, 3])
def test_parameters_of_every_kind(zero: int, ranks: int) -> None:
    model, x = Mixed(), torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p = compile_(model, x, ranks, zero)

    def make(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(ps, lr=1e-2)

    def work(mesh: LoopbackMesh) -> tuple[State, set[str]]:
        engine = p.engine(model, make, mesh=mesh, clip_norm=0.1)
        for _ in range(3):
            engine.step(x)
        reached = {n for n, q in engine.params.items() if q.grad is not None}
        return engine.full_state_dict(), reached

    plain = copy.deepcopy(model)
    optimizer = make([q for q in plain.parameters() if q.requires_grad])
    for _ in range(3):
        optimizer.zero_grad()
        plain(x).backward()
        # the global norm of parts of several dtypes is taken in the widest
        grads = [q.grad for q in plain.parameters() if q.grad is not None]
        norm = torch.stack([g.abs().double().square().sum() for g in grads]).sum().sqrt()
        for g in grads:
            g.mul_(float((0.1 / (norm + 1e-6)).clamp(max=1.0)))
        optimizer.step()
    for state, reached in loopback(p.mesh, work):
        for name, want in plain.state_dict().items():
            assert state[name].dtype == want.dtype
            torch.testing.assert_close(
                state[name], want.detach(), rtol=2e-6, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}"
            )
        assert "idle" not in reached
        assert torch.equal(state["idle"], model.idle.detach())


# --- optimizers


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


class Whitened(torch.optim.Optimizer):
    """As Shampoo: a matrix is preconditioned by a root of its own second moments."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    moment = self.state[p].setdefault("moment", torch.eye(p.shape[0], dtype=p.dtype))
                    moment += p.grad @ p.grad.T
                    values, vectors = torch.linalg.eigh(moment)
                    p -= group["lr"] * (vectors * values.clamp(1e-6) ** -0.25) @ vectors.T @ p.grad


ELEMENTWISE: dict[str, Any] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW amsgrad": lambda ps: torch.optim.AdamW(ps, amsgrad=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.5, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}
WHOLE: dict[str, Any] = {
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
    "Whitened": Whitened,
    "Lamb": lambda ps: Lamb(ps, lr=0.1),
}
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def trained(p: Program, model: nn.Module, make: Any) -> list[State]:
    """The weights of every rank after three steps."""

    def work(mesh: LoopbackMesh) -> State:
        engine = p.engine(model, make, mesh=mesh)
        for _ in range(3):
            engine.step(X)
        return engine.full_state_dict()

    return loopback(p.mesh, work)


def alone(model: nn.Module, make: Any) -> State:
    plain = copy.deepcopy(model)
    optimizer = make([q for q in plain.parameters() if q.requires_grad])
    for _ in range(3):
        optimizer.zero_grad()
        plain(X).backward()
        optimizer.step()
    return {n: x.detach() for n, x in plain.state_dict().items()}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimizers_that_work_on_parts(name: str) -> None:
    model = Two()
    want, (found, _) = alone(model, ELEMENTWISE[name]), trained(compile_(model, X, 2, 2), model, ELEMENTWISE[name])
    for n, x in want.items():
        torch.testing.assert_close(found[n], x, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_need_whole_parameters(name: str) -> None:
    """Refused where a rank has but parts, with the reason; used as ever where it has all."""
    model = Two()
    p = compile_(model, X, 2, 1)
    with pytest.raises(shardc.ShardcError, match=r"the optimizer .* needs whole parameters") as e:
        trained(p, model, WHOLE[name])
    assert "data.zero" in str(e.value)
    want, (found, _) = alone(model, WHOLE[name]), trained(compile_(model, X, 2, 0), model, WHOLE[name])
    for n, x in want.items():
        torch.testing.assert_close(found[n], x, rtol=1e-3 if name == "Muon" else 2e-5, atol=1e-6)


def test_an_optimizer_that_computes_the_loss() -> None:
    """LBFGS: in a loop of one's own."""
    model = Two()
    p = compile_(model, X, 2, 0)
    with pytest.raises(shardc.ShardcError, match=r"LBFGS computes the loss several times.*\n.*program.module"):
        trained(p, model, torch.optim.LBFGS)

    def work(mesh: LoopbackMesh) -> list[float]:
        module = p.module(model, mesh=mesh)
        return minimise(module, X[2 * mesh.rank : 2 * mesh.rank + 2])

    want = minimise(copy.deepcopy(model), X)
    assert want[0] > 3 * want[-1]
    for losses in loopback(p.mesh, work):
        assert losses == pytest.approx(want, rel=1e-3)


def minimise(module: nn.Module, x: Tensor) -> list[float]:
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.5)
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module(x)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return losses[:6]


# --- errors in the middle


class Table(nn.Module):
    """An id that the table does not have is an error in forward; nan in `x` is none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.fc, self.head = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(self.table(ids)))).square().mean()


class Fails(torch.optim.SGD):
    """Stops between its first parameter and the next, once."""

    ready = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    p -= group["lr"] * p.grad
                if i == 1 and self.ready:
                    self.ready = False
                    raise OverflowError("on purpose")


def sgd(ps: Any) -> Fails:
    return Fails(ps, lr=0.1)


@LEVELS
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_that_fails_before_its_update_leaves_the_engine_as_it_was(zero: int, microbatches: int) -> None:
    """In forward, in the second microbatch, or in backward, with sums under way: the next step is as any other."""
    model, ids = Table(), torch.arange(8)
    p = compile_(model, ids, 2, zero, batch={"microbatches": microbatches})

    def work(mesh: LoopbackMesh, disturbed: bool) -> State:
        engine = p.engine(model, sgd, mesh=mesh)
        engine.step(ids)
        if disturbed:
            bad = ids.clone()
            bad[[3, 7]] = 99  # the last rows of each rank
            with pytest.raises(IndexError):
                engine.step(bad)
            with pytest.raises(shardc.ShardcError, match="compiled for"):
                engine.step(torch.arange(9))
            reduce = mesh.start_all_reduce, mesh.start_reduce_scatter

            def stop(start: Any, *args: Any, direction: str, **kwargs: Any) -> Any:
                work = start(*args, direction=direction, **kwargs)
                if direction == "backward":
                    raise OverflowError("on purpose")
                return work

            mesh.start_all_reduce, mesh.start_reduce_scatter = (partial(stop, start) for start in reduce)  # type: ignore[method-assign]
            with pytest.raises(OverflowError):
                engine.step(ids)
            mesh.start_all_reduce, mesh.start_reduce_scatter = reduce  # type: ignore[method-assign]
        engine.step(ids.flip(0))
        return engine.full_state_dict()

    good, again = (loopback(p.mesh, lambda mesh, d=d: work(mesh, d)) for d in (False, True))
    for one, other in zip(good, again, strict=True):
        assert all(torch.equal(one[n], other[n]) for n in one)


@LEVELS
def test_an_update_that_fails_halfway_is_not_gone_on_from(zero: int, tmp_path: Path) -> None:
    model, ids = Table(), torch.arange(8)
    p = compile_(model, ids, 2, zero)

    def work(mesh: LoopbackMesh) -> tuple[State, State]:
        engine = p.engine(model, sgd, mesh=mesh)
        engine.step(ids)
        engine.save(tmp_path / "saved")
        before = engine.full_state_dict()
        assert isinstance(engine.optimizer, Fails)
        engine.optimizer.ready = True
        with pytest.raises(OverflowError):
            engine.step(ids)
        for use in (
            lambda: engine.step(ids),
            lambda: engine.evaluate(ids),
            lambda: engine.save(tmp_path / "other"),
            engine.update,
        ):
            with pytest.raises(shardc.ShardcError, match=r"an update or a load failed halfway.*\n.*load a checkpoint"):
                use()
        engine.load(tmp_path / "saved")
        after = engine.full_state_dict()
        engine.step(ids)
        return before, after

    for before, after in loopback(p.mesh, work):
        assert all(torch.equal(before[n], after[n]) for n in before)
    assert not (tmp_path / "other").exists()


def test_a_failed_step_does_not_leave_gathers_for_the_next_weights(tmp_path: Path) -> None:
    """At ZeRO 3 forward gathers ahead: what was under way when it failed is not what a checkpoint brings."""
    model, ids = Table(), torch.arange(8)
    p = compile_(model, ids, 2, 3)

    def work(mesh: LoopbackMesh) -> tuple[float, float]:
        engine: Engine = p.engine(model, sgd, mesh=mesh)
        engine.save(tmp_path / "first")
        loss = float(engine.step(ids))
        with pytest.raises(IndexError):
            engine.step(ids + 99)
        engine.load(tmp_path / "first")
        return loss, float(engine.step(ids))

    for first, second in loopback(p.mesh, work):
        assert first == second
