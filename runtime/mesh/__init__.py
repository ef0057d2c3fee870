"""The mesh as a running rank sees it: its coordinates, and raw collectives by axis. One interface, two implementations.

`TorchMesh` runs over torch.distributed (NCCL on CUDA, gloo on CPU); `LoopbackMesh` (shardc.runtime.mesh.loopback) runs
all ranks of a mesh as threads of one process. A program cannot tell which. Collectives return new tensors and never
change their argument."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.mesh.allocator import keep_freed


@dataclass(frozen=True)
class CommRecord:
    """One collective that ran on this rank.

    bytes: of the whole (reduced, gathered or exchanged) local tensor, as in shardc.ir.program.Collective.
    direction: "forward", "recompute" (of forward, in backward), "backward" or "update". tag: the program's node or
    bucket that asked for it."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    direction: str
    tag: str = ""

    @property
    def axis(self) -> str:
        return "+".join(self.axes)


@dataclass(frozen=True)
class Moment:
    """Where in a step a program ran: which of how many microbatches, if a step has several, and what all of them add up
    to.
    """

    microbatch: int | None
    of: int | None
    totals: tuple[Tensor, ...]


class Work:
    """A collective under way; `wait` returns when its tensor is ready. then: what is left to do with what came, in
    `wait`.

    kept: what has to be there until then.
    """

    def __init__(self, handle: Any = None, then: Callable[[], None] | None = None, kept: Tensor | None = None) -> None:
        self._handle, self._then, self._kept = handle, then, kept

    def wait(self) -> None:
        if self._handle is not None:
            self._handle.wait()
        if self._then is not None:
            self._then()
        self._handle = self._then = self._kept = None


class RankMesh(ABC):
    """What both meshes share: coordinates, records, and groups of one rank, over which nothing is sent or recorded.

    layout: the mesh; rank: this one's number in it; device: where its tensors live; record: keep a list of what ran in
    `.records`. The name of an axis that is seen as several digits (shardc.ir.mesh) stands for all of them.
    Gathers and exchanges take and return *stacks* [ranks of the axis, ...] (shardc.runtime.ops.digits).
    """

    def __init__(self, layout: Mesh, rank: int, device: torch.device | str = "cpu", record: bool = False) -> None:
        self.layout, self.rank, self.device = layout, rank, torch.device(device)
        self._coords = layout.coords(rank)
        self._sizes = dict(layout.axes)
        for axis in {n.partition(".")[0] for n in layout.names} - set(layout.names):
            self._sizes[axis] = layout.size(axis)
            self._coords[axis] = layout.group(rank, (axis,)).index(rank)
        self.totals: tuple[Tensor, ...] = ()
        self.summing: dict[int, Tensor] | None = (
            None  # while a step's sums are found: what microbatches have added up to so far
        )
        self._again = False
        self.records: list[CommRecord] = []
        self.routed: list[tuple[str, Tensor, int, int]] | None = (
            None  # what experts' routing notes, if asked: shardc.runtime.step.expert_load
        )
        self.recording = record

    def turn_to(self, microbatch: int, of: int, totals: Iterable[Tensor] = ()) -> None:
        """From here on programs run on this microbatch of a step (shardc.passes.accumulate). totals: what all of them
        add up to.
        """
        self._coords["microbatch"], self._sizes["microbatch"] = microbatch, of
        self.totals = tuple(totals)

    def moment(self) -> Moment:
        """What `turn_to` set: where in a step programs run now."""
        return Moment(self._coords.get("microbatch"), self._sizes.get("microbatch"), self.totals)

    @contextmanager
    def again(self, moment: Moment) -> Iterator[None]:
        """While open, what runs is forward of an earlier moment once more (shardc.runtime.step.recompute), and is
        recorded as "recompute".
        """
        now, before = self.moment(), self._again
        self._turn(moment)
        self._again = True
        try:
            yield
        finally:
            self._turn(now)
            self._again = before

    def _turn(self, to: Moment) -> None:
        if to.microbatch is not None and to.of is not None:
            self.turn_to(to.microbatch, to.of, to.totals)

    def coordinate(self, axis: str) -> int:
        return self._coords[axis]

    def size(self, axis: str) -> int:
        return self._sizes[axis] if axis in self._sizes else self.layout.size(axis)

    def members(self, axes: Iterable[str]) -> int:
        """Number of ranks in a group over `axes`."""
        return math.prod(self.size(a) for a in axes)

    def _note(self, kind: str, axes: tuple[str, ...], nbytes: int, direction: str, tag: str) -> None:
        if self.recording:
            direction = "recompute" if self._again and direction == "forward" else direction
            self.records.append(CommRecord(kind, axes, nbytes, direction, tag))

    # --- what programs call

    def all_reduce(
        self, x: Tensor, axes: tuple[str, ...], *, op: str = "sum", direction: str = "forward", tag: str = ""
    ) -> Tensor:
        """The sum (or max) over the ranks of `axes`; a new tensor."""
        if self.members(axes) == 1:
            return x.clone()
        self._note("all_reduce", axes, x.nbytes, direction, tag)
        return self._all_reduce(x, axes, op, tag)

    def start_all_reduce(
        self, flat: Tensor, axes: tuple[str, ...], *, direction: str = "backward", tag: str = ""
    ) -> Work:
        """Sum in place over the ranks of `axes`, in the background. flat: contiguous."""
        if self.members(axes) == 1:
            return Work()
        self._note("all_reduce", axes, flat.nbytes, direction, tag)
        return self._start_all_reduce(flat, axes, tag)

    def start_all_gather(
        self, part: Tensor, whole: Tensor, axis: str, *, direction: str = "forward", tag: str = ""
    ) -> Work:
        """Every rank's part [n], in the order of the axis, into whole [ranks * n], in the background.

        Both are contiguous; part may be this rank's place in whole.
        """
        if self.size(axis) == 1:
            whole.copy_(part)
            return Work()
        self._note("all_gather", (axis,), whole.nbytes, direction, tag)
        return self._start_all_gather(part, whole, axis, tag)

    def start_reduce_scatter(
        self, flat: Tensor, part: Tensor, axis: str, *, direction: str = "backward", tag: str = ""
    ) -> Work:
        """The sum over ranks of everyone's flat [ranks * n], this rank's part of it into part [n], in the background.

        Both are contiguous; part may be this rank's place in flat. flat may not be used until then. More than one rank.
        """
        self._note("reduce_scatter", (axis,), flat.nbytes, direction, tag)
        return self._start_reduce_scatter(flat, part, axis, tag)

    def all_gather(self, x: Tensor, axis: str, *, direction: str = "forward", tag: str = "") -> Tensor:
        """[ranks, *x.shape]: every rank's x, in the order of the axis."""
        if self.size(axis) == 1:
            return x.unsqueeze(0)
        self._note("all_gather", (axis,), x.nbytes * self.size(axis), direction, tag)
        return self._all_gather(x.contiguous(), axis, tag)

    def reduce_scatter(self, parts: Tensor, axis: str, *, direction: str = "forward", tag: str = "") -> Tensor:
        """parts [ranks, ...] -> [...]: the sum over ranks of everyone's part for this rank."""
        if self.size(axis) == 1:
            return parts[0].clone()
        self._note("reduce_scatter", (axis,), parts.nbytes, direction, tag)
        return self._reduce_scatter(parts.contiguous(), axis, tag)

    def all_to_all(self, parts: Tensor, axis: str, *, direction: str = "forward", tag: str = "") -> Tensor:
        """parts [ranks, ...], part i for rank i of the axis -> [ranks, ...]: what the
        ranks sent here, in their order.
        """
        if self.size(axis) == 1:
            return parts
        self._note("all_to_all", (axis,), parts.nbytes, direction, tag)
        return self._all_to_all(parts.contiguous(), axis, tag)

    def all_to_all_rows(
        self,
        x: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        axes: tuple[str, ...],
        *,
        direction: str = "forward",
        tag: str = "",
    ) -> Tensor:
        """x [rows, ...]: the first sent[0] for the first rank of the group over `axes`, and so on -> [rows, ...]: what
        came, by rank.

        received: rows that come from each. A rank may send nothing, and get nothing.
        """
        if self.members(axes) == 1:
            return x
        self._note("all_to_all", axes, x.nbytes, direction, tag)
        return self._all_to_all_rows(x.contiguous(), list(sent), list(received), axes, tag)

    def start_send(self, x: Tensor, axis: str, to: int, *, direction: str = "forward", tag: str = "") -> Work:
        """Send a tensor to the rank at another coordinate of `axis`, in the background. x may not be changed until
        then.

        What one rank sends another arrives in the order in which it is sent, and has to be received in that order.
        """
        self._note("send_recv", (axis,), x.nbytes, direction, tag)
        return self._start_send(x.detach().contiguous(), axis, to, tag)

    def start_receive(self, into: Tensor, axis: str, source: int, *, tag: str = "") -> Work:
        """Receive the next tensor that the rank at another coordinate of `axis` sends, in the background. into:
        contiguous, of its type.
        """
        return self._start_receive(into, axis, source, tag)

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank of the mesh is here."""

    # --- what implementations provide: more than one rank, contiguous tensors (but for all_reduce)

    @abstractmethod
    def _all_reduce(self, x: Tensor, axes: tuple[str, ...], op: str, tag: str) -> Tensor: ...

    @abstractmethod
    def _start_all_reduce(self, flat: Tensor, axes: tuple[str, ...], tag: str) -> Work: ...

    @abstractmethod
    def _start_all_gather(self, part: Tensor, whole: Tensor, axis: str, tag: str) -> Work: ...

    @abstractmethod
    def _start_reduce_scatter(self, flat: Tensor, part: Tensor, axis: str, tag: str) -> Work: ...

    @abstractmethod
    def _all_gather(self, x: Tensor, axis: str, tag: str) -> Tensor: ...

    @abstractmethod
    def _reduce_scatter(self, parts: Tensor, axis: str, tag: str) -> Tensor: ...

    @abstractmethod
    def _all_to_all(self, parts: Tensor, axis: str, tag: str) -> Tensor: ...

    @abstractmethod
    def _all_to_all_rows(
        self, x: Tensor, sent: list[int], received: list[int], axes: tuple[str, ...], tag: str
    ) -> Tensor: ...

    @abstractmethod
    def _start_send(self, x: Tensor, axis: str, to: int, tag: str) -> Work: ...

    @abstractmethod
    def _start_receive(self, into: Tensor, axis: str, source: int, tag: str) -> Work: ...


# torch 2.13 renamed these two; the old names warn there, and the new ones are missing in 2.11
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchMesh(RankMesh):
    """A rank of torch.distributed's world. Process groups are made for every set of axes that a program names, on all
    ranks alike.

    layout: the mesh; its size must be the world's. axes: the sets of axes to make groups for (single axes always are).
    lines: axes along which ranks send to each other. Each gets a group for either direction: NCCL carries out what two
    ranks send each other in one group one after the other, and both would wait if each sent first.
    device: "cuda" (NCCL) or "cpu" (gloo); default: what the process group that exists already runs on, else cuda where
    every process of this machine has a GPU of its own.
    Joins the world that torchrun (or `shardc run`) describes in the environment, unless a process group exists already.
    Raises ShardcError if the world has another number of ranks than the mesh.
    """

    def __init__(
        self,
        layout: Mesh,
        axes: Iterable[tuple[str, ...]] = (),
        *,
        lines: Iterable[str] = (),
        device: torch.device | str | None = None,
        record: bool = False,
    ) -> None:
        kind = torch.device(device).type if device is not None else _device_type()
        here = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(here)
        else:
            keep_freed()  # offloading, which is made later, sets it otherwise
        self.owner = False
        if not dist.is_initialized() and (layout.world > 1 or "RANK" in os.environ):
            _check_world(layout, int(os.environ.get("WORLD_SIZE", 1)))
            dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=here if kind == "cuda" else None)
            self.owner = True
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        _check_world(layout, world)
        super().__init__(layout, rank, here, record)
        self._groups: dict[frozenset[str], Any] = {}
        self._made: set[frozenset[str]] = set()  # also those that this rank is not in
        self.add_groups([*((n,) for n in layout.names), *axes])
        self._lines: dict[tuple[str, bool], Any] = {}
        for axis in lines:
            for upwards in (True, False):
                for ranks in dict.fromkeys(layout.group(r, (axis,)) for r in range(layout.world)):
                    group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
                    if rank in ranks:
                        self._lines[axis, upwards] = group

    def add_groups(self, axes: Iterable[tuple[str, ...]]) -> None:
        """Make the process groups for more sets of axes. Collective where there are any to make."""
        wanted = {self._split(s) for s in axes} - self._made
        self._made |= wanted
        for names in sorted(wanted, key=sorted):
            if names:
                self._make(names)

    def _split(self, axes: Iterable[str]) -> frozenset[str]:
        return frozenset(part for a in axes for part in self.layout.parts(a) if self.layout.size(part) > 1)

    def _make(self, names: frozenset[str]) -> None:
        # new_group is collective: every rank makes all groups, also those it is not in, in one order
        sets = (self.layout.group(r, names) for r in range(self.layout.world) if self.layout.on(r, names))
        for ranks in dict.fromkeys(sets):
            group = dist.group.WORLD if len(ranks) == self.layout.world else dist.new_group(list(ranks))
            if self.rank in ranks:
                self._groups[names] = group

    def _group(self, axes: Iterable[str]) -> Any:
        names = self._split(axes)
        assert names in self._groups, f"no process group for {sorted(names)}: name it when the mesh is made"
        return self._groups[names]

    def _all_reduce(self, x: Tensor, axes: tuple[str, ...], op: str, tag: str) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, self._group(axes))
        return out

    def _start_all_reduce(self, flat: Tensor, axes: tuple[str, ...], tag: str) -> Work:
        return Work(dist.all_reduce(flat, group=self._group(axes), async_op=True))

    def _start_all_gather(self, part: Tensor, whole: Tensor, axis: str, tag: str) -> Work:
        return Work(_all_gather_single(whole, part, group=self._group((axis,)), async_op=True))

    def _start_reduce_scatter(self, flat: Tensor, part: Tensor, axis: str, tag: str) -> Work:
        group = self._group((axis,))
        if self.device.type == "cuda":
            return Work(_reduce_scatter_single(part, flat, group=group, async_op=True))
        got = torch.empty_like(flat)  # as in _reduce_scatter

        def add_up() -> None:
            first, second, *others = got.chunk(self.size(axis))
            torch.add(first, second, out=part)
            for other in others:
                part.add_(other)

        return Work(dist.all_to_all_single(got, flat, group=group, async_op=True), add_up)

    def _all_gather(self, x: Tensor, axis: str, tag: str) -> Tensor:
        out = x.new_empty((self.size(axis), *x.shape))
        _all_gather_single(out.view(-1), x.view(-1), group=self._group((axis,)))
        return out

    def _reduce_scatter(self, parts: Tensor, axis: str, tag: str) -> Tensor:
        if self.device.type == "cuda":
            out = torch.empty_like(parts[0])
            _reduce_scatter_single(out.view(-1), parts.view(-1), group=self._group((axis,)))
            return out
        # gloo's own is an all_reduce underneath; exchanging the parts sends half of that (1 MiB on 2 ranks: 0.3 ms
        # against 0.65)
        got = self._all_to_all(parts, axis, tag)
        total = got[0] + got[1]
        for other in got[2:]:
            total += other
        return total

    def _all_to_all(self, parts: Tensor, axis: str, tag: str) -> Tensor:
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts, group=self._group((axis,)))
        return out

    def _all_to_all_rows(
        self, x: Tensor, sent: list[int], received: list[int], axes: tuple[str, ...], tag: str
    ) -> Tensor:
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, x, received, sent, group=self._group(axes))
        return out

    def _start_send(self, x: Tensor, axis: str, to: int, tag: str) -> Work:
        group = self._lines[axis, to > self.coordinate(axis)]
        return Work(dist.isend(x, group=group, group_dst=to), kept=x)

    def _start_receive(self, into: Tensor, axis: str, source: int, tag: str) -> Work:
        return Work(dist.irecv(into, group=self._lines[axis, source < self.coordinate(axis)], group_src=source))

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def close(self) -> None:
        """Leave the world, if this mesh joined it; it can then send nothing more.

        A group ends with the last that knows it, and its threads with it. They must not outlive the interpreter: they
        may hold a tensor, and letting go of it then aborts the process
        (https://github.com/pytorch/pytorch/pull/179291)."""
        if self.owner and dist.is_initialized():
            dist.destroy_process_group()
            self._groups.clear()
            self._lines.clear()
            self.owner = False


def _device_type() -> str:
    if dist.is_initialized():
        return "cuda" if "nccl" in dist.get_backend() else "cpu"
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return "cuda" if enough else "cpu"


def _check_world(layout: Mesh, world: int) -> None:
    if world != layout.world:
        raise ShardcError(
            f"the mesh {layout} has {layout.world} ranks, but {world}"
            f" {'process runs' if world == 1 else 'processes run'}",
            fix=f"start {layout.world} processes, or set one axis of the mesh to -1 and compile again",
        )
