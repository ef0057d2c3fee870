"""Offload: the step is the unoffloaded one bit for bit; what is moved is not in memory; files come and go with their
owners.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import functools
import gc
import json
import os
import re
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.capture import capture
from shardc.errors import ShardcError
from shardc.runtime import launch
from shardc.runtime.mesh import allocator
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.offload import storage
from shardc.runtime.offload.copies import Mover
from shardc.runtime.offload.storage import Files
from shardc.runtime.step.engine import Engine
from shardc.runtime.zero.paged_optimizer import check_separable
from tests import warm
from tests.bench import offload as bench

M_MMAP_THRESHOLD = -3  # malloc.h
BUCKET_MB = 0.002  # some 500 numbers: several buckets, and several pages


class Net(nn.Module):
    """A tied head, a frozen layer, a layer that no loss reaches, a scalar, and sizes that ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.up, self.down, self.norm = nn.Linear(16, 37), nn.Linear(37, 16, bias=False), nn.LayerNorm(16)
        self.frozen, self.unused = nn.Linear(16, 16), nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale
        logits = F.linear(self.frozen(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


@functools.cache
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@functools.cache
def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(31, (8, 6), generator=generator) for _ in range(2))
    return {"ids": ids, "targets": targets.index_fill(0, torch.tensor([1, 6]), -100)}


@functools.cache
def captured() -> Program:
    return capture(model(), batch())


def program(mesh: dict[str, int], offload: dict[str, str], zero: int = 3, **sections: Any) -> Program:
    data = {"zero": zero, "bucket_mb": BUCKET_MB, "offload": offload, **sections.pop("data", {})}
    return shardc.compile(
        model(), batch(), {"shardc": 1, "mesh": mesh, "data": data, **sections}, captured=copy.deepcopy(captured())
    )


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


Result = dict[str, Tensor]


def train(p: Program, make: Any = adamw, *, staged: bool = False, clip: float | None = 0.1) -> Result:
    """Losses, also of evaluations in between, and the state after 3 steps. staged: copies to the device are made, as on
    a GPU.
    """

    def work(mesh: LoopbackMesh) -> Result:
        engine = Engine(p, model(), make, mesh=mesh, clip_norm=clip)
        if staged:
            engine._model.offload.mover.in_place = False
        losses = []
        for _ in range(3):
            losses += [engine.evaluate(batch()), engine.step(batch())]
        assert engine.step_count == 3
        found = {"losses": torch.stack(losses), **engine.full_state_dict()}
        engine.close()
        return found

    return loopback(p.mesh, work)[0]


def same(a: Result, b: Result) -> None:
    assert a.keys() == b.keys()
    assert [n for n in a if not torch.equal(a[n], b[n])] == []


TP = {"shard": {"up": "column", "down": "row"}, "uneven": "pad"}
HALF = {"precision": {"compute": "bfloat16"}}
FLOAT16 = {"precision": {"compute": "float16", "loss_scale": "dynamic"}}
PIPELINE = {"pipeline": {"axis": "pp", "cut": ["frozen"], "schedule": "gpipe"}, "batch": {"microbatches": 2}}
HYBRID = {"data": {"axis": ["dp_outer", "dp"]}}
CASES: list[tuple[dict[str, int], int, dict[str, Any]]] = [
    ({"dp": 2}, 0, {}),
    ({"dp": 2}, 1, {}),
    ({"dp": 2}, 2, HALF),
    ({"dp": 3}, 3, {"uneven": "pad"}),
    ({"dp": 2}, 3, HALF),
    ({"dp": 2}, 1, FLOAT16),
    ({"dp": 2, "tp": 2}, 3, TP),
    ({"dp_outer": 2, "dp": 2}, 3, HYBRID),
    ({"dp": 2}, 3, {"batch": {"microbatches": 2}}),
    ({"tp": 2}, 0, TP),
    ({"dp": 1}, 0, {}),
    ({"pp": 2, "dp": 2}, 3, PIPELINE),
]


@pytest.mark.parametrize(("mesh", "zero", "sections"), CASES, ids=[f"{m}-{z}-{','.join(s)}" for m, z, s in CASES])
def test_bit_for_bit(mesh: dict[str, int], zero: int, sections: dict[str, Any], tmp_path: Path) -> None:
    folder = str(tmp_path / "x")
    want = train(program(mesh, {}, zero, **copy.deepcopy(sections)))
    moved = {"optimizer": folder, "parameters": folder} if zero == 3 else {"optimizer": folder}
    p = program(mesh, moved, zero, **copy.deepcopy(sections))
    same(train(p), want)
    same(train(p, staged=True), want)
    assert list((tmp_path / "x").iterdir()) == []  # closed


@pytest.mark.parametrize(
    "offload", [{"optimizer": "cpu"}, {"parameters": "cpu"}, {"optimizer": "cpu", "parameters": "."}]
)
def test_each_by_itself(offload: dict[str, str], tmp_path: Path) -> None:
    offload = {what: place.replace(".", str(tmp_path)) for what, place in offload.items()}
    want = train(program({"dp": 2}, {}))
    same(train(program({"dp": 2}, offload)), want)
    same(train(program({"dp": 2}, offload), staged=True), want)


def test_one_device_gathers_from_outside(tmp_path: Path) -> None:
    """The norm adds up in another order there, by buckets, so without clipping."""
    p = program({"dp": 1}, {"parameters": str(tmp_path), "optimizer": str(tmp_path)})
    assert any(b.zero == 3 for b in p.buckets)
    same(train(p, clip=None), train(program({"dp": 1}, {}), clip=None))


class Counting(torch.optim.Optimizer):
    """Keeps a count of steps in its group, a strided state, and one that grows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                    state["all"] = torch.cat([state.get("all", p.new_zeros(0)), p.grad.reshape(-1)[:1]])
                    p.sub_(group["lr"] / group["steps"] * state["sum"] + state["all"].sum())


def grouped(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(shardc.groups(params, {"*.bias": {"lr": 0.3}}), lr=0.1, momentum=0.9, nesterov=True)


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    grouped,
    Counting,
    torch.optim.Adagrad,
    torch.optim.Adafactor,
    lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True, foreach=True),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_any_optimizer_whose_parameters_do_not_meet(make: Any, tmp_path: Path) -> None:
    same(train(program({"dp": 2}, {"optimizer": str(tmp_path)}, 0), make), train(program({"dp": 2}, {}, 0), make))


class Normalised(torch.optim.SGD):
    """Scales every update by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        total = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        for p in params:
            p.sub_(p.grad / total)  # type: ignore[arg-type]


def test_optimizers_that_cannot_step_in_pages_are_refused() -> None:
    w = nn.Parameter(torch.ones(4))
    with pytest.raises(ShardcError, match="the optimizer Normalised updates parameters together, not separately") as e:
        check_separable(Normalised([w]))
    assert (e.value.errors[0].where, "data.offload" in e.value.errors[0].fix) == ("data.offload", True)
    with pytest.raises(
        ShardcError,
        match=r"LBFGS cannot be tried on a small sample \(.*\), so it is unknown whether it may step some parameters",
    ):
        check_separable(torch.optim.LBFGS([w]))
    assert torch.equal(w, torch.ones(4))


def test_a_step_that_fails_leaves_pages_where_they_belong(tmp_path: Path) -> None:
    """The optimizer raises at its second page; the run then goes on with everything in its place."""
    p = program({"dp": 1}, {"optimizer": str(tmp_path), "parameters": str(tmp_path)})
    engine = p.engine(model(), adamw)
    engine._model.offload.mover.in_place = False
    engine.step(batch())
    assert engine.optimizer is not None
    members = [list(g["params"]) for g in engine.optimizer.param_groups]
    homes = {q: q.data_ptr() for q in engine._model.offload.homes}
    real, calls = engine.optimizer.step, [0]

    def failing(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("no luck")
        real(*args)

    engine.optimizer.step = failing  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no luck"):
        engine.step(batch())
    assert all(q.data_ptr() == at for q, at in homes.items())
    assert [
        [a is b for a, b in zip(g["params"], m, strict=True)]
        for g, m in zip(engine.optimizer.param_groups, members, strict=True)
    ]
    assert all(mapped(x, tmp_path) for s in engine.optimizer.state.values() for x in s.values() if x.dim())
    with pytest.raises(ShardcError, match="an update or a load failed halfway"):
        engine.step(batch())
    engine.close()


def of_a_process(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    engine = program({"dp": 2}, {"optimizer": folder, "parameters": folder}).engine(model(), adamw, clip_norm=0.1)
    losses = []
    for _ in range(3):
        losses += [engine.evaluate(batch()), engine.step(batch())]
    found = {"losses": torch.stack(losses), **engine.full_state_dict()}
    if rank == 0:
        torch.save(found, f"{folder}.pt")
    engine.close()


def test_gloo_processes(tmp_path: Path) -> None:
    """Two summands have one order only: bit for bit what loopback gives."""
    warm.ranks(of_a_process, launch.free_port(), str(tmp_path / "x"), world=2)
    same(torch.load(tmp_path / "x.pt", weights_only=True), train(program({"dp": 2}, {})))
    assert list((tmp_path / "x").iterdir()) == []


# --- checkpoints


@pytest.mark.parametrize("staged", [False, True])
def test_checkpoints_do_not_know_it(staged: bool, tmp_path: Path) -> None:
    folder = str(tmp_path / "x")
    plain, away = program({"dp": 2}, {}), program({"dp": 2}, {"optimizer": folder, "parameters": folder})

    def run(p: Program, load: str, save: str) -> Result:
        def work(mesh: LoopbackMesh) -> Result:
            engine = Engine(p, model(), adamw, mesh=mesh)
            if p is away:
                engine._model.offload.mover.in_place = not staged
            if load:
                engine.evaluate(batch())  # reads ahead what is old then
                engine.load(tmp_path / load)
            losses = [engine.step(batch()) for _ in range(2)]
            engine.save(tmp_path / save)
            losses.append(engine.step(batch()))
            if p is away:
                assert engine.optimizer is not None
                assert all(
                    mapped(x, tmp_path)
                    for s in engine.optimizer.state.values()
                    for x in s.values()
                    if x.dim() and x.numel()
                )
            found = {"losses": torch.stack(losses), **engine.full_state_dict()}
            engine.close()
            return found

        return loopback(p.mesh, work)[0]

    same(run(away, "", "a"), run(plain, "", "b"))
    want = run(plain, "b", "c")
    same(run(away, "a", "d"), want)
    same(run(away, "b", "e"), want)
    same(run(plain, "a", "f"), want)


# --- memory


def stretches(folder: Path) -> list[range]:
    """The addresses where files of the folder are mapped."""
    lines = [x for x in Path("/proc/self/maps").read_text().splitlines() if str(folder) in x]
    return [range(*(int(n, 16) for n in x.split()[0].split("-"))) for x in lines]


def mapped(x: Tensor, folder: Path) -> bool:
    """Does the tensor lie in a file of the folder?"""
    return any(x.data_ptr() in r for r in stretches(folder))


def held(folder: Path) -> int:
    """Bytes of all tensors that have come since `gc.freeze()`, and are in no file of the folder."""
    gc.collect()
    away = stretches(folder)
    storages = {x.untyped_storage().data_ptr(): x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)}
    return sum(
        x.untyped_storage().nbytes()
        for x in storages.values()
        if x.device.type == "cpu" and not any(x.data_ptr() in r for r in away)
    )


def test_what_is_moved_is_not_held(tmp_path: Path) -> None:
    """Of 16 bytes a number (parameter, gradient, two moments) 4 are left: the gradients."""
    wide = {"rows": 4, "width": 64, "layers": 8}
    folder = str(tmp_path)
    nbytes = 4 * wide["layers"] * wide["width"] ** 2
    x = (torch.randn(wide["rows"], wide["width"]),)
    found = {}
    for name, offload in bench.ways(folder).items():
        spec = {"shardc": 1, "mesh": {"dp": 1}, "data": {"zero": 3, "bucket_mb": 0.02, "offload": offload}}
        p = shardc.compile(bench.Deep(wide["width"], wide["layers"]), x, spec, prove=False)
        gc.collect()
        gc.freeze()
        engine = p.engine(lambda: bench.Deep(wide["width"], wide["layers"]), adamw)
        for _ in range(2):
            engine.step(x)
        found[name] = round(held(tmp_path) / nbytes, 1)
        engine.close()
        del engine
    assert found == {
        "nothing": 4.0,
        "optimizer on the cpu": 4.0,
        "optimizer in files": 2.0,
        "optimizer and parameters in files": 1.0,
    }


def test_at_most_two_pages_are_on_the_device(tmp_path: Path) -> None:
    p = program({"dp": 1}, {"optimizer": str(tmp_path)}, 0)
    engine = p.engine(model(), adamw)
    engine._model.offload.mover.in_place = False
    engine.step(batch())
    assert engine.optimizer is not None
    state, real, seen = engine.optimizer.state, engine.optimizer.step, []

    def watched() -> None:
        away = [
            q
            for q in state
            if "exp_avg" in state[q] and state[q]["exp_avg"].dim() and not mapped(state[q]["exp_avg"], tmp_path)
        ]
        assert {id(q) for q in away} == {id(q) for g in engine.optimizer.param_groups for q in g["params"] if q.dim()}  # type: ignore[union-attr]
        seen.append(sum(q.nbytes for q in away))
        real()

    engine.optimizer.step = watched  # type: ignore[method-assign,assignment]
    engine.step(batch())
    assert len(seen) > 2
    assert max(seen) <= max(BUCKET_MB * 2**20, *(q.nbytes for q in engine.params.values()))
    engine.close()


def peak_of(folder: Path, offload: dict[str, str]) -> dict[str, Any]:
    warm.ranks(write_peak, folder / "peak.json", offload, world=1)
    found: dict[str, Any] = json.loads((folder / "peak.json").read_text())
    return found


def write_peak(rank: int, file: Path, offload: dict[str, str]) -> None:
    """Train 16 MiB of parameters. Memory that is freed goes back at once, as in the benchmark's processes."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    file.write_text(json.dumps(bench.one(width=512, layers=16, rows=8, steps=1, bucket_mb=1, offload=offload)))


def test_peak_memory_falls_by_what_is_moved(tmp_path: Path) -> None:
    """The system's own count, of a process each: all that is in memory, mapped pages included, over whole steps."""
    offload = {"optimizer": str(tmp_path), "parameters": str(tmp_path)}
    plain, away = peak_of(tmp_path, {}), peak_of(tmp_path, offload)
    assert plain["loss"] == away["loss"]
    # of 3, parameters and two moments; the rest is pages in work, which vary by 2 MiB from run to run
    assert plain["peak"] - away["peak"] > 2.4 * plain["params"], (plain, away)


# --- files


def files(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


def hold_files(folder: str, connection: Any) -> None:
    held = Files(folder, 7, "")
    connection.send("held")
    connection.recv()
    held.close()


def test_files_go_with_their_owner(tmp_path: Path) -> None:
    """A living owner's file stays; a killed one's is removed by who comes next; what is not ours is left alone."""
    (tmp_path / "notes.txt").touch()
    end, theirs = warm.context().Pipe()
    other = warm.context().Process(target=hold_files, args=(str(tmp_path), theirs))
    other.start()
    assert end.recv() == "held"
    assert [f"-{other.pid}-rank7-" in n for n in files(tmp_path)] == [False, True]
    mine = Files(str(tmp_path), 0, "")
    x = mine.slot(100).take(torch.zeros(10))
    x += 1
    assert len(files(tmp_path)) == 3
    other.kill()
    other.join()
    assert len(files(tmp_path)) == 3
    second = Files(str(tmp_path), 1, "")
    assert [re.sub(".*-([0-9]+-rank[0-9]+)-.*", r"\1", n) for n in files(tmp_path)] == [
        "notes.txt",
        f"{os.getpid()}-rank0",
        f"{os.getpid()}-rank1",
    ]
    mine.close()
    mine.close()
    del second  # dropped without a word
    gc.collect()
    assert files(tmp_path) == ["notes.txt"]
    assert x.tolist() == [1.0] * 10  # who holds it reads on


def test_a_file_holds_many_slots_and_strides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_CHUNK", 2**14)
    place = Files(str(tmp_path), 0, "")
    kept = []
    for i in range(9):
        slot = place.slot(
            storage.room_of(like := [torch.rand(7, 300 * (i + 1)).t(), torch.rand(3).half(), torch.rand(0)])
        )
        for x in like:
            kept.append((slot.take(x).copy_(x), x))
            assert kept[-1][0].stride() == x.stride()
        slot.release()
        slot.prefetch()
    assert all(torch.equal(a, b) for a, b in kept)
    place.close()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    p = program({"dp": 1}, {"parameters": str(tmp_path / "file" / "x")})
    with pytest.raises(ShardcError, match=r"cannot write to the directory .*/file/x: Not a directory") as e:
        p.engine(model(), adamw)
    assert e.value.errors[0].where == "data.offload.parameters"
    assert "every rank may write to" in e.value.errors[0].fix


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found before anything is moved: the engine's state is as the optimizer left it."""

    def full(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = program({"dp": 1}, {"optimizer": str(tmp_path)}).engine(model(), adamw)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ShardcError, match=r"has no room for [\d,]+ more bytes \([\d,]+ are free\): No space left on device"
    ) as e:
        engine.step(batch())
    assert (e.value.errors[0].where, "larger disk" in e.value.errors[0].fix) == ("data.offload.optimizer", True)
    monkeypatch.undo()
    engine.close()


# --- what the user sees


def test_the_program_says_it(tmp_path: Path) -> None:
    p = program({"dp": 2}, {"optimizer": "/scratch/x", "parameters": "cpu"})
    line = "# offload: optimizer state in files of /scratch/x; parameters' parts on the cpu"
    assert line in str(p).splitlines()
    p.save(tmp_path / "out")
    assert line in str(shardc.load(tmp_path / "out")).splitlines()
    assert "# offload" not in str(program({"dp": 2}, {}))


def test_a_module_has_no_offload() -> None:
    with pytest.raises(ShardcError, match=r"offload needs an engine, .* a module does not step the optimizer") as e:
        program({"dp": 1}, {"optimizer": "cpu"}, 0).module(model())
    assert "program.engine" in e.value.errors[0].fix


def test_parameters_need_a_data_axis() -> None:
    with pytest.raises(ShardcError, match="the mesh has no data axis over which parameters are gathered") as e:
        program({"tp": 2}, {"parameters": "cpu"}, **TP)
    assert "dp: 1 is enough" in e.value.errors[0].fix


def test_nothing_is_made_where_nothing_is_asked() -> None:
    found = program({"dp": 1}, {}).engine(model(), adamw)._model.offload
    assert (found.places, found.homes, found._mover) == ({}, {}, None)


def write_faults(_: int, of: str, file: Path) -> None:
    """Pages that a process gets anew in ten rounds of making and freeing 64 MiB, after `of` was called."""
    torch.ones(1 << 24)
    getattr(allocator, of)()
    for i in range(11):
        if i == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(1 << 24)
    file.write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_is_kept_or_returned(tmp_path: Path) -> None:
    for of in ("return_freed", "keep_freed"):
        warm.ranks(write_faults, of, tmp_path / of, world=1)
    returned, kept = (int((tmp_path / of).read_text()) for of in ("return_freed", "keep_freed"))
    assert returned > 5 * kept


def test_the_thread_that_moves_stays_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's threads begin on GPU 0, and would keep a context there."""
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: chosen.append((threading.current_thread().name, d)))
    mover = Mover(torch.device("cuda:3"))
    assert mover._thread.submit(lambda: threading.current_thread().name).result() == "offload_0"
    assert chosen == [("offload_0", torch.device("cuda:3"))]
