"""The engine, the module and simulate give what one device gives, on a program written by hand
(tests/example_program.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.module import ShardedModule
from shardc.verify.simulate import Comm, simulate
from tests import example_program as example

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


# --- simulate


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_several_steps_equal_one_device(dp: int, tp: int) -> None:
    loss, grads, state = example.reference(steps=4, lr=LR)
    sim = simulate(example.program(dp, tp), example.Model(), example.batch(), steps=4, optimizer=adamw)
    torch.testing.assert_close(sim.loss, loss, rtol=1e-12, atol=0)
    close(sim.grads, {**grads, "tied.scale": grads["scale"]})
    close(sim.state, state)
    still = simulate(example.program(dp, tp), example.Model(), example.batch())  # no optimizer: buffers move on
    close(still.state, {**example.Model().state_dict(), "running": example.reference()[2]["running"]})
    default = simulate(example.program(dp, tp), example.Model(), example.batch(), steps=2)
    close(default.state, example.reference(steps=2, lr=3e-4)[2])


def test_dropout_does_not_know_the_mesh() -> None:
    sims = [
        simulate(example.program(dp, tp, dropout=0.3), example.Model(), example.batch(), steps=3, optimizer=sgd, seed=5)
        for dp, tp in MESHES
    ]
    for sim in sims[1:]:
        torch.testing.assert_close(sim.loss, sims[0].loss, rtol=1e-12, atol=0)
        close(sim.grads, sims[0].grads)
    other = simulate(example.program(dropout=0.3), example.Model(), example.batch(), steps=3, optimizer=sgd, seed=6)
    assert float((other.loss - sims[0].loss).abs()) > 1e-6


def test_the_collectives_that_ran_have_their_causes() -> None:
    sim = simulate(example.program(2, 2), example.Model(), example.batch())
    assert sim.comms == [
        Comm("all_reduce", "tp", 4 * 4 * 8, "forward", "by hand: z_sum"),
        Comm("all_reduce", "dp", 8, "forward", "by hand: s_sum"),
        Comm("all_reduce", "dp", 4 * 8, "forward", "by hand: m_sum"),
        Comm("all_reduce", "dp", (4 + 4 * 6) * 8, "backward", "gradients, in buckets"),
        Comm("all_reduce", "dp", (6 + 6 * 6) * 8, "backward", "gradients, in buckets"),
    ]
    assert simulate(example.program(), example.Model(), example.batch()).comms == []
    # an update needs no communication: the gradients' norm is only computed where it is asked for
    assert all(
        c.direction != "update"
        for c in simulate(example.program(1, 2), example.Model(), example.batch(), optimizer=sgd).comms
    )


def test_simulate_leaves_the_model_alone_and_takes_a_state_dict() -> None:
    model = example.Model()
    before = {n: x.clone() for n, x in model.state_dict().items()}
    one = simulate(example.program(2, 2), model, example.batch(), steps=2, optimizer=sgd)
    close(model.state_dict(), before)
    assert all(p.grad is None for p in model.parameters())
    two = simulate(example.program(2, 2), before, example.batch(), steps=2, optimizer=sgd)
    assert torch.equal(one.loss, two.loss)


def test_replicas_that_come_out_different_are_noticed() -> None:
    """A program that forgets the gradients' reduction: the second rank's differ."""
    program = replace(example.program(2, 1), buckets=())
    with pytest.raises(ShardcError, match=r"the gradient of up\.weight on rank 1: it differs from its replica by"):
        simulate(program, example.Model(), example.batch())
    with pytest.raises(ShardcError, match="steps must be a number"):
        simulate(program, example.Model(), example.batch(), steps=0)


# --- engine


def on_ranks(dp: int, tp: int, work: Any, **options: Any) -> list[Any]:
    program = example.program(dp, tp)
    return loopback(program.mesh, lambda mesh: work(Engine(program, example.Model(), adamw, mesh=mesh, **options)))


def test_evaluation_changes_nothing_and_drops_nothing() -> None:
    program = example.program(1, 1, dropout=0.5)
    engine = program.engine(example.Model(), adamw)
    before = {n: x.clone() for n, x in engine.full_state_dict().items()}
    loss = engine.evaluate(example.batch())
    torch.testing.assert_close(loss, example.reference()[0], rtol=1e-12, atol=0)
    close(engine.full_state_dict(), before)
    assert engine.grad_norm is None
    assert engine.step_count == 0
    trained = engine.step(example.batch())  # dropout is on again
    assert abs(float(trained - loss)) > 1e-6


WRONG: list[tuple[str, Any, str]] = [
    (
        "missing",
        {"x": example.batch()["x"]},
        r"y: the batch does not have it \(it has x\); the program was compiled for f64\[8, 4\]",
    ),
    (
        "shape",
        {**example.batch(), "x": torch.zeros(6, 6).double()},
        r"x: the batch gives f64\[6, 6\], but the program was compiled for f64\[8, 6\]",
    ),
    (
        "dtype",
        {**example.batch(), "y": torch.zeros(8, 4)},
        r"y: the batch gives f32\[8, 4\], but the program was compiled for f64\[8, 4\]",
    ),
    ("no tensor", {**example.batch(), "y": None}, r"y: the batch gives NoneType, but"),
    (
        "unknown",
        {**example.batch(), "mask": torch.ones(8)},
        r"mask: the program was compiled without this input, f32\[8\]\n  fix: leave it out",
    ),
    (
        "misspelt",
        {"x": example.batch()["x"], "yy": torch.ones(8)},
        r"yy: the program was compiled without this input, f32\[8\]\n  fix: name it 'y'",
    ),
    (
        "another name",
        {"x": example.batch()["x"], "label": example.batch()["y"]},
        r"label: the program was compiled without this input, f64\[8, 4\]\n  fix: name it 'y'",
    ),
    (
        "one sample",
        {name: x[0] for name, x in example.batch().items()},
        r"(?s)y: the batch gives f64\[4\].*this is one sample, not a batch: let DataLoader\(dataset, batch_size=8\)",
    ),
    (
        "a tuple",
        tuple(example.batch().values()),
        r"^batch: the batch is a tuple, and the program was compiled for a dict {x, y}\n  fix: .*collate_fn",
    ),
    ("a tensor", example.batch()["x"], r"^batch: the batch is a Tensor, and .* for a dict {x, y}"),
    (
        "a name, of a loop over a dict",
        "x",
        r"^batch: the batch is the text 'x', and .*\n  fix: a loop over a dict .*\[batch\]",
    ),
    (
        "a tensor of tensors",
        {**example.batch(), "x": torch.nested.nested_tensor([torch.ones(2, 4)], layout=torch.jagged)},
        r"^x: a NestedTensor is not a plain tensor\n  fix: pass a torch.Tensor",
    ),
    ("nothing", None, "^batch: the batch is None, and the program was compiled for a dict {x, y}"),
    (
        "a list of numbers",
        {**example.batch(), "y": torch.zeros(8, 4).tolist()},
        r"^y: the batch gives a list or dict of others, but .* for f64\[8, 4\]\n  fix: make it a tensor: torch.tensor",
    ),
    (
        "numbers of samples, as default_collate turns them",
        {**example.batch(), "y": list(torch.zeros(4, 8, dtype=torch.float64))},
        r"^y: the batch gives a list or dict of 4 tensors, such as f64\[8\], but .* for f64\[8, 4\]\n"
        r"  fix: make each sample a tensor .* default_collate[^\n]*$",
    ),
    (
        "an array",
        {**example.batch(), "y": np.zeros((8, 4))},
        r"^y: the batch gives ndarray, but .*\n  fix: make it a tensor: torch.from_numpy",
    ),
]


@pytest.mark.parametrize(("batch", "text"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_wrong_batch_is_named(batch: Any, text: str) -> None:
    with pytest.raises(ShardcError, match=text):
        example.program().engine(example.Model()).step(batch)


def test_all_that_is_wrong_with_a_batch_is_said_at_once() -> None:
    with pytest.raises(ShardcError) as caught:
        example.program().engine(example.Model()).step({"x": torch.zeros(1), "z": torch.zeros(1)})
    assert [e.where for e in caught.value.errors] == ["z", "x", "y"]


def test_a_whole_batch_where_a_part_is_asked_for() -> None:
    def work(engine: Engine) -> None:
        engine.step(example.batch(), local=True)

    with pytest.raises(
        ShardcError,
        match=r"compiled for f64\[4, 6\] on each rank\n  fix: this is the whole batch: cut this rank's part",
    ):
        on_ranks(2, 1, work)


def test_an_entry_that_is_none_is_not_looked_at() -> None:
    loss = example.program().engine(example.Model()).step({**example.batch(), "name": None})
    torch.testing.assert_close(loss, example.reference()[0], rtol=1e-12, atol=0)


# --- module


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
    return {k: x.chunk(mesh.size("dp"))[mesh.coordinate("dp")] for k, x in example.batch().items()}


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_a_module_in_ones_own_loop_equals_one_device(dp: int, tp: int) -> None:
    model = example.Model()
    want = loop(model, example.batch(), 3)
    state = model.state_dict()
    program = example.program(dp, tp)

    def work(mesh: LoopbackMesh) -> tuple[Tensor, dict[str, Tensor]]:
        module = program.module(example.Model(), mesh=mesh)
        return loop(module, part_of(mesh), 3), dict(module.state_dict())

    layouts = {n: p.layout for p in program.params for n in (p.fqn, *p.aliases)}
    for rank, (loss, local) in enumerate(loopback(program.mesh, work)):
        torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
        coords = program.mesh.coords(rank)
        close(local, {n: layouts[n].local(x, program.mesh, coords) if n in layouts else x for n, x in state.items()})


def test_a_modules_names_are_the_models() -> None:
    module, model = example.program().module(example.Model()), example.Model()
    assert module.state_dict().keys() == model.state_dict().keys()
    assert dict(module.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert module.get_parameter("tied.scale") is module.get_parameter("scale")
    assert "rank 0 of dp=1 × tp=1" in repr(module)
    module.load_state_dict(model.state_dict())


def grads_of(module: ShardedModule) -> dict[str, Tensor]:
    return {n: p.grad.as_subclass(torch.Tensor).clone() for n, p in module.named_parameters() if p.grad is not None}


def test_gradients_accumulate_over_backwards() -> None:
    program = example.program(2, 2)

    def work(mesh: LoopbackMesh) -> None:
        module = program.module(example.Model(), mesh=mesh)
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
    module = example.program().module(example.Model())
    buckets = module._running.buckets
    loss = module(**example.batch())
    loss.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    module.zero_grad()
    buckets.start()  # as if it had failed further on
    assert buckets.active
    module(**example.batch()).backward()
    assert not buckets.active
    grads = example.reference()[1]
    close(grads_of(module), grads)


def test_a_modules_mode_and_gradients_can_be_switched() -> None:
    module = example.program(dropout=0.5).module(example.Model(), seed=3)
    first, second = module(**example.batch()), module(**example.batch())
    assert float((first - second).detach().abs()) > 1e-6  # new masks every time
    running = module.get_buffer("running").clone()
    assert running.any()
    module.eval()
    with torch.no_grad():
        loss = module(**example.batch())
    assert not loss.requires_grad
    assert torch.equal(module.get_buffer("running"), running)
    torch.testing.assert_close(loss, example.reference()[0], rtol=1e-12, atol=0)


def test_a_module_is_called_like_the_model() -> None:
    module = example.program().module(example.Model())
    b = example.batch()
    losses = [float(loss.detach()) for loss in (module(**b), module(b["x"], b["y"]), module(b["x"], y=b["y"]))]
    assert losses == losses[:1] * 3
    with pytest.raises(ShardcError, match=r"y: the batch does not have it \(it has x\)"):
        module(b["x"])


def test_the_whole_state_on_the_first_rank_alone() -> None:
    program = example.program(2, 1)

    def work(mesh: LoopbackMesh) -> dict[str, Tensor]:
        return Engine(program, example.Model(), mesh=mesh).full_state_dict(rank0_only=True)

    first, other = loopback(program.mesh, work)
    assert first.keys() == example.Model().state_dict().keys()
    assert other == {}
