"""Process groups of worlds of any size, and the device that each process takes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime import launch
from shardc.runtime.mesh import TorchMesh, local_device, presence
from shardc.runtime.mesh.local_device import local_device as device_of_this_process
from shardc.runtime.mesh.local_device import share_no_gpu
from tests import warm


def groups_of_16384(_: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    layout = Mesh.of({"pp": 16, "dp": 128, "tp": 8})
    dist.init_process_group("fake", store=FakeStore(), rank=777, world_size=layout.world)
    made, new_group = [], dist.new_group
    dist.new_group = lambda ranks, **how: made.append((how["group_desc"], len(ranks))) or new_group(ranks, **how)
    TorchMesh(layout, [("dp", "tp"), ("tp",)], lines=("pp",))
    assert sorted(made) == [("dp", 128), ("dp+tp", 1024), ("pp", 16), ("pp down", 16), ("pp up", 16), ("tp", 8)]


def test_a_mesh_of_16384_ranks_makes_one_group_a_set_of_axes() -> None:
    """Not one for each group that the mesh has: those are 4,225 here, and each call takes the whole world along."""
    warm.ranks(groups_of_16384, world=1)


def uneven(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=4)
    if rank < 2:  # a group of the user's own, that the others do not know
        dist.new_group([0, 1], use_local_synchronization=True)
    mesh = TorchMesh(Mesh.of({"pp": 4}), [("pp[0,3]",), ("pp[1,2]",)], lines=("pp",))
    for axes in (("pp",), ("pp[0,3]",) if rank in (0, 3) else ("pp[1,2]",)):
        ranks = mesh.layout.group(rank, axes)
        assert mesh.all_reduce(torch.tensor([rank]), axes).item() == sum(ranks)
    dist.destroy_process_group()


def test_processes_that_have_other_groups_of_their_own_meet(tmp_path: Path) -> None:
    mp.start_processes(uneven, (str(tmp_path),), nprocs=4, start_method="fork")


def listens(rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    mesh = TorchMesh(Mesh.of({"dp": 2}), timeout=timedelta(seconds=50))
    addresses = {
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path("/proc/net", table).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    }
    assert addresses == {f"0100007F:{port:04X}"}
    mesh.barrier()
    mesh.close()
    TorchMesh(Mesh.of({"dp": 2})).close()  # the port is this process's still


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
def test_the_store_of_one_machine_listens_to_it_alone() -> None:
    warm.ranks(listens, launch.free_port(), world=2)


@pytest.mark.parametrize("axes", [("dp",), ("tp",), ("dp", "tp"), ("pp", "tp"), ("pp[0,2]",), ("dp", "pp[1,2]"), ()])
def test_groups_of_a_mesh_are_those_of_its_ranks(axes: tuple[str, ...]) -> None:
    mesh = Mesh.of({"pp": 3, "dp": 2, "tp": 2})
    on = [r for r in range(mesh.world) if mesh.on(r, axes)]
    assert mesh.groups(axes) == list(dict.fromkeys(mesh.group(r, axes) for r in on))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


class Machine:
    """A process that believes to see so many GPUs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def sees(self, gpus: int, *, local_rank: int = 0, ranks: int = 1, world: str = "") -> None:
        """world: the backends of a process group that exists already."""
        self.patch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        self.patch.setattr(torch.cuda, "device_count", lambda: gpus)
        self.patch.setenv("LOCAL_RANK", str(local_rank))
        self.patch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        if world:
            self.patch.setattr(dist, "is_initialized", lambda: True)
            self.patch.setattr(dist, "get_backend_config", lambda: world)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "ranks", "world", "asked", "chosen"),
    [
        (0, 3, 4, "", None, "cpu"),
        (8, 3, 8, "", None, "cuda:3"),
        (1, 3, 8, "", None, "cuda:0"),  # one visible GPU a task
        (8, 0, 1, "", None, "cuda:0"),
        (8, 0, 1, "", "cuda:5", "cuda:5"),
        (8, 2, 4, "", "cuda", "cuda:2"),
        (8, 2, 4, "", "cpu", "cpu"),
        (8, 2, 8, "cpu:gloo,cuda:nccl", None, "cuda:2"),  # a plain init_process_group()
        (8, 2, 8, "cuda:nccl", None, "cuda:2"),
        (0, 2, 8, "cpu:gloo", None, "cpu"),
        (1, 0, 1, "cpu:fake,cuda:fake", "cuda", "cuda:0"),
    ],
)
def test_each_process_takes_its_own_device(
    machine: Machine, gpus: int, local_rank: int, ranks: int, world: str, asked: str | None, chosen: str
) -> None:
    machine.sees(gpus, local_rank=local_rank, ranks=ranks, world=world)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device_of_this_process(asked) == torch.device(chosen)


@pytest.mark.parametrize(
    ("gpus", "ranks", "world", "asked", "error"),
    [
        (4, 8, "", None, "this machine runs 8 ranks, but has 4 GPUs\n  fix: start 4 processes here"),
        (4, 4, "", "cuda:7", "there is no GPU 7: this process sees 4\n  fix: name a GPU"),
        (0, 1, "", "cuda", "there is no GPU 0: this process sees none"),
        (4, 4, "cuda:nccl", "cpu", "no backend for cpu tensors: it has {'cuda': 'nccl'}\n  fix: call"),
    ],
)
def test_a_device_that_cannot_be_had_is_refused(
    machine: Machine, gpus: int, ranks: int, world: str, asked: str | None, error: str
) -> None:
    machine.sees(gpus, ranks=ranks, world=world)
    with pytest.raises(ShardcError) as e:
        device_of_this_process(asked)
    assert error in str(e.value)


def test_gpus_that_stay_idle_are_told(machine: Machine) -> None:
    machine.sees(8, ranks=8, world="cpu:gloo,cuda:gloo")
    with pytest.warns(UserWarning, match="CUDA is available but not used: the process group sends over gloo"):
        assert device_of_this_process() == torch.device("cpu")


def test_two_processes_on_one_gpu_are_refused(machine: Machine) -> None:
    class Properties:
        uuid = "GPU-7"

    machine.sees(1, ranks=2, local_rank=1)
    machine.patch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    store = dist.HashStore()
    store.set("shardc/gpu/4", "GPU-7")  # the machine's first process is rank 4 of the world
    with pytest.raises(ShardcError, match=r"ranks 4, 5 use the same GPU \(cuda:0, GPU-7\)\n  fix: start one process"):
        share_no_gpu(store, 5, local_device.local_device())


def test_a_process_that_is_forked_does_not_keep_connections_open() -> None:
    with presence.not_inherited():
        ours, peer = socket.socketpair()
    done, wait = multiprocessing.Pipe()
    forked = multiprocessing.get_context("fork").Process(target=wait.recv)
    forked.start()
    ours.close()
    peer.settimeout(5)
    assert peer.recv(1) == b"", "the other side sees the end"
    peer.close()
    done.send("end")
    forked.join()
