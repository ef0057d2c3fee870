"""A world that is joined: NCCL with one rank, which is what one GPU allows; gloo with two on the CPU."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardc
from shardc.ir.mesh import Mesh
from shardc.runtime import launch
from shardc.runtime.mesh import TorchMesh
from tests import warm, zoo

TIMEOUT = timedelta(seconds=77)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def world(device: str) -> int:
    return 1 if device == "cuda" else 2


def joins(rank: int, ranks: int, port: int, device: str) -> None:
    torch.set_num_threads(1)
    if device == "cpu":  # also where there is a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def collectives(rank: int, device: str, port: int) -> None:
    n = world(device)
    joins(rank, n, port, device)
    mesh = TorchMesh(Mesh.of({"dp": n}), device=device, timeout=TIMEOUT)
    assert mesh.device.type == device
    if n == 1:
        mesh._groups[frozenset()] = dist.group.WORLD  # the product sends nothing to a rank alone; here it is to
    axes = ("dp",)
    backend: Any = dist.group.WORLD._get_backend(mesh.device)
    assert backend.options._timeout == TIMEOUT
    if device == "cuda":
        assert dist.get_backend() == "nccl"
        assert backend.options.is_high_priority_stream
        part = mesh._split_world([(0,)], "dp+tp")  # what larger meshes call for each set of axes
        assert part.group_desc == "dp+tp"
        assert part._get_backend(mesh.device).options._timeout == TIMEOUT
        dist.all_reduce(torch.ones(3, device=mesh.device), group=part)
    for dtype in DTYPES:

        def of(r: int, *shape: int, dtype: torch.dtype = dtype) -> Tensor:
            """What rank r has."""
            return (torch.arange(torch.Size(shape).numel()).view(shape) + 10 * r).to(mesh.device, dtype)

        def same(x: Tensor, *expected: Tensor) -> None:
            assert x.device == mesh.device
            assert torch.equal(x.reshape(-1), torch.cat([e.reshape(-1) for e in expected]))

        total = sum((of(r, n, 3) for r in range(1, n)), of(0, n, 3))
        mine = of(rank, n, 3)
        for background in (False, True):
            for op, expected in (("sum", total), ("max", of(n - 1, n, 3))):
                flat = mine.view(-1).clone()
                mesh._all_reduce(flat, axes, op, "", background).wait()
                same(flat, expected)
            whole, part, into = of(0, n * n * 3), of(0, 3), of(0, n, 3)
            mesh._all_gather(mine.view(-1), whole, "dp", "", background).wait()
            same(whole, *(of(r, n, 3) for r in range(n)))
            for rows in ([], [1] * n):
                mesh._all_to_all(mine, into.zero_(), (rows, rows), axes, "", background).wait()
                same(into, *(of(r, n, 3)[rank] for r in range(n)))
            mesh._reduce_scatter(mine.view(-1).clone(), part, "dp", "", background).wait()
            same(part, total[rank])
            own = mine.view(-1).clone()  # in place, as buckets do
            mesh._reduce_scatter(own, own[3 * rank : 3 * rank + 3], "dp", "", background).wait()
            same(own[3 * rank : 3 * rank + 3], total[rank])
        same(mesh.broadcast(mine), of(0, n, 3))
        # what programs call
        same(mesh.all_reduce(mine, axes), total)
        same(mesh.all_gather(mine, "dp"), *(of(r, n, 3) for r in range(n)))
        same(mesh.all_to_all(mine, "dp"), *(of(r, n, 3)[rank] for r in range(n)))
        same(mesh.reduce_scatter(mine, "dp"), total[rank])
    if device == "cuda":
        recorded(mesh)
    assert mesh.sum_on_host([1, rank]) == [n, sum(range(n))]
    mesh.barrier()
    mesh.close()
    assert not dist.is_initialized()


def recorded(mesh: TorchMesh) -> None:
    """NCCL's work in a CUDA graph, as `execution: {graphs: true}` records it."""
    x, whole, part = (torch.zeros(6, device=mesh.device) for _ in range(3))

    def sends() -> None:
        works = [mesh._all_gather(x, whole, "dp", "", True), mesh._reduce_scatter(whole, part, "dp", "", True)]
        works.append(mesh._all_reduce(part, ("dp",), "sum", "", True))
        for work in works:
            work.wait()

    sends()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        sends()
    x.fill_(3)
    assert part.sum() == 0
    graph.replay()
    assert torch.equal(part, x)


def trains(rank: int, device: str, port: int, folder: str) -> None:
    """Engine and module, against the plain model on the same device."""
    n = world(device)
    joins(rank, n, port, device)
    with zoo.Wide():
        model, batch = zoo.gpt()
        program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": n}}, prove=False)
        model.to(device)
        loss = model(**{k: v.to(device) for k, v in batch.items()})[0]
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    close = {"rtol": 1e-9, "atol": 1e-12}
    engine = program.engine(model, lambda ps: torch.optim.SGD(ps, lr=0.0), norm=True)
    assert engine.mesh.device.type == device
    assert dist.get_backend() == ("nccl" if device == "cuda" else "gloo")
    for _ in range(2):
        torch.testing.assert_close(engine.step(batch), loss.detach(), **close)
    for p in program.params:
        torch.testing.assert_close(engine.params[p.name].grad, grads[p.fqn], **close)
    norms = torch.stack([g.norm() for g in grads.values() if g is not None])
    torch.testing.assert_close(engine.grad_norm, norms.norm(), **close)
    engine.save(folder)
    engine.load(folder)
    module = program.module(model, mesh=engine.mesh)
    part = {k: v.to(device) for k, v in program.local(batch, rank).items()}
    own = module(**part)
    own.backward()
    torch.testing.assert_close(own.detach(), loss.detach(), **close)
    found = dict(module.named_parameters())
    for p in program.params:
        torch.testing.assert_close(found[p.fqn].grad, grads[p.fqn], **close)
    engine.close()
    assert not dist.is_initialized()


def test_all_collectives(device: str) -> None:
    warm.ranks(collectives, device, launch.free_port(), world=world(device))


def test_engine_and_module(device: str, tmp_path: Path) -> None:
    warm.ranks(trains, device, launch.free_port(), str(tmp_path), world=world(device))
