"""ZeRO: five steps with clipping equal one device's, at every level, on every kind of mesh, at once and in
microbatches; and what follows steps.
"""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.capture import capture
from shardc.runtime import launch, ops
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from tests import warm

ROWS, TOKENS, VOCAB, HIDDEN = 24, 5, 26, 12
STEPS = 5
CLIP = 0.05  # below every step's norm
RTOL = 1e-11  # of weights after 5 steps: noise is 1e-14, and Adam divides by small numbers

Batch = dict[str, Tensor]
State = dict[str, Tensor]


class Net(nn.Module):
    """A tied head; a frozen layer; a layer and a vector that no loss reaches; a scalar; sizes that two, three and four
    ranks do not divide.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 22), nn.Linear(22, HIDDEN, bias=False)
        self.frozen, self.unused = nn.Linear(HIDDEN, HIDDEN), nn.Linear(3, 5)
        self.odd = nn.Linear(HIDDEN, 7)
        self.back = nn.Linear(7, HIDDEN)
        self.scale, self.spare = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(7))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale
        x = x + self.frozen(x) + self.back(torch.tanh(self.odd(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-100)


@functools.cache
def model() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(step: int) -> Batch:
    """Row i has i % 5 labels that count, so that ranks and microbatches count different numbers; the first three have
    none at all.
    """
    generator = torch.Generator().manual_seed(100 + step)
    ids, targets = (torch.randint(VOCAB, (ROWS, TOKENS), generator=generator) for _ in range(2))
    for i in range(ROWS):
        targets[i, i % TOKENS if i > 3 else 0 :] = -100
    return {"ids": ids, "targets": targets}


@functools.cache
def captured() -> Program:
    return capture(model(), batch(0))


def adamw(params: Any) -> torch.optim.Optimizer:
    groups = shardc.groups(params, {"*.bias": {"weight_decay": 0.0}}, lr=1e-2, weight_decay=0.1)
    return torch.optim.AdamW(groups)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9, nesterov=True)


OPTIMIZERS = {"adamw": adamw, "sgd": sgd}


@functools.cache
def reference(optimizer: str) -> tuple[list[float], list[float], State]:
    """(losses, norms before clipping, weights) of plain PyTorch."""
    plain = copy.deepcopy(model())
    made = OPTIMIZERS[optimizer]([(n, p) for n, p in plain.named_parameters() if p.requires_grad])
    losses, norms = [], []
    for step in range(STEPS):
        made.zero_grad()
        loss = plain(**batch(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), CLIP)))
        made.step()
        losses.append(float(loss.detach()))
    assert min(norms) > CLIP
    return losses, norms, {n: x.detach() for n, x in plain.state_dict().items()}


def spec(mesh: dict[str, int], zero: int, microbatches: int = 1, **data: Any) -> dict[str, Any]:
    shard = {"embed": "vocab", "up": "column", "down": "row"} if "tp" in mesh else {}
    found = {"shardc": 1, "mesh": mesh, "shard": shard, "batch": {"microbatches": microbatches}}
    return found | {
        "data": {"zero": zero, "bucket_mb": 0.001, **data}
    }  # 131 numbers: many buckets, and weights larger than one


def program(mesh: dict[str, int], zero: int, microbatches: int = 1, **data: Any) -> Program:
    return shardc.compile(model(), batch(0), spec(mesh, zero, microbatches, **data), captured=copy.deepcopy(captured()))


def check(state: State, optimizer: str) -> None:
    want = reference(optimizer)[2]
    assert state.keys() == want.keys()
    off = {n: float((state[n] - x).norm() / x.norm()) for n, x in want.items()}
    assert not {n: e for n, e in off.items() if not e <= RTOL}


def train(p: Program, optimizer: str) -> State:
    def work(mesh: LoopbackMesh) -> tuple[list[float], list[float], State]:
        engine = p.engine(model(), OPTIMIZERS[optimizer], mesh=mesh, clip_norm=CLIP)
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(float(engine.step(batch(step))))
            assert engine.grad_norm is not None
            norms.append(float(engine.grad_norm))
        return losses, norms, engine.full_state_dict()

    ranks = loopback(p.mesh, work)
    losses, norms, state = ranks[0]
    assert losses == pytest.approx(reference(optimizer)[0], rel=1e-12)
    assert norms == pytest.approx(reference(optimizer)[1], rel=1e-11)
    for other in ranks[1:]:
        assert other[:2] == (losses, norms)
        assert all(torch.equal(other[2][n], x) for n, x in state.items())
    check(state, optimizer)
    return state


MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp3": ({"dp": 3}, {}),
    "dp2xtp2": ({"dp": 2, "tp": 2}, {}),
    "hybrid": ({"dp_outer": 2, "dp": 2}, {"axis": ["dp_outer", "dp"]}),
}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_steps_equal_one_device(mesh: str, zero: int) -> None:
    """AdamW at once and SGD in microbatches, or the other way."""
    sizes, data = MESHES[mesh]
    one, other = ("adamw", "sgd") if zero % 2 else ("sgd", "adamw")
    train(program(sizes, zero, 1, **data), one)
    train(program(sizes, zero, 2 if sizes == {"dp": 3} else 3, **data), other)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_pipelines(zero: int) -> None:
    """Two stages, which share the tied weight."""
    made = spec({"pp": 2, "dp": 2}, zero, 3) | {"pipeline": {"axis": "pp", "cut": ["norm"], "schedule": "1f1b"}}
    train(shardc.compile(model(), batch(0), made, captured=copy.deepcopy(captured())), "sgd" if zero % 2 else "adamw")


@pytest.mark.parametrize("how", [{"keep": True}, {"prefetch": 0}, {"prefetch": 3}], ids=str)
def test_when_parameters_are_gathered(how: dict[str, Any]) -> None:
    """Kept over microbatches, here also of a pipeline; one ahead of their use, none, several."""
    train(program({"dp_outer": 2, "dp": 2}, 3, 3, axis=["dp_outer", "dp"], **how), "adamw")
    made = spec({"pp": 2, "dp": 2}, 3, 3, **how) | {"pipeline": {"axis": "pp", "cut": ["norm"], "schedule": "1f1b"}}
    train(shardc.compile(model(), batch(0), made, captured=copy.deepcopy(captured())), "sgd")


def ahead(p: Program) -> list[int]:
    """How many buckets are under way, or whole and not used yet, when each bucket is waited for."""
    started, found = 0, []
    for n in p.stages[0].graph.nodes:
        started += n.target is ops.gather_start
        if n.target is ops.gather_wait:
            started -= 1
            found.append(started)
    return found


def test_prefetch_stands_in_the_program() -> None:
    for depth in (0, 1, 3):
        p = program({"dp": 2}, 3, prefetch=depth)
        assert max(ahead(p)) == max(depth - 1, 0)
        graph = list(p.stages[0].graph.nodes)
        first = next(i for i, n in enumerate(graph) if n.target is ops.gather_wait)
        behind = sum(n.target is ops.gather_start for n in graph[first : first + 1 + depth])
        assert behind == min(depth, 1)  # right after it is there, the next one goes
        assert f"{depth} bucket" in str(p)


def test_words_about_gathers_need_parameters_that_are_gathered() -> None:
    for said in ({"keep": True}, {"prefetch": 2}):
        with pytest.raises(
            shardc.ShardcError,
            match=f"`{next(iter(said))}` needs zero: 3, which gathers parameters; this spec has zero: 2",
        ):
            program({"dp": 2}, 2, **said)


@pytest.mark.parametrize(("zero", "keep"), [(2, False), (3, False), (3, True)])
def test_recomputation(zero: int, keep: bool) -> None:
    """Forward runs again in backward, on parameters that are gathered for it."""
    made = spec({"dp": 2}, zero, 3, **({"keep": True} if keep else {})) | {
        "checkpoint": [{"match": "{up,odd,norm}", "save": []}]
    }
    p = shardc.compile(model(), batch(0), made, captured=copy.deepcopy(captured()))
    assert len(p.regions) == 3
    train(p, "adamw")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_loop_of_ones_own(zero: int) -> None:
    """`program.module`: the optimizer works on stretches; weights that were updated, or loaded, are what the next
    forward uses.
    """
    p = program({"dp": 2}, zero)
    half = ROWS // 2

    def work(mesh: LoopbackMesh) -> tuple[list[float], State]:
        module = p.module(model(), mesh=mesh)
        first = copy.deepcopy(module.state_dict())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9, nesterov=True)
        losses = []
        for step in range(3):
            part = {k: x[mesh.rank * half : (mesh.rank + 1) * half] for k, x in batch(step).items()}
            optimizer.zero_grad()
            loss = module(**part)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        module.eval()
        part = {k: x[mesh.rank * half : (mesh.rank + 1) * half] for k, x in batch(0).items()}
        with torch.no_grad():
            losses.append(float(module(**part)))
            module.load_state_dict(first)
            losses.append(float(module(**part)))
        return losses, {}

    plain = copy.deepcopy(model())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9, nesterov=True)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = plain(**batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        losses += [float(plain(**batch(0))), losses[0]]
    for found, _ in loopback(p.mesh, work):
        assert found == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("zero", [1, 3])
def test_evaluation_changes_nothing(zero: int) -> None:
    """Between steps, and between the halves of a step."""
    p = program({"dp": 2}, zero, 3)

    def work(mesh: LoopbackMesh) -> tuple[float, State]:
        engine = p.engine(model(), sgd, mesh=mesh, clip_norm=CLIP)
        for step in range(STEPS):
            before = float(engine.evaluate(batch(step)))
            loss = float(engine.backward(batch(step)))
            assert before == pytest.approx(loss, rel=1e-13)
            engine.evaluate(batch(7))
            engine.update()
        return 0.0, engine.full_state_dict()

    for _, state in loopback(p.mesh, work):
        check(state, "sgd")


#: (mesh, zero, microbatches) of the run that saves, and of the one that goes on
MOVES = [
    (({"dp": 4}, 3, 1), ({"dp": 2, "tp": 2}, 1, 3)),
    (({"dp": 2, "tp": 2}, 2, 1), ({"dp": 3}, 3, 2)),
    (({"dp_outer": 2, "dp": 2}, 3, 1), ({"dp": 1}, 0, 4)),
    (({"dp": 2}, 0, 1), ({"dp_outer": 2, "dp": 2}, 2, 1)),
]


@pytest.mark.parametrize(
    ("first", "second"), MOVES, ids=lambda m: f"zero {m[1]} on {','.join(f'{a}{n}' for a, n in m[0].items())}"
)
def test_checkpoints_go_from_any_level_to_any(first: Any, second: Any, tmp_path: Path) -> None:
    """Two steps here, three there: the weights are those of five steps on one device, momentum and all."""

    def work(mesh: LoopbackMesh, p: Program, steps: range) -> State:
        engine = p.engine(model(), adamw, mesh=mesh, clip_norm=CLIP)
        if steps.start:
            engine.load(tmp_path / "saved")
        for step in steps:
            engine.step(batch(step))
        engine.save(tmp_path / "saved")
        return engine.full_state_dict()

    for (mesh, zero, microbatches), steps in ((first, range(2)), (second, range(2, STEPS))):
        data = {"axis": ["dp_outer", "dp"]} if "dp_outer" in mesh else {}
        p = program(mesh, zero, microbatches, **data)
        ranks = loopback(p.mesh, functools.partial(work, p=p, steps=steps))
    for state in ranks:
        check(state, "adamw")


# --- real processes

REAL: dict[str, tuple[dict[str, int], int, int, dict[str, Any]]] = {
    "zero 1 dp2 microbatches": ({"dp": 2}, 1, 4, {}),
    "zero 2 dp2 x tp2": ({"dp": 2, "tp": 2}, 2, 1, {}),
    "zero 3 hybrid microbatches": ({"dp_outer": 2, "dp": 2}, 3, 3, {"axis": ["dp_outer", "dp"]}),
}


def process(rank: int, port: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    for i, name in enumerate(names):
        p = shardc.load(Path(folder) / name)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(p.mesh.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port + i),
        }
        engine = p.engine(model(), adamw, clip_norm=CLIP)
        for step in range(STEPS):
            engine.step(batch(step))
        state = engine.full_state_dict()
        if rank == p.mesh.world - 1:
            torch.save(state, Path(folder) / name / "state.pt")
        engine.close()


@pytest.mark.parametrize("world", [2, 4])
def test_real_processes_equal_one_device(world: int, tmp_path: Path) -> None:
    names = []
    for name, (mesh, zero, microbatches, data) in REAL.items():
        p = program(mesh, zero, microbatches, **data)
        if p.mesh.world == world:
            p.save(tmp_path / name)
            names.append(name)
    warm.ranks(process, launch.free_port(), str(tmp_path), names, world=world)
    for name in names:
        check(torch.load(tmp_path / name / "state.pt"), "adamw")
