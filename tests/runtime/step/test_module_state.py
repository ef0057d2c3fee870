"""State of a loop of one's own: checkpoints of program.module and its optimizer, and slices that another rank loads."""

from __future__ import annotations

import copy
import functools
import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner

import shardc
from shardc.errors import ShardcError
from shardc.runtime.mesh.base import Work
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.module import ShardedModule
from tests.runtime.step.small import BATCH, NORMED, NormedNet

OTHER = NormedNet()
SPECS: dict[str, dict[str, Any]] = {
    "one": {"mesh": {"dp": 1}},
    "dp": {"mesh": {"dp": 2}},
    "tp": {"mesh": {"tp": 2}, "shard": {"use": "structure"}},
    "zero 1": {"mesh": {"dp": 2}, "data": {"zero": 1}},
    "zero 2": {"mesh": {"dp": 2}, "data": {"zero": 2}},
    "zero 3": {"mesh": {"dp": 2}, "data": {"zero": 3}},
}


@functools.cache
def compiled(name: str) -> shardc.Program:
    return shardc.compile(copy.deepcopy(NORMED), BATCH, {"shardc": 1, **SPECS[name]}, prove=False)


def made(mesh: LoopbackMesh, name: str, model: nn.Module = NORMED) -> tuple[ShardedModule, torch.optim.Optimizer]:
    module = ShardedModule(compiled(name), model, mesh=mesh)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)


def train(module: ShardedModule, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(**module.local(BATCH)).backward()
        optimizer.step()


def files(mesh: LoopbackMesh, module: ShardedModule, shared: dict[int, bytes]) -> dict[int, bytes]:
    """What torch.save makes of each rank's state_dict."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    shared[mesh.rank] = file.getvalue()
    mesh.barrier()
    return shared


@pytest.mark.parametrize("name", ["tp", "zero 1", "zero 3"])
def test_another_ranks_slices_are_refused(name: str) -> None:
    """Rank 0 saves, all load: by a file, which keeps the note, and by tensors alone."""
    shared: dict[int, bytes] = {}

    def work(mesh: LoopbackMesh) -> None:
        module, _ = made(mesh, name)
        saved = {rank: torch.load(io.BytesIO(x)) for rank, x in files(mesh, module, shared).items()}
        module.load_state_dict(saved[mesh.rank])
        other, _ = made(mesh, name)
        other.load_state_dict({k: v.clone() for k, v in saved[mesh.rank].items()})
        other(**other.local(BATCH))
        if mesh.rank == 1:
            with pytest.raises(ShardcError, match=r"the slices of rank 0: .*\n  fix: save with module.save") as e:
                module.load_state_dict(saved[0])
            assert "where this rank has" in e.value.what
            assert torch.equal(module.state_dict()["up.weight"], saved[1]["up.weight"]), "nothing has changed"
        mesh.barrier()
        if name == "tp":  # stretches have several lengths
            module.load_state_dict(dict(saved[0]))
            with pytest.raises(ShardcError, match="all ranks loaded the same values into parameters of which"):
                module(**module.local(BATCH))

    loopback(compiled(name).mesh, work)


def test_one_weight_that_one_rank_has_a_slice_of() -> None:
    """All ranks load it, whatever each has of it, and go on."""

    def work(mesh: LoopbackMesh) -> None:
        module, _ = made(mesh, "zero 1")
        own = module.state_dict()
        for name in own:
            module.load_state_dict({name: own[name].clone()}, strict=False)
            module(**module.local(BATCH))

    loopback(compiled("zero 1").mesh, work)


def test_whole_weights_of_another_rank_are_loaded() -> None:
    shared: dict[int, bytes] = {}

    def work(mesh: LoopbackMesh) -> None:
        module, _ = made(mesh, "dp")
        saved = {rank: torch.load(io.BytesIO(x)) for rank, x in files(mesh, module, shared).items()}
        module.load_state_dict(saved[1 - mesh.rank])
        module(**module.local(BATCH))

    loopback(compiled("dp").mesh, work)


@pytest.mark.parametrize(("name", "other"), [("tp", "zero 1"), ("zero 3", "tp"), ("dp", "one"), ("one", "zero 2")])
def test_a_loop_goes_on_from_its_checkpoint_on_another_mesh(name: str, other: str, tmp_path: Path) -> None:
    reference = copy.deepcopy(NORMED)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        reference(**BATCH).backward()
        optimizer.step()

    def first(mesh: LoopbackMesh) -> None:
        module, optimizer = made(mesh, name)
        train(module, optimizer, 2)
        module.save(tmp_path, optimizer, extra={"epoch": 3})

    def second(mesh: LoopbackMesh) -> dict[str, Tensor]:
        module, optimizer = made(mesh, other, OTHER)
        with pytest.raises(ShardcError):
            module.load(tmp_path, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        assert module.load(tmp_path, optimizer) == {"epoch": 3}
        train(module, optimizer, 2)
        return module.full_state_dict()

    def engine(mesh: LoopbackMesh) -> dict[str, Tensor]:
        made = Engine(compiled(name), OTHER, lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-3), mesh=mesh)
        made.load(tmp_path)
        made.step(BATCH)
        made.step(BATCH)
        return made.full_state_dict()

    loopback(compiled(name).mesh, first)
    for states in (loopback(compiled(other).mesh, second), loopback(compiled(name).mesh, engine)):
        for state in states:
            torch.testing.assert_close(state, dict(reference.state_dict()), rtol=1e-4, atol=2e-4)


class LateMesh(LoopbackMesh):
    """Gathers whose bytes come when somebody waits for them, as of a network."""

    def _all_gather(self, part: Tensor, whole: Tensor, axis: str, tag: str, background: bool) -> Work:
        got = torch.empty_like(whole)
        super()._all_gather(part, got, axis, tag, background)
        return Work(then=lambda: (whole.copy_(got), None)[1])


@pytest.mark.parametrize("name", ["zero 1", "zero 2", "zero 3"])
def test_gathers_in_the_background_are_no_updates(name: str) -> None:
    """Ranks would disagree on whether parameters changed: their bytes come at other times."""

    def work(mesh: LoopbackMesh) -> None:
        late = LateMesh(mesh.layout, mesh.rank, mesh._world) if mesh.rank else mesh
        module, optimizer = made(late, name)
        train(module, optimizer, 2)
        module.full_state_dict()
        train(module, optimizer, 1)
        module.eval()
        module(**module.local(BATCH))
        module(**module.local(BATCH))

    loopback(compiled(name).mesh, work)


@pytest.mark.parametrize("name", ["tp", "zero 1", "zero 3"])
@pytest.mark.parametrize("before", [False, True], ids=["guarded", "before its first step"])
def test_an_optimizers_state_of_another_rank_is_refused(name: str, before: bool) -> None:
    """Rank 0 saves `optimizer.state_dict()`, all load: into one that has stepped, and into a new one."""
    shared: dict[int, bytes] = {}

    def work(mesh: LoopbackMesh) -> None:
        module, optimizer = made(mesh, name)
        train(module, optimizer, 1)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        shared[mesh.rank] = file.getvalue()
        mesh.barrier()
        if before:
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)
        optimizer.load_state_dict(torch.load(io.BytesIO(shared[mesh.rank])))
        train(module, optimizer, 1)
        assert not any("shardc" in group for group in optimizer.param_groups)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3) if before else optimizer
        wrong = r"AdamW.load_state_dict: .*: this is the state of the slices of rank 0: .*, where this rank has"
        with pytest.raises(ShardcError, match=wrong) if mesh.rank else nullcontext():
            optimizer.load_state_dict(torch.load(io.BytesIO(shared[0])))
            optimizer.step()

    loopback(compiled(name).mesh, work)


def test_the_whole_models_optimizer_state_is_refused() -> None:
    plain = copy.deepcopy(NORMED)
    of_plain = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plain(**BATCH).backward()
    of_plain.step()

    def work(mesh: LoopbackMesh) -> None:
        module, optimizer = made(mesh, "tp")
        optimizer.load_state_dict(copy.deepcopy(of_plain.state_dict()))
        module(**module.local(BATCH)).backward()
        with pytest.raises(ShardcError, match=r"up.weight: this is state of the whole parameter \[16, 8\], of which"):
            optimizer.step()

    loopback(compiled("tp").mesh, work)


def test_an_engines_optimizer_refuses_the_state_of_another_rank() -> None:
    shared: dict[int, dict[str, Any]] = {}

    def several(params: Any) -> list[torch.optim.Optimizer]:
        pairs = list(params)
        return [torch.optim.AdamW(pairs[:2]), torch.optim.SGD(pairs[2:], lr=0.1, momentum=0.9)]

    def work(mesh: LoopbackMesh) -> None:
        engine = Engine(compiled("tp"), NORMED, several, mesh=mesh)
        engine.step(BATCH)
        assert engine.optimizer is not None
        shared[mesh.rank] = copy.deepcopy(engine.optimizer.state_dict())
        mesh.barrier()
        engine.optimizer.load_state_dict(shared[mesh.rank])
        engine.step(BATCH)
        if mesh.rank == 1:
            with pytest.raises(ShardcError, match=r"slices of rank 0: \[0:8, 0:8\].*\n  fix: save with engine.save"):
                engine.optimizer.load_state_dict(shared[0])

    loopback(compiled("tp").mesh, work)


@pytest.mark.parametrize("name", ["tp", "zero 1", "zero 3"])
def test_torchs_own_checkpoints_of_parts_are_refused(name: str) -> None:
    """torch.distributed.checkpoint would write one rank's part for the whole. Its planner is asked on each rank."""

    def planned(state: Any) -> int:
        planner = DefaultSavePlanner()
        planner.set_up_planner({"state": dict(state)}, is_coordinator=True)
        return len(planner.create_local_plan().items)

    def work(mesh: LoopbackMesh) -> None:
        module, optimizer = made(mesh, name)
        train(module, optimizer, 1)
        assert planned(module.full_state_dict()) == 9
        for state in (module.state_dict(), dict(module.named_parameters()), optimizer.state_dict()):
            with pytest.raises(ShardcError, match=r"torch\.distributed\.checkpoint would treat as the whole"):
                planned(state)
        copied = copy.deepcopy(module.state_dict())
        torch.save(copied, io.BytesIO())
        torch.save(copy.deepcopy(optimizer.state_dict()), io.BytesIO())

    loopback(compiled(name).mesh, work)


def test_torchs_own_checkpoints_of_replicas_are_planned() -> None:
    def work(mesh: LoopbackMesh) -> None:
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(made(mesh, "dp")[0].state_dict()), is_coordinator=True)
        assert len(planner.create_local_plan().items) == 9

    loopback(compiled("dp").mesh, work)


def test_a_fused_optimizer_over_tp_goes_on_after_a_load(tmp_path: Path) -> None:
    """It is tried on parts of its state, whose strides its kernel takes for the parameter's."""

    def work(mesh: LoopbackMesh) -> None:
        module, _ = made(mesh, "tp")
        first, second = (torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True) for _ in range(2))
        train(module, first, 2)
        module.save(tmp_path / "saved", first)
        module.load(tmp_path / "saved", second)
        train(module, second, 1)

    loopback(compiled("tp").mesh, work)
