"""The same equality on real processes: GPT and Llama over gloo, 2 and 4 ranks, loaded from the artifact as `shardc run`
does.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import shardc
from shardc.capture import default_loss
from shardc.errors import ShardcError
from shardc.runtime import launch, state
from shardc.runtime.mesh.torch_mesh import ONE_SHOT
from shardc.runtime.stage.communicators import runtime_mesh
from tests import warm, zoo
from tests.test_equal import reference, spec_of


def work(rank: int, world: int, port: int, name: str, folder: str) -> None:
    """One rank: a step without update, the gradients put together, written by rank 0."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with zoo.Wide():  # the rotary tables too
        model, batch = zoo.ALL[name]()
    program = shardc.load(Path(folder) / "program")
    engine = program.engine(model, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    loss = engine.step(batch)
    grads = {}
    for p in program.params:
        grad = engine.params[p.name].grad
        assert grad is not None
        grads[p.fqn] = state.gather(grad, p.layout, engine.mesh)
    if rank == 0:
        torch.save({"loss": loss, "grads": grads}, Path(folder) / "result.pt")
    engine.close()
    if sys.platform == "linux":  # gloo's threads have ended: see TorchMesh.close
        assert not [t for t in Path("/proc/self/task").iterdir() if "gloo" in (t / "comm").read_text()]


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_real_processes_equal_one_device(name: str, mesh: dict[str, int], tmp_path: Path) -> None:
    model, batch, loss, grads = reference(name)
    with zoo.Wide():
        program = shardc.compile(model, batch, spec_of(name, mesh, sequence=mesh == {"dp": 2, "tp": 2}), prove=False)
    equal(program, name, loss, grads, tmp_path)


@pytest.mark.parametrize("overlap", ["microbatches", "forwards"])
def test_real_processes_run_two_microbatches_side_by_side(overlap: str, tmp_path: Path) -> None:
    model, batch, loss, grads = reference("gpt")
    with zoo.Wide():
        spec = spec_of("gpt", {"dp": 1, "tp": 2}, sequence=True)
        side = {"batch": {"microbatches": 4}, "execution": {"overlap": overlap}}
        program = shardc.compile(model, batch, {**spec, **side}, prove=False)
    assert program.pairs
    equal(program, "gpt", loss, grads, tmp_path)


def equal(program: shardc.Program, name: str, loss: Tensor, grads: dict[str, Tensor], tmp_path: Path) -> None:
    program.save(tmp_path / "program")
    world = program.mesh.world
    run = functools.partial(work, world=world, port=launch.free_port(), name=name, folder=str(tmp_path))
    warm.ranks(_positional, run, world=world)
    found = torch.load(tmp_path / "result.pt")
    assert abs(float(found["loss"] - loss)) <= 1e-12 * abs(float(loss))
    floor = 1e-3 * float(torch.stack([g.norm() for g in grads.values()]).norm())
    for fqn, g in grads.items():
        assert float((found["grads"][fqn] - g).norm()) <= 1e-12 * max(float(g.norm()), floor), fqn


def _positional(rank: int, run: functools.partial[None]) -> None:
    run(rank)


def leaves_the_loop(rank: int, port: int, folder: str) -> None:
    """A loop of a user's own around a module, which rank 1 breaks out of."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 4), torch.ones(4, 4)
    program = shardc.compile(model, x, {"shardc": 1, "mesh": {"dp": 2}}, loss=lambda output, _: output.square().mean())
    module = program.module(model)
    try:
        for step in range(3):
            if rank == 1 and step == 2:
                break
            module(module.local(x)).backward()
    except ShardcError as e:
        (Path(folder) / "said").write_text(str(e))
    os._exit(0)  # as the process of a rank that has nothing left to do


def test_a_rank_that_breaks_out_of_a_loop_of_ones_own_is_named(tmp_path: Path) -> None:
    """The others wait for it in their next forward."""
    warm.ranks(leaves_the_loop, launch.free_port(), str(tmp_path), world=2)
    said = (tmp_path / "said").read_text()
    assert said.startswith("forward 3 of the module: rank 1 (dp=1) was killed, or ended without an error"), said


def fails_with_another_engine(rank: int, port: int, folder: str) -> None:
    """A rank's batch has a bad id while the engine of an earlier phase is there still: its mesh has the same groups."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    model = torch.nn.Embedding(8, 4)
    ids = torch.arange(8)
    program = shardc.compile(model, ids, {"shardc": 1, "mesh": {"dp": 2}}, loss=lambda y, _: y.square().mean())
    before = program.engine(model)
    before.step(ids)
    engine = program.engine(model)
    bad = torch.tensor([*range(7), 9])
    said = []
    for batch in (bad, ids):
        try:
            engine.step(batch)
        except ShardcError as e:
            said.append(str(e))
    said.append(str(torch.isfinite(torch.tensor(float(program.engine(model).step(ids))))))
    (Path(folder) / f"said{rank}").write_text("\n---\n".join(said))
    os._exit(0)


def test_a_rank_that_fails_beside_another_engine_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    """And the engine then says so in every step; a new one trains."""
    warm.ranks(fails_with_another_engine, launch.free_port(), str(tmp_path), world=2)
    first, second = ((tmp_path / f"said{rank}").read_text().split("\n---\n") for rank in range(2))
    assert first[0].startswith("step 1: rank 1 (dp=1) failed in step 1: OutOfRangeError"), first[0]
    assert "the connections of the ranks ended before: rank 1 (dp=1) failed" in first[1]
    assert "the connections of the ranks ended before: this rank failed in step 1: OutOfRangeError" in second[1]
    assert "make a new one, program.engine(...)" in first[1]
    assert first[2] == second[2] == "tensor(True)"


def writes_while_gathering(rank: int, port: int, folder: str) -> None:
    """Rank 1 begins to send late, so that rank 0 writes to its place while the gather waits for it: of few bytes, and
    of more than go in one exchange.
    """
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    program = shardc.load(Path(folder) / "program")
    mesh = runtime_mesh(program)
    found = []
    for each in (3, ONE_SHOT // 4):
        whole = torch.full((2 * each,), -1.0)
        mine = whole[each * rank : each * (rank + 1)].fill_(float(rank))
        mesh.barrier()
        time.sleep(0.3 * rank)
        gather = mesh.start_all_gather(mine, whole, "dp")
        mine.fill_(7.0 + rank)
        gather.wait()
        found.append(whole[::each].tolist())
    torch.save(found, Path(folder) / f"whole-{rank}.pt")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64):
        for shape in ((), (0,), (3, 5), (2**18,)):
            parts = [torch.arange(math.prod(shape)).add(r).remainder(2).view(shape).to(dtype) for r in range(2)]
            assert torch.equal(mesh.all_gather(parts[rank], "dp"), torch.stack(parts))
    mesh.close()


def test_what_is_written_while_a_gather_is_under_way_stays(tmp_path: Path) -> None:
    model, batch = zoo.mlp()
    shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}}).save(tmp_path / "program")
    warm.ranks(writes_while_gathering, launch.free_port(), str(tmp_path), world=2)
    for zero, one in zip(*(torch.load(tmp_path / f"whole-{rank}.pt") for rank in range(2)), strict=True):
        assert zero[0] == 7.0
        assert one[1] == 8.0
        assert zero[1] in (1.0, 8.0)
        assert one[0] in (0.0, 7.0)


def clamps(rank: int, port: int, folder: str) -> None:
    """Weights are clamped after each step, and their average is evaluated by, written in their place for a while."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with zoo.Wide():
        model, batch = zoo.gpt()
    program = shardc.load(Path(folder) / "program")
    engine = program.engine(model, optimizer=lambda params: torch.optim.SGD(params, lr=0.5))
    losses = []
    for _ in range(6):
        losses.append(engine.step(batch))
        with torch.no_grad():
            for p in engine.params.values():
                p.clamp_(-0.05, 0.05)
            kept = [p.clone() for p in engine.params.values()]
            for p in engine.params.values():
                p.mul_(0.5)
        losses.append(engine.evaluate(batch))
        with torch.no_grad():
            for p, was in zip(engine.params.values(), kept, strict=True):
                p.copy_(was)
    if rank == 0:
        torch.save(losses, Path(folder) / "losses.pt")
    engine.close()


@pytest.mark.parametrize("zero", [1, 2])
def test_parameters_may_be_written_to_at_once_after_a_step(zero: int, tmp_path: Path) -> None:
    with zoo.Wide():
        model, batch = zoo.gpt()
        spec = {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": zero}}
        shardc.compile(model, batch, spec, prove=False).save(tmp_path / "program")
        plain = model.train()
        want = []
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
        for _ in range(6):
            loss = default_loss(plain(**batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            want.append(loss.detach())
            with torch.no_grad():
                for p in plain.parameters():
                    p.clamp_(-0.05, 0.05)
                half = {n: 0.5 * p for n, p in plain.named_parameters()}
                want.append(default_loss(torch.func.functional_call(plain, half, kwargs=batch)))
    warm.ranks(clamps, launch.free_port(), str(tmp_path), world=2)
    torch.testing.assert_close(torch.load(tmp_path / "losses.pt"), want, rtol=1e-12, atol=1e-14)


def sets_and_updates(rank: int, port: int, folder: str) -> None:
    """Norms and a clipping that is set, alike; then clipping that differs, and an update of one rank alone."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 4), torch.ones(4, 4)
    spec = {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": 1}}
    program = shardc.compile(model, x, spec, loss=lambda output, _: output.square().mean())
    engine = program.engine(model)
    engine.set(clip_norm=0.5)
    engine.step(x)
    said = [json.dumps(engine.norms())]
    engine.backward(x)
    for act in (lambda: engine.update() if rank else engine.step(x), lambda: engine.set(clip_norm=rank + 1.0)):
        try:
            act()
        except ShardcError as e:
            said.append(str(e).splitlines()[0])
    weights = engine.full_state_dict()
    said.append(json.dumps({n: float(w.double().norm()) for n, w in weights.items()}))
    engine.update()
    with pytest.raises(ShardcError, match="must be a positive number or None, not 0"):  # on rank 0 that of rank 1
        engine.set(clip_norm=0 if rank else 0.5)
    (Path(folder) / f"said{rank}").write_text("\n".join(said))
    os._exit(0)


def test_an_update_and_a_setting_of_one_rank_alone_end_on_both(tmp_path: Path) -> None:
    warm.ranks(sets_and_updates, launch.free_port(), str(tmp_path), world=2)
    first, second = ((tmp_path / f"said{rank}").read_text().splitlines() for rank in range(2))
    assert first == second
    norms, update, waits, weights = first
    assert json.loads(norms) == pytest.approx(json.loads(weights), rel=1e-12)
    assert update.endswith("a step on rank 0, an update on rank 1")
    assert waits.startswith("engine.set: gradients of engine.backward need an update")


#: The line of the exit handler is printed last: handlers run in reverse order.
LEAVES = """
import atexit
import torch.distributed as dist
atexit.register(lambda: print("in a world:", dist.is_initialized()))
from shardc.ir.mesh import Mesh
from shardc.runtime.mesh.torch_mesh import TorchMesh
mesh = TorchMesh(Mesh((("dp", 1),)))
print("in a world:", dist.is_initialized())
"""


def test_a_script_that_ends_without_close_leaves_the_world() -> None:
    """Its threads would outlive the interpreter, and abort the process now and then."""
    world = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(launch.free_port()),
    }
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES], env=os.environ | world, capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines() == ["in a world: True", "in a world: False"]
