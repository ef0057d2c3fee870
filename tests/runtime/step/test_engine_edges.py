"""Where an engine's memory ends and others' begins: buffers, the batch, what a rank has not; and what a caller may have
switched off.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import shardc
from shardc.api import Program
from shardc.cli.ranks import step_lines
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine

torch.set_num_threads(1)


class Mlp(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Remembers(nn.Module):
    """Buffers that get a parameter, the batch, a number for all of their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        for name in ("weight", "seen", "mean"):
            self.register_buffer(name, torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.copy_(self.linear.weight.detach())
        self.seen.copy_(x)
        self.mean.copy_(x.mean())
        return self.linear(x).square().mean()  # type: ignore[no-any-return]


def batch(seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def on_ranks(program: Program, model: nn.Module, work: Callable[[Engine], Any], **options: Any) -> list[Any]:
    return loopback(
        program.mesh, lambda mesh: work(program.engine(model, **{"optimizer": sgd, "mesh": mesh} | options))
    )


@pytest.mark.parametrize(
    "spec",
    [{"mesh": {"dp": 1}}, {"mesh": {"dp": 2}, "data": {"zero": 1}}, {"mesh": {"dp": 2}, "data": {"zero": 3}}],
    ids=str,
)
def test_buffers_have_memory_of_their_own(spec: dict[str, Any], tmp_path: Path) -> None:
    """What one got is still there when the parameter, or the user's batch, has changed; and can be loaded."""
    torch.manual_seed(0)
    model = Remembers()
    before, given = model.linear.weight.detach().clone(), batch()
    program = shardc.compile(model, given, {"shardc": 1, **spec})

    def work(engine: Engine) -> dict[str, Tensor]:
        mine = batch()
        engine.step(mine)
        mine["x"].zero_()
        engine.save(tmp_path / "saved")
        found = engine.full_state_dict()
        engine.load(tmp_path / "saved")
        return found

    def loop(mesh: LoopbackMesh) -> Tensor:
        module = program.module(model, mesh=mesh)
        part = {"x": given["x"].chunk(mesh.size("dp"))[mesh.coordinate("dp")]}
        module(**part).backward()
        sgd(module.parameters()).step()
        return module.get_buffer("weight").clone()

    for state in on_ranks(program, model, work):
        assert torch.equal(state["weight"], before)
        assert torch.equal(state["seen"], given["x"])
        assert torch.allclose(state["mean"], given["x"].mean().expand(8, 8))
        assert not torch.equal(state["linear.weight"], before)
    assert all(torch.equal(x, before) for x in loopback(program.mesh, loop))


def test_a_step_trains_also_where_gradients_are_off() -> None:
    """One rank runs in the caller's thread."""
    model = Mlp()
    program = shardc.compile(model, batch(), {"shardc": 1, "mesh": {"dp": 1}})
    with torch.no_grad():
        (states,) = on_ranks(program, model, lambda engine: (engine.step(batch()), engine.full_state_dict()))
    assert not torch.equal(states[1]["layers.0.weight"], model.layers[0].weight)


@pytest.mark.parametrize("where", ["compile", "engine.step", "engine.evaluate", "module.forward"])
def test_modes_that_would_make_it_another_program_are_refused(where: str) -> None:
    def run(mode: Any) -> None:
        program, x = shardc.compile(Mlp(), batch(), {"shardc": 1, "mesh": {"dp": 1}}), batch()
        engine, module = program.engine(Mlp()), program.module(Mlp())
        does: dict[str, Callable[[], Any]] = {
            "compile": lambda: shardc.compile(Mlp(), x, {"shardc": 1, "mesh": {"dp": 1}}),
            "engine.step": lambda: engine.step(x),
            "engine.evaluate": lambda: engine.evaluate(x),
            "module.forward": lambda: module(**x),
        }
        with mode:
            does[where]()

    with pytest.raises(ShardcError, match=rf"{where}: a transform of .* or torch.autograd.forward_ad is under way"):
        run(forward_ad.dual_level())
    with pytest.raises(
        ShardcError, match=rf"{where}: torch.autocast is on.*\n  fix: leave it out, and write `precision: "
    ):
        run(torch.autocast("cpu", torch.bfloat16))
    if where == "engine.step":
        with pytest.raises(ShardcError, match=r"engine.step: torch.inference_mode is on: nothing can be trained in it"):
            run(torch.inference_mode())
    else:
        run(torch.inference_mode())


def test_the_users_batch_gets_no_gradients_and_may_not_want_any() -> None:
    given = batch()
    program = shardc.compile(Mlp(), given, {"shardc": 1, "mesh": {"dp": 2}, "checkpoint": [{"match": "layers.*"}]})
    on_ranks(program, Mlp(), lambda engine: engine.step(given))
    assert not given["x"].requires_grad
    made = {"x": given["x"] * nn.Parameter(torch.ones(()))}
    with pytest.raises(ShardcError, match="x: it depends on other parameters, which would get no gradient"):
        on_ranks(program, Mlp(), lambda engine: engine.step(made))
    on_ranks(program, Mlp(), lambda engine: engine.evaluate(made))


def frozen_first() -> tuple[nn.Module, Program]:
    """A pipeline whose first rank has nothing to train."""
    model = Mlp()
    for p in model.layers[:2].parameters():
        p.requires_grad_(False)
    spec = {
        "shardc": 1,
        "mesh": {"pp": 2},
        "pipeline": {"axis": "pp", "cut": ["layers.2"]},
        "batch": {"microbatches": 2},
    }
    return model, shardc.compile(model, batch(), spec)


def test_a_schedule_goes_on_where_the_first_rank_has_none(tmp_path: Path) -> None:
    model, program = frozen_first()

    def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def work(engine: Engine) -> list[float | None]:
        for _ in range(2):
            engine.step(batch())
        engine.save(tmp_path / "saved")
        engine.step(batch())
        once = engine.lr
        engine.load(tmp_path / "saved")
        engine.step(batch())
        return [once, engine.lr]

    def resumed(engine: Engine) -> float | None:
        engine.load(tmp_path / "saved")
        return engine.lr

    assert on_ranks(program, model, work, scheduler=halved) == [[None, None], [0.0125, 0.0125]]
    assert on_ranks(program, model, resumed, scheduler=halved) == [None, 0.025]
    other: Any = lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)  # noqa: E731

    def refused(engine: Engine) -> None:
        with pytest.raises(ShardcError, match="the checkpoint is of the scheduler StepLR, not ExponentialLR"):
            engine.load(tmp_path / "saved")  # on both ranks, and before anything changes
        engine.step(batch())

    on_ranks(program, model, refused, scheduler=other)


def by_layer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [(n, p)], "lr": 0.1 / (1 + int(n.split(".")[1]))} for n, p in params], momentum=0.9
    )


def test_groups_that_stages_have_alone_are_saved_as_they_are(tmp_path: Path) -> None:
    """A learning rate of each layer: the first group of every stage is another one."""
    model = Mlp(5)
    cut = {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "cut": ["layers.3"]}, "batch": {"microbatches": 2}}
    programs = [shardc.compile(model, batch(), {"shardc": 1, **spec}) for spec in (cut, {"mesh": {"dp": 1}})]

    def work(engine: Engine) -> dict[str, Tensor]:
        engine.step(batch())
        engine.save(tmp_path / "saved")
        engine.step(batch(1))
        return engine.full_state_dict()

    def resumed(engine: Engine) -> dict[str, Tensor]:
        engine.load(tmp_path / "saved")
        engine.step(batch(1))
        return engine.full_state_dict()

    want = on_ranks(programs[0], model, work, optimizer=by_layer)[0]
    for program in programs:
        for n, x in on_ranks(program, model, resumed, optimizer=by_layer)[0].items():
            torch.testing.assert_close(x, want[n], rtol=1e-6, atol=1e-7)
    with pytest.raises(
        ShardcError, match=r"group 0 had different settings when they were saved: lr was 0\.1 for layers\.0\.weight and"
    ):
        on_ranks(programs[1], model, resumed, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
    model.layers[0].requires_grad_(False)
    frozen = shardc.compile(model, batch(), {"shardc": 1, "mesh": {"dp": 1}})
    with pytest.raises(
        ShardcError,
        match=r"optimizer has layers\.0\.weight, layers\.0\.bias, but this one does not\n  fix: train the same",
    ):
        on_ranks(frozen, model, resumed, optimizer=by_layer)
    on_ranks(frozen, model, lambda engine: engine.load(tmp_path / "saved"), optimizer=None)


def test_callbacks_come_after_every_step_and_may_save(tmp_path: Path) -> None:
    program = shardc.compile(Mlp(), batch(), {"shardc": 1, "mesh": {"dp": 2}})
    seen: list[tuple[int, int, float]] = []

    def note(engine: Engine, loss: Tensor) -> None:
        seen.append((engine.mesh.rank, engine.step_count, float(loss)))
        engine.save(tmp_path / "saved", keep=None)

    losses = on_ranks(program, Mlp(), lambda engine: [float(engine.step(batch())) for _ in range(2)], callbacks=[note])
    assert sorted(seen) == [(rank, step + 1, losses[rank][step]) for rank in range(2) for step in range(2)]
    assert len(list((tmp_path / "saved").glob("step-*"))) == 2


@pytest.mark.parametrize("rank0", [True, False])
def test_a_callback_that_evaluates_on_one_rank_is_named(rank0: bool) -> None:
    program = shardc.compile(Mlp(), batch(), {"shardc": 1, "mesh": {"dp": 2}})

    class Alone:
        def __init__(self) -> None:
            self.rank0 = rank0

        def step_done(self, engine: Engine, loss: Tensor) -> None:
            if engine.mesh.rank == 0:
                engine.evaluate(batch())

    said = r"differs between ranks .*evaluating in Alone, step_done on rank 0, a step on rank 1"
    if rank0:
        said = r"the callback Alone, step_done: it runs on the first rank alone(.|\n)*fix: leave out rank0"
    with pytest.raises(ShardcError, match=said):
        on_ranks(program, Mlp(), lambda engine: [engine.step(batch()) for _ in range(2)], callbacks=[Alone()])


def test_evaluations_leave_nothing_behind() -> None:
    """At ZeRO 3 every forward gathers the parameters."""
    program = shardc.compile(Mlp(), batch(), {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": 3}})

    def work(engine: Engine) -> int:
        for _ in range(4):
            engine.evaluate(batch())
        return sum(b._forward_gather is not None for b in engine.buckets._all)

    assert max(on_ranks(program, Mlp(), work)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64], ids=str)
def test_the_gradients_norm_is_wide(dtype: torch.dtype) -> None:
    """It is what the clipping goes by: of 16-bit gradients in 32 bits, of complex ones real."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2000, dtype=dtype, generator=torch.Generator().manual_seed(0)))

        def forward(self, x: Tensor) -> Tensor:
            return (
                (x * torch.view_as_real(self.w).sum(-1) if self.w.is_complex() else x.to(self.w.dtype) * self.w)
                .float()
                .sum()
            )

    x = torch.randn(4, 2000, generator=torch.Generator().manual_seed(1))
    program = shardc.compile(Weighted(), {"x": x}, {"shardc": 1, "mesh": {"dp": 2}})

    def work(engine: Engine) -> tuple[Tensor | None, Tensor]:
        engine.backward({"x": x})
        grad = torch.cat([p.grad.reshape(-1) for p in engine.params.values() if p.grad is not None])
        engine.update()
        return engine.grad_norm, grad

    for norm, grad in on_ranks(program, Weighted(), work, norm=True):
        wide = torch.view_as_real(grad) if grad.is_complex() else grad
        torch.testing.assert_close(norm, wide.double().norm().float(), rtol=1e-5, atol=0)


def test_gradients_that_are_replaced_are_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    model, batch = nn.Linear(4, 4), {"input": torch.ones(4, 4)}
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}}, loss=lambda y, _: y.square().mean())

    def used(engine: Engine) -> None:
        for _ in range(2):
            engine.backward(batch)
            engine.update()
            engine.step(batch)

    def replaced(engine: Engine) -> None:
        for _ in range(3):
            engine.backward(batch)

    for work, times in ((used, 0), (replaced, 1)):
        on_ranks(program, model, work)
        assert capfd.readouterr().err.count("gradients are replaced, not added up") == times


def test_a_backward_that_failed_leaves_nothing_to_replace(capfd: pytest.CaptureFixture[str]) -> None:
    program = shardc.compile(Mlp(), batch(), {"shardc": 1, "mesh": {"dp": 2}}, prove=False)

    def work(engine: Engine) -> None:
        for _ in range(2):
            with pytest.raises(ShardcError):
                engine.backward({"x": torch.zeros(3)})
            engine.backward(batch())
            engine.update()
        engine.mesh.barrier()
        assert "called twice" not in capfd.readouterr().err
        engine.mesh.barrier()
        for _ in range(3):
            engine.backward(batch())

    on_ranks(program, Mlp(), work)
    assert capfd.readouterr().err.count("engine.backward was called twice without engine.update") == 1


def test_an_optimizer_may_have_a_rate_of_its_own(tmp_path: Path) -> None:
    """transformers' Adafactor makes one from its count of steps, and its groups have lr=None."""
    from transformers import Adafactor

    batch = {"x": torch.linspace(-1, 1, 64).view(8, 8)}
    spec = {"shardc": 1, "mesh": {"dp": 2}, "optimizer": {"matrices": "whole"}, "data": {"zero": 1}}
    model = Mlp()  # one for both: ranks are threads, and would draw from one generator
    program = shardc.compile(model, batch, spec, prove=False)

    def work(mesh: LoopbackMesh) -> list[float]:
        engine = program.engine(model, lambda ps: Adafactor([{"params": [p]} for _, p in ps]), mesh=mesh)
        losses = [float(engine.step(batch)) for _ in range(3)]
        assert engine.lr is None
        assert "lr computed by the optimizer, " in step_lines.header(program, engine, "", "", 3, ())
        engine.save(tmp_path)
        engine.load(tmp_path)
        return losses

    losses, other = loopback(program.mesh, work)
    assert losses == other
    assert losses[2] < losses[0]


def test_a_parameter_of_another_stage_is_named_so() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    batch = {"input": torch.randn(4, 4)}
    spec = {"shardc": 1, "mesh": {"pp": 2}, "pipeline": {"axis": "pp", "cut": ["1"]}, "batch": {"microbatches": 2}}
    program = shardc.compile(model, batch, spec, loss=lambda y, _: y.square().mean(), prove=False)

    def work(mesh: LoopbackMesh) -> str:
        params = program.engine(model, mesh=mesh).params
        here, other = ("0", "1") if mesh.coordinate("pp") == 0 else ("1", "0")
        assert params[f"{here}.weight"].shape == (4, 4)
        assert f"{other}.weight" not in params
        with pytest.raises(KeyError) as e:
            params[f"{other}.weight"]
        with pytest.raises(KeyError, match=r"the model has no parameter '2.weight'"):
            params["2.weight"]
        return str(e.value)

    first, second = loopback(program.mesh, work)
    assert "1.weight: only ranks of stage 1 have it" in first
    assert "0.weight: only ranks of stage 0 have it" in second


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("clip_norm", r"call engine.set\(clip_norm=...\), on all ranks"),
        ("nonfinite", r"call engine.set\(nonfinite=...\), on all ranks"),
        ("routing", r"engine = engine.to\(engine.program, routing=...\)"),
        ("optimizer", r"engine = engine.to\(engine.program, optimizer=...\)"),
        ("seed", r"program.engine\(model, seed=...\)"),
        ("lr", "engine.optimizer.param_groups"),
        ("params", "write into the parameters"),
        ("program", r"engine.to\(program\)"),
    ],
)
def test_options_are_not_written_to_an_engine_that_is_made(name: str, fix: str) -> None:
    """`engine.clip_norm = 0.1` of an engine that was made without would clip nothing, and say nothing."""
    model = Mlp()
    program = shardc.compile(model, batch(), {"shardc": 1, "mesh": {"dp": 2}})

    def work(engine: Engine) -> None:
        with pytest.raises(ShardcError, match=r"an engine cannot change this|all ranks change an option") as e:
            setattr(engine, name, 0.1)
        assert e.value.where == f"engine.{name} = ..."
        assert re.search(fix, e.value.fix)
        engine.epoch = 3  # type: ignore[attr-defined]  # a note of the user's own
        engine.step(batch())

    on_ranks(program, model, work, optimizer=sgd)
