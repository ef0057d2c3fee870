"""Engines and modules compare what their ranks share: a difference is an error on every rank that names it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.errors import ShardcError
from shardc.runtime.checks.shared_facts import batch_facts
from shardc.runtime.mesh.agreement import DisagreementError, check
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.stage.not_finite import NotFiniteError
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.module import ShardedModule
from tests.runtime.step.small import BATCH, Net


def _seeded(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


MODELS = [_seeded(seed) for seed in range(4)]  # made here: ranks are threads, and torch has one random state


def net(seed: int = 0) -> Net:
    return copy.deepcopy(MODELS[seed])


def compiled(**spec: Any) -> Any:
    mesh = {"dp": 2, "tp": 2}
    return shardc.compile(net(), BATCH, {"shardc": 1, "mesh": mesh, "shard": {"use": "structure"}, **spec})


PROGRAM = compiled()


def adam(lr: float = 1e-3) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.Adam(params, lr=lr)


def modules(mesh: LoopbackMesh) -> None:
    x = BATCH["x"].clone()
    x[7, 7] += 1e-6 * (mesh.rank == 3)
    ShardedModule(PROGRAM, net(), mesh=mesh)(x=x.chunk(2)[mesh.coordinate("dp")])


def alone(call: str) -> Callable[[LoopbackMesh], None]:
    """One rank calls what all do together, while the others take a step."""

    def work(mesh: LoopbackMesh) -> None:
        engine = Engine(PROGRAM, net(), mesh=mesh)
        if mesh.rank == 3:
            getattr(engine, call)("never written")
        engine.step(BATCH)

    return work


@pytest.mark.parametrize(
    ("work", "what"),
    [
        (alone("export"), r"a step on rank 0, exporting on rank 3\n  fix: .* outside of `if rank == 0:`"),
        (alone("load"), "a step on rank 0, loading a checkpoint on rank 3"),
        (modules, r"the part of the batch differs between ranks 2 .*, 3 "),
    ],
)
def test_a_difference_between_ranks_is_an_error_on_all(work: Callable[[LoopbackMesh], None], what: str) -> None:
    """(Most of them: tests/runtime/mesh/differences.py, over gloo.)"""

    def caught(mesh: LoopbackMesh) -> str:
        with pytest.raises(ShardcError, match=what) as e:
            work(mesh)
        assert all(one.fix for one in e.value.errors)
        return str(e.value)

    assert len(set(loopback(PROGRAM.mesh, caught))) == 1


def test_the_order_of_keys_is_no_difference() -> None:
    """Made of a set of texts, it differs in each process."""

    def work(mesh: LoopbackMesh) -> float:
        engine = Engine(compiled_pair, model, mesh=mesh)
        order = reversed(batch) if mesh.rank else iter(batch)
        return float(engine.step({name: batch[name] for name in order}))

    model, batch = nn.Bilinear(4, 4, 4).double(), {"input1": torch.ones(8, 4).double(), "input2": torch.eye(8).double()}
    batch["input2"] = batch["input2"][:, :4]
    compiled_pair = shardc.compile(
        model, batch, {"shardc": 1, "mesh": {"dp": 4}}, loss=lambda output, _: output.square().mean()
    )
    want = float(model(**batch).detach().square().mean())
    assert loopback(compiled_pair.mesh, work) == pytest.approx([want] * 4, rel=1e-12)


def test_broadcast_gives_every_rank_the_weights_of_rank_0() -> None:
    def work(mesh: LoopbackMesh) -> dict[str, torch.Tensor]:
        return Engine(PROGRAM, net(seed=mesh.rank), mesh=mesh, broadcast=True).full_state_dict()

    for state in loopback(PROGRAM.mesh, work):
        assert all(torch.equal(x, net(seed=0).state_dict()[name]) for name, x in state.items())


@pytest.mark.parametrize("spec", [{}, {"data": {"axis": "dp", "zero": 3}}, {"batch": {"microbatches": 2}}])
def test_a_loss_that_is_not_finite_stops_the_step_and_names_the_module(spec: dict[str, Any]) -> None:
    program = compiled(**spec)
    bad = {"x": BATCH["x"].clone()}
    bad["x"][3, 5] = float("nan")

    def work(mesh: LoopbackMesh) -> list[bool]:
        engine = Engine(program, net(), adam(), mesh=mesh, nonfinite="stop")
        engine.step(BATCH)
        before = {n: x.clone() for n, x in engine.full_state_dict().items()}
        with pytest.raises(NotFiniteError, match=r"the loss of step 2 is nan; .* of up \(small.py:\d+\)"):
            engine.step(bad)
        same = [torch.equal(before[n], x) for n, x in engine.full_state_dict().items()]
        assert engine.step(BATCH).isfinite()
        return same

    assert all(all(same) for same in loopback(program.mesh, work))


def test_a_loss_that_is_not_finite_is_skipped() -> None:
    bad = {"x": torch.full((8, 8), float("inf"))}

    def work(mesh: LoopbackMesh) -> float:
        engine = Engine(PROGRAM, net(), adam(), mesh=mesh, nonfinite="skip")
        before = {n: x.clone() for n, x in engine.full_state_dict().items()}
        engine.step(bad)
        assert engine.step_count == 1
        assert all(torch.equal(before[n], x) for n, x in engine.full_state_dict().items())
        return float(engine.step(BATCH))

    assert len({*loopback(PROGRAM.mesh, work), *loopback(PROGRAM.mesh, lambda m: plain(m))}) == 1


class Classes(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.down(self.up(x)), labels)


def test_labels_that_are_all_ignored_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Their mean is 0 / 0, whatever the model computes: neither the learning rate nor clipping is at fault."""
    model = Classes()
    some, none = ({**BATCH, "labels": torch.full((8,), n)} for n in (1, -100))
    for more in ({"mesh": {"dp": 2}}, {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "cut": ["down"]}}):
        program = shardc.compile(model, some, {"shardc": 1, "batch": {"microbatches": 2}, **more}, prove=False)

        def work(mesh: LoopbackMesh, program: Any = program) -> Engine:
            engine = Engine(program, model, adam(), mesh=mesh, nonfinite="stop")
            with pytest.raises(
                NotFiniteError, match=r"all labels of the batch are ignored(?s:.*)leave such batches out"
            ):
                engine.step(none)
            assert engine.evaluate_all([none, some])["loss"] == float(engine.evaluate(some))
            assert engine.evaluate_all([none])["loss"] != engine.evaluate_all([none])["loss"]
            engine.step(some)
            assert engine.updated
            engine.set(nonfinite="skip")
            engine.step(none)
            assert not engine.updated
            return engine

        loopback(program.mesh, work)
        assert "the loss of these batches is nan: it is a mean over nothing" in capsys.readouterr().err


class Lengths(nn.Module):
    """The gradient of a row's length is 0 / 0 where the row is 0; the length is not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.BatchNorm1d(8)
        self.one, self.two = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)).square().sum(-1).sqrt().mean() + 0 * self.seen(x).mean()


@pytest.mark.parametrize(
    "spec", [{"data": {"zero": 3}}, {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "cut": ["two"]}}]
)
@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_gradient_that_is_not_finite_though_the_loss_is(nonfinite: Any, spec: dict[str, Any]) -> None:
    """Nothing is updated, buffers neither, and the parameters are named; and the next step is as any other."""
    torch.manual_seed(0)
    model, good = Lengths(), {"x": torch.randn(4, 8)}
    bad = {"x": good["x"] * torch.tensor([1.0, 0.0, 1.0, 1.0])[:, None]}
    program = shardc.compile(model, good, {"shardc": 1, "mesh": {"dp": 2}, **spec}, prove=False)

    def work(mesh: LoopbackMesh) -> list[bool]:
        engine = Engine(program, model, adam(), mesh=mesh, nonfinite=nonfinite)
        straight = Engine(program, model, adam(), mesh=mesh)
        before = {n: x.clone() for n, x in engine.full_state_dict().items()}
        if nonfinite == "stop":
            what = "the loss of step 1 is finite, but not the gradient of one.weight, two.weight"
            with pytest.raises(NotFiniteError, match=what):
                engine.step(bad)
        else:
            assert engine.step(bad).isfinite()
        same = [torch.equal(before[n], x) for n, x in engine.full_state_dict().items()]
        assert torch.equal(engine.step(good), straight.step(good))
        return same + [torch.equal(engine.full_state_dict()[n], x) for n, x in straight.full_state_dict().items()]

    assert all(all(same) for same in loopback(program.mesh, work))


def plain(mesh: LoopbackMesh) -> float:
    return float(Engine(PROGRAM, net(), adam(), mesh=mesh).step(BATCH))


def test_the_modules_clipping_takes_the_norm_of_the_whole_model() -> None:
    reference = net()
    reference(**BATCH).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)

    def work(mesh: LoopbackMesh) -> torch.Tensor:
        module = ShardedModule(PROGRAM, net(), mesh=mesh)
        module(x=BATCH["x"].chunk(2)[mesh.coordinate("dp")]).backward()
        total = module.clip_grad_norm_(0.1)
        part = module.get_parameter("up.weight").grad.as_subclass(torch.Tensor)
        assert part is not None
        assert reference.up.weight.grad is not None
        torch.testing.assert_close(part, reference.up.weight.grad.chunk(2)[mesh.coordinate("tp")])
        return total

    for total in loopback(PROGRAM.mesh, work):
        torch.testing.assert_close(total, norm)


def test_a_meta_tensor_on_one_rank_differs_on_all() -> None:
    def rank(mesh: LoopbackMesh) -> str:
        device = "meta" if mesh.rank else "cpu"
        with pytest.raises(DisagreementError, match="the global batch") as e:
            check(mesh, batch_facts(PROGRAM, {"x": torch.ones(4, 2, device=device)}, local=False))
        return str(e.value)

    assert len(set(loopback(PROGRAM.mesh, rank))) == 1
