"""The engine, the module and simulate give what one device gives, on a program written by hand (tests/hand.py)."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from shardc.errors import ShardcError
from shardc.runtime.engine import Engine
from shardc.runtime.loopback import LoopbackMesh, loopback
from shardc.runtime.module import ShardedModule
from shardc.simulate import Comm, simulate
from tests import hand

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 3)]
LR = 1e-2


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-12, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}")


# --- simulate -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_a_step_equals_one_device(dp: int, tp: int) -> None:
    loss, grads, state = hand.reference()
    sim = simulate(hand.program(dp, tp), hand.Model(), hand.batch())
    torch.testing.assert_close(sim.loss, loss, rtol=1e-12, atol=0)
    close(sim.grads, {**grads, "tied.scale": grads["scale"]})
    weights = hand.Model().state_dict()  # no optimizer: weights stay, buffers move on
    close(sim.state, {**weights, "running": state["running"]})


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_several_steps_equal_one_device(dp: int, tp: int) -> None:
    loss, grads, state = hand.reference(steps=4, lr=LR)
    sim = simulate(hand.program(dp, tp), hand.Model(), hand.batch(), steps=4, optimizer=adamw)
    torch.testing.assert_close(sim.loss, loss, rtol=1e-12, atol=0)
    close(sim.grads, {**grads, "tied.scale": grads["scale"]})
    close(sim.state, state)
    default = simulate(hand.program(dp, tp), hand.Model(), hand.batch(), steps=2)
    close(default.state, hand.reference(steps=2, lr=3e-4)[2])


def test_dropout_does_not_know_the_mesh() -> None:
    sims = [simulate(hand.program(dp, tp, dropout=0.3), hand.Model(), hand.batch(), steps=3, optimizer=sgd, seed=5) for dp, tp in MESHES]
    for sim in sims[1:]:
        torch.testing.assert_close(sim.loss, sims[0].loss, rtol=1e-12, atol=0)
        close(sim.grads, sims[0].grads)
    other = simulate(hand.program(dropout=0.3), hand.Model(), hand.batch(), steps=3, optimizer=sgd, seed=6)
    assert float((other.loss - sims[0].loss).abs()) > 1e-6


def test_the_collectives_that_ran_have_their_causes() -> None:
    sim = simulate(hand.program(2, 2), hand.Model(), hand.batch())
    assert sim.comms == [
        Comm("all_reduce", "tp", 4 * 4 * 8, "forward", "by hand: z_sum"), Comm("all_reduce", "dp", 8, "forward", "by hand: s_sum"),
        Comm("all_reduce", "dp", 4 * 8, "forward", "by hand: m_sum"),
        Comm("all_reduce", "dp", (4 + 4 * 6) * 8, "backward", "gradients of 2 parameters"),
        Comm("all_reduce", "dp", (6 + 6 * 6) * 8, "backward", "gradients of 2 parameters"),
    ]  # fmt: skip
    assert simulate(hand.program(), hand.Model(), hand.batch()).comms == []
    # an update needs no communication: the gradients' norm is only computed where it is asked for
    assert all(c.direction != "update" for c in simulate(hand.program(1, 2), hand.Model(), hand.batch(), optimizer=sgd).comms)


def test_simulate_leaves_the_model_alone_and_takes_a_state_dict() -> None:
    model = hand.Model()
    before = {n: x.clone() for n, x in model.state_dict().items()}
    one = simulate(hand.program(2, 2), model, hand.batch(), steps=2, optimizer=sgd)
    close(model.state_dict(), before)
    assert all(p.grad is None for p in model.parameters())
    two = simulate(hand.program(2, 2), before, hand.batch(), steps=2, optimizer=sgd)
    assert torch.equal(one.loss, two.loss)


def test_replicas_that_come_out_different_are_noticed() -> None:
    """A program that forgets the gradients' reduction: the second rank's differ."""
    program = hand.program(2, 1)
    program.buckets = ()
    with pytest.raises(AssertionError, match=r"the gradient of up\.weight on rank 1 is another value than on its replica, by"):
        simulate(program, hand.Model(), hand.batch())
    with pytest.raises(ValueError, match="steps must be at least 1, not 0"):
        simulate(program, hand.Model(), hand.batch(), steps=0)


# --- engine -------------------------------------------------------------------------------------------------------------


def on_ranks(dp: int, tp: int, work: Any, **options: Any) -> list[Any]:
    program = hand.program(dp, tp)
    return loopback(program.mesh, lambda mesh: work(Engine(program, hand.Model(), adamw, mesh=mesh, **options)))


def test_the_engine_trains_like_one_device() -> None:
    want = hand.reference(steps=3, lr=LR)

    def work(engine: Engine) -> tuple[Tensor, dict[str, Tensor], int]:
        for _ in range(3):
            loss = engine.step(hand.batch())
        assert loss.shape == ()
        assert not loss.requires_grad
        return loss, engine.full_state_dict(), engine.step_count

    for loss, state, steps in on_ranks(2, 2, work):
        torch.testing.assert_close(loss, want[0], rtol=1e-12, atol=0)
        close(state, want[2])
        assert steps == 3


def test_a_ranks_own_part_gives_the_same_step() -> None:
    def work(engine: Engine) -> list[float]:
        part = {k: x.chunk(2)[engine.mesh.coordinate("dp")] for k, x in hand.batch().items()}
        return [float(engine.step(part, local=True)), float(engine.evaluate(part, local=True)), float(engine.evaluate(hand.batch()))]

    results = on_ranks(2, 2, work)
    assert results == results[:1] * 4
    assert results[0][1] == results[0][2]
    assert results[0][0] == pytest.approx(float(hand.reference()[0]), rel=1e-12)


def test_evaluation_changes_nothing_and_drops_nothing() -> None:
    program = hand.program(1, 1, dropout=0.5)
    engine = program.engine(hand.Model(), adamw)
    before = {n: x.clone() for n, x in engine.full_state_dict().items()}
    loss = engine.evaluate(hand.batch())
    torch.testing.assert_close(loss, hand.reference()[0], rtol=1e-12, atol=0)
    close(engine.full_state_dict(), before)
    assert engine.grad_norm is None
    assert engine.step_count == 0
    trained = engine.step(hand.batch())  # dropout is on again
    assert abs(float(trained - loss)) > 1e-6


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_gradients_are_clipped_by_the_whole_models_norm(dp: int, tp: int) -> None:
    model = hand.Model()
    model(**hand.batch()).backward()
    want = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    clipped = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def work(engine: Engine) -> Tensor:
        engine.step(hand.batch())
        assert engine.grad_norm is not None
        for p in engine.program.params:
            if p.fqn in clipped:
                whole = clipped[p.fqn]
                part = p.layout.local(whole, engine.mesh.layout, engine.mesh.layout.coords(engine.mesh.rank))
                torch.testing.assert_close(engine.params[p.name].grad, part, rtol=1e-12, atol=0)
        return engine.grad_norm

    for norm in on_ranks(dp, tp, work, clip_norm=0.1):
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)


WRONG: list[tuple[str, Any, str]] = [
    ("missing", {"x": hand.batch()["x"]}, r"y: the batch does not have it \(it has x\); the program was compiled for f64\[8, 4\]"),
    ("shape", {**hand.batch(), "x": torch.zeros(6, 6).double()}, r"x: the batch gives f64\[6, 6\], but the program was compiled for f64\[8, 6\]"),
    ("dtype", {**hand.batch(), "y": torch.zeros(8, 4)}, r"y: the batch gives f32\[8, 4\], but the program was compiled for f64\[8, 4\]"),
    ("no tensor", {**hand.batch(), "y": None}, r"y: the batch gives NoneType, but"),
    ("unknown", {**hand.batch(), "mask": torch.ones(8)}, r"mask: the program was compiled without this input, f32\[8\]\n  fix: leave it out"),
    ("misspelt", {"x": hand.batch()["x"], "yy": torch.ones(8)}, r"yy: the program was compiled without this input, f32\[8\]\n  fix: name it 'y'"),
    ("a tuple", (hand.batch()["x"],), r"x: the batch does not have it \(it has 0\)"),
    ("a tensor", hand.batch()["x"], r"x: the batch does not have it \(it has the batch\)"),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "text"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_wrong_batch_is_named(batch: Any, text: str) -> None:
    with pytest.raises(ShardcError, match=text):
        hand.program().engine(hand.Model()).step(batch)


def test_all_that_is_wrong_with_a_batch_is_said_at_once() -> None:
    with pytest.raises(ShardcError) as caught:
        hand.program().engine(hand.Model()).step({"x": torch.zeros(1), "z": torch.zeros(1)})
    assert [e.where for e in caught.value.errors] == ["z", "x", "y"]


def test_a_whole_batch_where_a_part_is_asked_for() -> None:
    def work(engine: Engine) -> None:
        engine.step(hand.batch(), local=True)

    with pytest.raises(ShardcError, match=r"compiled for f64\[4, 6\] on each rank\n  fix: pass this rank's own part, or the whole batch"):
        on_ranks(2, 1, work)


def test_leaves_that_are_no_tensors_are_not_looked_at() -> None:
    loss = hand.program().engine(hand.Model()).step({**hand.batch(), "flag": True, "name": None})
    torch.testing.assert_close(loss, hand.reference()[0], rtol=1e-12, atol=0)


# --- module -------------------------------------------------------------------------------------------------------------


def loop(module: Any, part: Any, steps: int) -> Tensor:
    """A user's own loop, the same for one device and many."""
    optimizer = adamw(module.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(steps):
        loss: Tensor = module(**part)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return loss.detach()


def part_of(mesh: Any) -> dict[str, Tensor]:
    return {k: x.chunk(mesh.size("dp"))[mesh.coordinate("dp")] for k, x in hand.batch().items()}


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_a_module_in_ones_own_loop_equals_one_device(dp: int, tp: int) -> None:
    model = hand.Model()
    want = loop(model, hand.batch(), 3)
    state = model.state_dict()
    program = hand.program(dp, tp)

    def work(mesh: LoopbackMesh) -> tuple[Tensor, dict[str, Tensor]]:
        module = program.module(hand.Model(), mesh=mesh)
        return loop(module, part_of(mesh), 3), dict(module.state_dict())

    layouts = {n: p.layout for p in program.params for n in (p.fqn, *p.aliases)}
    for rank, (loss, local) in enumerate(loopback(program.mesh, work)):
        torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
        coords = program.mesh.coords(rank)
        close(local, {n: layouts[n].local(x, program.mesh, coords) if n in layouts else x for n, x in state.items()})


def test_a_modules_names_are_the_models() -> None:
    module, model = hand.program().module(hand.Model()), hand.Model()
    assert module.state_dict().keys() == model.state_dict().keys()
    assert dict(module.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert module.get_parameter("tied.scale") is module.get_parameter("scale")
    assert "rank 0 of dp=1 × tp=1" in repr(module)
    module.load_state_dict(model.state_dict())


def grads_of(module: ShardedModule) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def test_gradients_accumulate_over_backwards() -> None:
    program = hand.program(2, 2)

    def work(mesh: LoopbackMesh) -> None:
        module = program.module(hand.Model(), mesh=mesh)
        part = part_of(mesh)
        module(**part).backward()
        once = grads_of(module)
        module(**part).backward()
        close(grads_of(module), {n: 2 * g for n, g in once.items()})
        module.zero_grad(set_to_none=False)
        (module(**part) + module(**part)).backward()  # two losses, one backward
        close(grads_of(module), {n: 2 * g for n, g in once.items()})
        module.zero_grad()
        (3 * module(**part)).backward()
        close(grads_of(module), {n: 3 * g for n, g in once.items()})

    loopback(program.mesh, work)


def test_a_backward_that_failed_does_not_spoil_the_next() -> None:
    module = hand.program().module(hand.Model())
    buckets = module._running.buckets
    loss = module(**hand.batch())
    loss.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    module.zero_grad()
    buckets.start()  # as if it had failed further on
    assert buckets.active
    module(**hand.batch()).backward()
    assert not buckets.active
    grads = hand.reference()[1]
    close(grads_of(module), grads)


def test_a_modules_mode_and_gradients_can_be_switched() -> None:
    module = hand.program(dropout=0.5).module(hand.Model(), seed=3)
    first, second = module(**hand.batch()), module(**hand.batch())
    assert float((first - second).detach().abs()) > 1e-6  # new masks every time
    running = module.get_buffer("running").clone()
    assert running.any()
    module.eval()
    with torch.no_grad():
        loss = module(**hand.batch())
    assert not loss.requires_grad
    assert torch.equal(module.get_buffer("running"), running)
    torch.testing.assert_close(loss, hand.reference()[0], rtol=1e-12, atol=0)


def test_a_module_is_called_like_the_model() -> None:
    module = hand.program().module(hand.Model())
    b = hand.batch()
    losses = [float(loss.detach()) for loss in (module(**b), module(b["x"], b["y"]), module(b["x"], y=b["y"]))]
    assert losses == losses[:1] * 3
    with pytest.raises(ShardcError, match=r"y: the batch does not have it \(it has x\)"):
        module(b["x"])


# --- processes ----------------------------------------------------------------------------------------------------------


def train(rank: int, dp: int, tp: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(dp * tp), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(dp * tp),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    engine = hand.program(dp, tp, dropout=0.2).engine(hand.Model(), adamw, seed=5, clip_norm=1.0)
    for _ in range(3):
        loss = engine.step(hand.batch())
    module = hand.program(dp, tp).module(hand.Model())
    loop_loss = loop(module, part_of(engine.mesh), 3)
    state = engine.full_state_dict()
    if rank == dp * tp - 1:
        torch.save({"loss": loss, "norm": engine.grad_norm, "state": state, "loop": loop_loss}, out)
    engine.close()


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
def test_gloo_processes_train_like_one_device(dp: int, tp: int, tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(train, (dp, tp, port, str(tmp_path / "out")), nprocs=dp * tp)  # type: ignore[no-untyped-call]
    got = torch.load(tmp_path / "out", weights_only=True)
    one = hand.program(dropout=0.2).engine(hand.Model(), adamw, seed=5, clip_norm=1.0)
    for _ in range(3):
        loss = one.step(hand.batch())
    torch.testing.assert_close(got["loss"], loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(got["norm"], one.grad_norm, rtol=1e-12, atol=0)
    close(got["state"], one.full_state_dict())
    torch.testing.assert_close(got["loop"], loop(hand.Model(), hand.batch(), 3), rtol=1e-12, atol=0)
