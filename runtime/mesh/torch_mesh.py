"""Implement RankMesh as a rank of torch.distributed's world: NCCL on CUDA, gloo on the CPU."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.launch import check_variables
from shardc.runtime.mesh import presence
from shardc.runtime.mesh.agreement import check, differ, stated
from shardc.runtime.mesh.allocator import keep_freed
from shardc.runtime.mesh.base import Axes, RankMesh, Rows, Work
from shardc.runtime.mesh.local_device import backend_of, local_device, share_no_gpu
from shardc.runtime.mesh.presence import not_inherited
from shardc.runtime.mesh.watch import RankFailedError, Watch, cut_off
from shardc.runtime.time_limits import MEET_AGAIN, NAMED
from shardc.torch_private import count_groups_from, default_store, let_workers_end, process_groups

# torch 2.13 renamed these two; the old names warn there, and torch 2.11 has no new ones
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: Up to this many bytes in total, each rank sends its value to every other and adds up what it receives: one
#: message's latency, while gloo's all_reduce goes around the ranks twice (1.5 KiB: 2 ranks 0.50 ms against 0.87, 4
#: ranks on 2 cores 2.7 against 7.0; 64 KiB: 0.68 against 0.88, 2.6 against 5.7). So for a gather (2 ranks, 4 to 128
#: KiB: 0.2 to 0.3 ms against 0.3 to 0.4). NCCL makes this choice itself.
ONE_SHOT = 1 << 18

#: The meshes of this process. Meshes of one world share groups: a group stays open while any of them holds it.
_HERE: WeakSet[TorchMesh] = WeakSet()


class TorchMesh(RankMesh):
    """A rank of torch.distributed's world, with a process group for each set of axes in a program.

    layout: the mesh; its size must be the world's. axes: the sets of axes to make groups for (single axes always are).
    lines: axes along which ranks send to each other. Each gets a group for either direction: NCCL runs the sends of two
    ranks in one group one after the other, and both would wait if each sent first.
    device: "cuda" (NCCL), "cuda:1" or "cpu" (gloo); default: see shardc.runtime.mesh.local_device. timeout: after which
    a collective that some rank does not join is an error; default: torch's, 10 minutes with NCCL, 30 with gloo. watch:
    seconds after which the rank that the others wait for is named (shardc.runtime.mesh.watch); 0: never.
    Joins the world that torchrun (or `shardc run`) describes in the environment, unless a process group exists already.
    Raises ShardcError if the world has another number of ranks than the mesh, or ranks would share a GPU.
    """

    def __init__(
        self,
        layout: Mesh,
        axes: Iterable[tuple[str, ...]] = (),
        *,
        lines: Iterable[str] = (),
        device: torch.device | str | None = None,
        timeout: timedelta | None = None,
        record: bool = False,
        watch: float = NAMED,
    ) -> None:
        own_device = local_device(device)
        if own_device.type == "cuda":
            torch.cuda.set_device(own_device)
        else:
            keep_freed()  # offloading, which is set up later, changes this
        self.owner = False
        if not dist.is_initialized() and (layout.world > 1 or "RANK" in os.environ):
            check_variables()
            _check_world(layout, int(os.environ.get("WORLD_SIZE", 1)))
            self.watch = presence.take(timeout or default_pg_timeout, watch)
            # its functions have the current world as a default argument when they are defined, and so would keep its
            # connections open after a failed rank leaves it
            importlib.import_module("torch.distributed.nn.functional")
            with not_inherited(), self.watch.activity.during("joining the world"):
                if own_device.type == "cuda":
                    share_no_gpu(self.watch.store, self.watch.rank, own_device)
                _enter(self.watch.store, self.watch.rank, self.watch.world, own_device, timeout)
            self.owner = True
        elif dist.is_initialized():
            self.watch = Watch(default_store(), dist.get_rank(), dist.get_world_size(), watch)
        else:
            self.watch = Watch(None, 0, 1, 0)
        _check_world(layout, self.watch.world)
        super().__init__(layout, self.watch.rank, own_device, record)
        self.activity = self.watch.activity
        self._timeout, self._cut = timeout, ""
        self._gloo = layout.world > 1 and own_device.type == "cpu" and backend_of("cpu") == "gloo"
        self._works: WeakSet[Work] = WeakSet()
        self._waiting: torch.cuda.Stream | None = None
        self._groups: dict[frozenset[str], Any] = {}  # None: this rank is in no such group
        self._lines: dict[tuple[str, bool], Any] = {}
        self._host: Any = None
        self._along = tuple(lines)
        with self.activity.during("joining the mesh"):
            self._connect([layout.names, *((n,) for n in layout.names), *axes])
        self.watch.meet(layout, watch)
        _HERE.add(self)

    def seen_as(self, layout: Mesh, axes: Iterable[tuple[str, ...]] = (), lines: Iterable[str] = ()) -> TorchMesh:
        """Return the same ranks as a mesh of another layout. See RankMesh.seen_as."""
        options: dict[str, Any] = {"device": self.device, "timeout": self._timeout, "record": self.recording}
        return TorchMesh(layout, axes, lines=lines, watch=self.watch.named, **options)

    def in_digits(self, layout: Mesh, axes: Iterable[tuple[str, ...]]) -> RankMesh:
        view: Any = super().in_digits(layout, axes)
        view._groups, view.owner = {}, False
        view.add_groups([layout.names, *((n,) for n in layout.names), *axes])
        _HERE.add(view)
        return view  # type: ignore[no-any-return]

    def transfer_to(self, other: TorchMesh) -> None:
        """Let another mesh of this world replace this one: it leaves the world, and watches, instead of it."""
        other.owner, self.owner = self.owner or other.owner, False
        self.watch.stop()

    def _connect(self, axes: Iterable[tuple[str, ...]]) -> None:
        """Make all process groups. Collective."""
        layout = self.layout
        with not_inherited():
            # with NCCL only: a gloo group, so that agreement on the host does not wait for the device
            if layout.world > 1 and not backend_of("cpu"):
                self._host = dist.new_group(backend="gloo", timeout=self._timeout, group_desc="host")
            fact = stated("the mesh", layout, fix="start all ranks with the same spec and --mesh")
            facts = [replace(fact, placed=False)]  # coordinates differ between different meshes
            check(self, facts, "joining the mesh")
            self.add_groups(axes)
            self._lines = {
                (axis, upwards): self._new_group(layout.groups((axis,)), f"{axis} {'up' if upwards else 'down'}")
                for axis in self._along
                for upwards in (True, False)
            }

    def add_groups(self, axes: Iterable[tuple[str, ...]]) -> None:
        """Make the process groups for more sets of axes. Collective where there are any to make."""
        missing = {self._split(s) for s in axes} - {frozenset()} - self._groups.keys()
        for names in sorted(missing, key=sorted):
            ordered = [n for n in (*self.layout.names, *sorted(names)) if n in names]
            with not_inherited():
                self._groups[names] = self._new_group(self.layout.groups(names), "+".join(dict.fromkeys(ordered)))

    def _split(self, axes: Iterable[str]) -> frozenset[str]:
        return frozenset(part for a in axes for part in self.layout.digits(a) if self.layout.size(part) > 1)

    def _new_group(self, groups: list[tuple[int, ...]], name: str) -> Any:
        """Make process groups; return this rank's, or None if it is in none or its group has one rank.

        groups: of one size, disjoint. name: for logs of NCCL and torch's flight recorder. NCCL splits its world once
        for all groups (ncclCommSplit); with other backends only the ranks of a group meet. Collective over the world.
        """
        if len(groups[0]) == self.layout.world:
            return dist.group.WORLD
        if len(groups[0]) == 1:
            return None
        own_group = next((ranks for ranks in groups if self.rank in ranks), None)
        world: Any = dist.group.WORLD
        if self.device.type == "cuda" and world.bound_device_id is not None and backend_of("cuda") == "nccl":
            group = self._split_world(groups, name)
        elif not differ(self.sum_on_host([n**power for n in process_groups() for power in (1, 2)]), self.layout.world):
            # torch numbers groups by process: a rank that is in none makes a group of one to keep count
            peers = own_group or (self.rank,)
            group = dist.new_group(list(peers), timeout=self._timeout, use_local_synchronization=True, group_desc=name)
        else:
            _, count = process_groups()
            count_groups_from(int(self.sum_on_host([count])[0]))  # at least as many as any rank has made
            all_groups = [dist.new_group(list(ranks), timeout=self._timeout, group_desc=name) for ranks in groups]
            group = next((g for g, ranks in zip(all_groups, groups, strict=True) if ranks == own_group), None)
        return group if own_group else None

    def _split_world(self, groups: list[tuple[int, ...]], name: str) -> Any:
        """Make all `groups` with one call to NCCL, and return this rank's."""
        return dist.split_group(split_ranks=[list(g) for g in groups], timeout=self._timeout, group_desc=name)

    def _group(self, axes: Iterable[str]) -> Any:
        names = self._split(axes)
        group = self._groups.get(names)
        assert group is not None, f"no process group for {sorted(names)}: name it when the mesh is made"
        return group

    @contextmanager
    def after(self, work: Work) -> Iterator[None]:
        """Start the collectives of this context after `work` ends. See RankMesh.after."""
        if self._waiting is None:
            self._waiting = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._waiting.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._waiting):  # these collectives wait for this stream, not for later computation
            work.pass_on()
            yield

    def _background(self, work: Work, kind: str, axes: Axes, nbytes: int) -> Work:
        self._works.add(work)
        return super()._background(work, kind, axes, nbytes)

    def _sum_on_host(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._host)
        # a fake backend sends nothing: assume that all ranks have this value
        return x * self.layout.world if backend_of("cpu") == "fake" else x

    def _in_one_shot(self, nbytes: int) -> bool:
        return self._gloo and 0 < nbytes <= ONE_SHOT

    def _all_reduce(self, flat: Tensor, axes: Axes, op: str, tag: str, background: bool) -> Work:
        group, ranks = self._group(axes), self.members(axes)
        if not self._in_one_shot(ranks * flat.nbytes):
            reduced = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
            return Work(dist.all_reduce(flat, reduced, group, async_op=background))
        sent = flat.expand(ranks, *flat.shape).contiguous()
        got = torch.empty_like(sent)
        then = partial(_combine, got.unbind(), flat, torch.maximum if op == "max" else torch.add)
        return Work(dist.all_to_all_single(got, sent, group=group, async_op=background), then)

    def _all_gather(self, part: Tensor, whole: Tensor, axis: str, tag: str, background: bool) -> Work:
        group = self._group((axis,))
        within = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        if not whole.nbytes:
            return Work()
        if self._gloo:  # it supports few dtypes
            part, whole = part.view(torch.uint8), whole.view(torch.uint8)
        if self._in_one_shot(whole.nbytes) and not within:
            sent = part.expand(self.size(axis), -1).contiguous().view(-1)
            return Work(dist.all_to_all_single(whole, sent, group=group, async_op=background))
        if within and self.device.type != "cuda":
            # gloo also writes this rank's slice when other bytes arrive, with its values from the start: this would
            # overwrite later values. NCCL does not write it
            places = list(whole.chunk(self.size(axis)))
            places[self.coordinate(axis)] = torch.empty_like(part)
            return Work(dist.all_gather(places, part, group=group, async_op=background))
        return Work(_all_gather_single(whole, part, group=group, async_op=background))

    def _reduce_scatter(self, flat: Tensor, part: Tensor, axis: str, tag: str, background: bool) -> Work:
        group = self._group((axis,))
        if self.device.type == "cuda":
            return Work(_reduce_scatter_single(part, flat, group=group, async_op=background))
        # gloo's own is an all_reduce inside; exchanging the parts sends half of that (1 MiB on 2 ranks: 0.3 ms
        # against 0.65)
        got = torch.empty_like(flat)
        then = partial(_combine, got.chunk(self.size(axis)), part, torch.add)
        return Work(dist.all_to_all_single(got, flat, group=group, async_op=background), then)

    def _all_to_all(self, x: Tensor, into: Tensor, rows: Rows, axes: Axes, tag: str, background: bool) -> Work:
        sent, received = rows
        return Work(dist.all_to_all_single(into, x, received, sent, self._group(axes), background))

    def _send(self, x: Tensor, axis: str, to: int, tag: str) -> Work:
        group = self._lines[axis, to > self.coordinate(axis)]
        return Work(dist.isend(x, group=group, group_dst=to), kept=x)

    def _receive(self, into: Tensor, axis: str, source: int, tag: str) -> Work:
        group = self._lines[axis, source < self.coordinate(axis)]
        return Work(dist.irecv(into, group=group, group_src=source))

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        let_workers_end()
        with self.activity.during(doing) as outermost:
            if self.layout.world == 1 or not outermost:
                yield
                return
            if self._cut:
                fix = "make a new one, program.engine(...) or program.module(...), and load the last checkpoint"
                raise ShardcError(f"the connections of the ranks ended before: {self._cut}", where=doing, fix=fix)
            try:
                yield
            except Exception as e:
                if not (isinstance(e, ShardcError) and e.on_all_ranks):
                    self._failed(e, doing)
                raise

    def _failed(self, error: Exception, doing: str) -> None:
        """Report the error to the other ranks, or raise theirs. Returns if the error is this rank's own."""
        if not cut_off(error):
            if not self.watch.report(error, doing):
                first = next(iter(str(error).splitlines()), "")
                self._close_all(error, f"this rank failed in {doing}: {type(error).__name__}: {first}")
            return
        failed = self.watch.cause(error, doing)
        self._close_all(error, failed.what)
        raise failed from error

    def _close_all(self, error: Exception, why: str) -> None:
        """Close all connections: ranks that wait for this rank are woken.

        A connection closes with its last reference: groups (also those of other meshes of this process, which share
        them), handles of running collectives, and the variables of the functions that the error came through. why: the
        error text of later calls.
        """
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        for mesh in {self, *_HERE}:
            mesh._drop_groups(why)
        dist.destroy_process_group()
        gc.collect()

    def _drop_groups(self, why: str) -> None:
        for work in list(self._works):
            work.abandon()
        self._groups = dict.fromkeys(self._groups)  # for `reconnect`
        self._lines.clear()
        self._host, self._cut = None, why

    def reconnect(self) -> None:
        if not self._cut:
            return
        if self.watch.processes.ended():
            raise RankFailedError("some ranks have ended", where="meeting again")
        store = dist.PrefixStore(f"shardc/again{self.watch.failures}", self.watch.store)  # type: ignore[attr-defined]
        with not_inherited():
            _enter(store, self.rank, self.layout.world, self.device, timedelta(seconds=MEET_AGAIN))
        axes = [tuple(sorted(names)) for names in self._groups]
        self._groups.clear()
        self._connect(axes)
        self._cut, self.owner = "", True

    def close(self) -> None:
        """Leave the world, if this mesh joined it; it can then send nothing more.

        A group ends with its last reference, and its threads with it. They must not outlive the interpreter: they may
        hold a tensor, and freeing it then aborts the process (https://github.com/pytorch/pytorch/pull/179291).
        """
        self.watch.stop()
        if self.owner and dist.is_initialized():
            dist.destroy_process_group()
            self._groups.clear()
            self._lines.clear()
            self.owner = False


def _combine(parts: Sequence[Tensor], into: Tensor, combine: Callable[..., Tensor]) -> None:
    """Combine the ranks' tensors in their order: equal bits everywhere."""
    combine(parts[0], parts[1], out=into)
    for other in parts[2:]:
        combine(into, other, out=into)


@atexit.register
def _leave() -> None:
    """Leave the world where a script ends without `close`: see there.

    Not with NCCL, which would wait for collectives that may never end; it has no such threads.
    """
    for mesh in list(_HERE):
        if mesh.device.type == "cpu":
            mesh.close()


def _enter(store: Any, rank: int, world: int, device: torch.device, timeout: timedelta | None) -> None:
    if device.type != "cuda":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        return
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # collectives run first; also in split groups
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=world, timeout=timeout, pg_options=options, device_id=device
    )


def rank_here() -> int:
    """Return this process's rank in torch.distributed's world, else RANK of the environment, else 0."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _started(world: int) -> str:
    """Return the words for `world` processes and the command that starts them."""
    script = Path(sys.argv[0])
    if script.suffix == ".py":
        return f"{world} processes (torchrun --nproc-per-node {world} {script.name})"
    return (
        f"{world} processes (a file with its own loop: torchrun --nproc-per-node {world} FILE.py; `shardc run`"
        " takes one with model() and batch(), without a loop)"
    )


def _check_world(layout: Mesh, world: int) -> None:
    if world != layout.world:
        axes = dict.fromkeys(name.partition(".")[0] for name in layout.names)
        sizes = Mesh.of({axis: layout.size(axis) for axis in axes}).fitting(world)
        sizes = sizes or dict(zip(axes, (world, *[1] * len(axes)), strict=False))
        raise ShardcError(
            f"the mesh {layout} has {layout.world} ranks, but {world}"
            f" {'process runs' if world == 1 else 'processes run'}",
            fix=f"start {'1 process' if layout.world == 1 else _started(layout.world)}, or "
            + (f"compile with mesh={sizes}" if axes else f"write a mesh of {world} ranks: mesh: {{dp: {world}}}"),
        )
