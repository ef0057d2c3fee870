"""Both meshes give the same results; loopback turns every way of getting stuck into an error that names the ranks."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import CommRecord
from shardc.runtime.mesh import RankMesh, TorchMesh
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.mesh.torch_mesh import _check_world
from tests import warm

GRID = Mesh((("dp", 2), ("tp", 2)))


def number(mesh: RankMesh, *shape: int) -> Tensor:
    """A tensor that tells its rank and its elements apart."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 100 * mesh.rank


def every_collective(mesh: RankMesh) -> None:
    """Run every raw collective over each axis, and over all of them, and compare with what the ranks must hold."""
    names = mesh.layout.names
    for axis in names:
        ranks = mesh.layout.group(mesh.rank, (axis,))
        n, i = mesh.size(axis), mesh.coordinate(axis)
        x = number(mesh, n, 3)
        each = torch.stack([x - 100 * mesh.rank + 100 * r for r in ranks])
        torch.testing.assert_close(mesh.all_gather(x, axis), each, rtol=0, atol=0)
        torch.testing.assert_close(mesh.all_gather(x.t(), axis), each.transpose(1, 2), rtol=0, atol=0)
        torch.testing.assert_close(mesh.reduce_scatter(x, axis), each.sum(0)[i], rtol=0, atol=0)
        torch.testing.assert_close(mesh.all_to_all(x, axis), each[:, i], rtol=0, atol=0)
        torch.testing.assert_close(mesh.all_reduce(x, (axis,), op="max"), each.amax(0), rtol=0, atol=0)
        torch.testing.assert_close(x, number(mesh, n, 3), rtol=0, atol=0)  # arguments are left alone
    total = (
        number(mesh, 4) * mesh.layout.world - 100 * mesh.rank * mesh.layout.world + 100 * sum(range(mesh.layout.world))
    )
    torch.testing.assert_close(mesh.all_reduce(number(mesh, 2, 2).t(), names), total.reshape(2, 2).t(), rtol=0, atol=0)
    flat = number(mesh, 4)
    mesh.start_all_reduce(flat, names).wait()
    torch.testing.assert_close(flat, total, rtol=0, atol=0)
    each = torch.stack([torch.rand(70, generator=torch.Generator().manual_seed(r)) for r in range(mesh.layout.world)])
    in_order = functools.reduce(torch.add, each)  # of few bytes: every rank rounds alike, in the order of the ranks
    assert torch.equal(mesh.all_reduce(each[mesh.rank], names), in_order)
    many = number(mesh, 70_000)
    mesh.start_all_reduce(many, names).wait()
    torch.testing.assert_close(many, sum(number(mesh, 70_000) - 100 * mesh.rank + 100 * r for r in range(len(each))))
    mesh.barrier()


@pytest.mark.parametrize(
    "layout", [Mesh((("a", n),)) for n in (1, 2, 3, 4)] + [GRID, Mesh((("a", 2), ("b", 3), ("c", 2)))], ids=str
)
def test_loopback_computes_every_collective(layout: Mesh) -> None:
    loopback(layout, every_collective)


def gloo(rank: int, folder: str, layout: Mesh) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(layout.world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(layout.world),
    }
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=layout.world
    )
    mesh = TorchMesh(layout, [("dp", "tp")], record=True)
    every_collective(mesh)
    assert not mesh.owner
    kinds = [r.kind for r in mesh.records]
    assert kinds.count("all_gather") == 4
    assert kinds.count("reduce_scatter") == 2
    torch.distributed.destroy_process_group()


def test_gloo_processes_compute_every_collective(tmp_path: Path) -> None:
    warm.ranks(gloo, str(tmp_path), GRID, world=4)


def test_what_ran_is_recorded_with_the_bytes_of_the_whole_tensor() -> None:
    def work(mesh: LoopbackMesh) -> list[CommRecord]:
        x = torch.zeros(2, 3)  # 24 bytes
        mesh.all_reduce(x, ("dp", "tp"), tag="sum")
        mesh.all_gather(x, "tp", direction="backward", tag="whole")
        mesh.reduce_scatter(x, "tp")
        mesh.all_to_all(x, "dp")
        mesh.start_all_reduce(x, ("dp",), tag="bucket0")
        return mesh.records

    want = [
        CommRecord("all_reduce", ("dp", "tp"), 24, "forward", "sum"),
        CommRecord("all_gather", ("tp",), 48, "backward", "whole"),
        CommRecord("reduce_scatter", ("tp",), 24, "forward"),
        CommRecord("all_to_all", ("dp",), 24, "forward"),
        CommRecord("all_reduce", ("dp",), 24, "backward", "bucket0"),
    ]
    assert loopback(GRID, work) == [want] * 4
    assert want[0].axis == "dp+tp"


def test_a_group_of_one_rank_sends_and_records_nothing() -> None:
    layout = Mesh((("dp", 1), ("tp", 2)))

    def work(mesh: LoopbackMesh) -> int:
        x = torch.ones(1, 3)
        assert torch.equal(mesh.all_reduce(x, ("dp",)), x)
        assert torch.equal(mesh.all_gather(x, "dp"), x[None])
        assert torch.equal(mesh.reduce_scatter(x, "dp"), x[0])
        assert torch.equal(mesh.all_to_all(x, "dp"), x)
        return len(mesh.records)

    assert loopback(layout, work) == [0, 0]


def test_sums_repeat_bit_for_bit_and_are_the_same_on_all_ranks() -> None:
    parts = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 7)[:, None]
    runs = [loopback(Mesh((("a", 7),)), lambda mesh: mesh.all_reduce(parts[mesh.rank], ("a",))) for _ in range(5)]
    assert all(torch.equal(x, runs[0][0]) for run in runs for x in run)


def test_sixty_four_ranks() -> None:
    layout = Mesh((("dp", 4), ("cp", 4), ("tp", 4)))
    sums = loopback(layout, lambda mesh: float(mesh.all_reduce(torch.tensor(float(mesh.rank)), layout.names)))
    assert sums == [2016.0] * 64


def fails(work: Any, layout: Mesh = GRID) -> BaseException:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        loopback(layout, work)
    return caught.value


def test_the_first_error_is_raised_with_its_rank() -> None:
    def work(mesh: LoopbackMesh) -> None:
        if mesh.rank == 2:
            raise ValueError("my own words")
        mesh.all_reduce(torch.ones(1), ("dp", "tp"))

    error = fails(work)
    assert isinstance(error, ValueError)
    assert str(error) == "my own words"
    assert getattr(error, "__notes__", ["on rank 2 of 4 (dp=1, tp=0)"]) == ["on rank 2 of 4 (dp=1, tp=0)"]


def test_ranks_in_different_collectives_are_named() -> None:
    def kinds(mesh: LoopbackMesh) -> None:
        x = torch.ones(2)
        mesh.all_gather(x, "tp", tag="here") if mesh.coordinate("tp") else mesh.all_reduce(x, ("tp",), tag="there")

    text = str(fails(kinds, Mesh((("tp", 2),))))
    assert (
        text == "ranks meet in different collectives: rank 0: all_reduce sum there torch.float32 [2] over tp; "
        "rank 1: all_gather here torch.float32 [2] over tp"
    )
    shapes = fails(lambda mesh: mesh.all_reduce(torch.ones(1 + mesh.rank), ("tp",)), Mesh((("tp", 2),)))
    assert "torch.float32 [1] over tp; rank 1" in str(shapes)
    tags = fails(lambda mesh: mesh.all_reduce(torch.ones(1), ("tp",), tag=f"t{mesh.rank}"), Mesh((("tp", 2),)))
    assert "sum t0 " in str(tags)
    assert "sum t1 " in str(tags)


def test_a_rank_that_leaves_others_waiting_is_an_error() -> None:
    def work(mesh: LoopbackMesh) -> None:
        if mesh.rank != 3:
            mesh.all_reduce(torch.ones(1), ("dp", "tp"), tag="sum")

    text = str(fails(work))
    assert text.startswith("ranks wait for each other: rank 0: all_reduce sum sum torch.float32 [1] over dp, tp; ")
    assert text.endswith("rank 3: has ended")


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    """Each waits on the axis on which its neighbour does not come."""

    def work(mesh: LoopbackMesh) -> None:
        first, second = ("dp", "tp") if mesh.rank in (0, 3) else ("tp", "dp")
        mesh.all_reduce(torch.ones(1), (first,))
        mesh.all_reduce(torch.ones(1), (second,))

    assert "rank 0: all_reduce sum torch.float32 [1] over dp; rank 1: all_reduce sum torch.float32 [1] over tp" in str(
        fails(work)
    )


def test_a_mesh_of_another_size_than_the_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["there/train.py"])
    with pytest.raises(ShardcError, match="the mesh dp=2 × tp=2 has 4 ranks, but 1 process runs") as caught:
        TorchMesh(GRID)
    started = "start 4 processes (torchrun --nproc-per-node 4 train.py)"
    assert caught.value.fix == f"{started}, or compile with mesh={{'dp': 1, 'tp': 1}}"
    monkeypatch.setattr("sys.argv", ["bin/shardc", "run", "train.py"])
    with pytest.raises(ShardcError, match=r"`shardc run` takes one with model\(\) and batch\(\), without a loop"):
        TorchMesh(GRID)
    with pytest.raises(ShardcError) as caught:
        _check_world(Mesh(()), 2)
    assert caught.value.fix == "start 1 process, or write a mesh of 2 ranks: mesh: {dp: 2}"


def test_one_process_needs_no_process_group() -> None:
    mesh = TorchMesh(Mesh((("dp", 1),)))
    assert (mesh.rank, mesh.coordinate("dp"), mesh.device.type) == (
        0,
        0,
        "cuda" if torch.cuda.is_available() else "cpu",
    )
    mesh.barrier()
    mesh.close()
