"""The mesh as a running rank sees it: its coordinates, and raw collectives by axis. One interface, two implementations.

`TorchMesh` runs over torch.distributed (NCCL on CUDA, gloo on CPU); `LoopbackMesh` (shardc.runtime.loopback) runs all ranks of a
mesh as threads of one process. A program cannot tell which. Collectives return new tensors and never change their argument.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.mesh import Mesh


@dataclass(frozen=True)
class CommRecord:
    """One collective that ran on this rank. bytes: of the whole (reduced or gathered) local tensor. tag: the program's node."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    direction: str
    tag: str = ""

    @property
    def axis(self) -> str:
        return "+".join(self.axes)


class Work:
    """A collective under way; `wait` returns when its tensor is ready."""

    def __init__(self, handle: Any = None) -> None:
        self._handle = handle

    def wait(self) -> None:
        if self._handle is not None:
            self._handle.wait()


class RankMesh:
    """Common part: coordinates, records, and groups of size one, over which nothing is sent or recorded."""

    def __init__(self, layout: Mesh, rank: int, device: torch.device | str = "cpu", record: bool = False) -> None:
        self.layout, self.rank, self.device = layout, rank, torch.device(device)
        self._coords = layout.coords(rank)
        self.records: list[CommRecord] = []
        self.recording = record

    def coordinate(self, axis: str) -> int:
        return self._coords[axis]

    def size(self, axis: str) -> int:
        return self.layout.size(axis)

    def _members(self, axes: Iterable[str]) -> int:
        n = 1
        for a in axes:
            n *= self.layout.size(a)
        return n

    def _note(self, kind: str, axes: tuple[str, ...], nbytes: int, direction: str, tag: str) -> None:
        if self.recording:
            self.records.append(CommRecord(kind, axes, nbytes, direction, tag))

    # --- what programs call

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], *, op: str = "sum", direction: str = "forward", tag: str = "") -> Tensor:
        """The sum (or max) over the ranks of `axes`; a new tensor."""
        if self._members(axes) == 1:
            return x.clone()
        self._note("all_reduce", axes, x.nbytes, direction, tag)
        return self._all_reduce(x, axes, op, tag)

    def start_all_reduce(self, flat: Tensor, axes: tuple[str, ...], *, direction: str = "backward", tag: str = "") -> Work:
        """Sum in place over the ranks of `axes`, in the background."""
        if self._members(axes) == 1:
            return Work()
        self._note("all_reduce", axes, flat.nbytes, direction, tag)
        return self._start_all_reduce(flat, axes, tag)

    def all_gather(self, x: Tensor, axis: str, *, direction: str = "forward", tag: str = "") -> list[Tensor]:
        """Every rank's x, in the order of the axis."""
        if self.size(axis) == 1:
            return [x]
        self._note("all_gather", (axis,), x.nbytes * self.size(axis), direction, tag)
        return self._all_gather(x, axis, tag)

    def reduce_scatter(self, parts: Sequence[Tensor], axis: str, *, direction: str = "forward", tag: str = "") -> Tensor:
        """The sum over ranks of everyone's part for this rank."""
        if self.size(axis) == 1:
            return parts[0].clone()
        self._note("reduce_scatter", (axis,), sum(p.nbytes for p in parts), direction, tag)
        return self._reduce_scatter(parts, axis, tag)

    def all_to_all(self, parts: Sequence[Tensor], axis: str, *, direction: str = "forward", tag: str = "") -> list[Tensor]:
        """Part i goes to rank i of the axis; returns what the ranks sent here, in their order."""
        if self.size(axis) == 1:
            return list(parts)
        self._note("all_to_all", (axis,), sum(p.nbytes for p in parts), direction, tag)
        return self._all_to_all(parts, axis, tag)

    def barrier(self) -> None:
        raise NotImplementedError

    # --- what implementations provide

    def _all_reduce(self, x: Tensor, axes: tuple[str, ...], op: str, tag: str) -> Tensor:
        raise NotImplementedError

    def _start_all_reduce(self, flat: Tensor, axes: tuple[str, ...], tag: str) -> Work:
        raise NotImplementedError

    def _all_gather(self, x: Tensor, axis: str, tag: str) -> list[Tensor]:
        raise NotImplementedError

    def _reduce_scatter(self, parts: Sequence[Tensor], axis: str, tag: str) -> Tensor:
        raise NotImplementedError

    def _all_to_all(self, parts: Sequence[Tensor], axis: str, tag: str) -> list[Tensor]:
        raise NotImplementedError


class TorchMesh(RankMesh):
    """A rank of torch.distributed's world. Process groups are made for every set of axes that a program names, on all ranks alike.

    layout: the mesh; its size must be the world's. axes: the sets of axes to make groups for (single axes always are).
    Joins the world that torchrun (or `shardc run`) describes in the environment, unless a process group exists already.
    """

    def __init__(self, layout: Mesh, axes: Iterable[tuple[str, ...]] = (), record: bool = False) -> None:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        self.owner = False
        if not dist.is_initialized() and (layout.world > 1 or "RANK" in os.environ):
            dist.init_process_group("nccl" if cuda else "gloo")
            self.owner = True
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if world != layout.world:
            from shardc.errors import ShardcError

            raise ShardcError(
                f"the mesh {layout} has {layout.world} ranks, but {world} processes run", fix=f"start {layout.world} processes, or set one axis to -1"
            )
        super().__init__(layout, rank, "cuda" if cuda else "cpu", record)
        self._groups: dict[frozenset[str], Any] = {}
        wanted = dict.fromkeys([frozenset(a for a in s if layout.size(a) > 1) for s in (*((n,) for n in layout.names), *axes)])
        for names in sorted(wanted, key=sorted):
            if names:
                self._make(names)

    def _make(self, names: frozenset[str]) -> None:
        for ranks in dict.fromkeys(self.layout.group(r, names) for r in range(self.layout.world)):
            group = dist.group.WORLD if len(ranks) == self.layout.world else dist.new_group(list(ranks))
            if self.rank in ranks:
                self._groups[names] = group

    def _group(self, axes: Iterable[str]) -> Any:
        names = frozenset(a for a in axes if self.layout.size(a) > 1)
        assert names in self._groups, f"no process group for {sorted(names)}: name it when the mesh is made"
        return self._groups[names]

    def _all_reduce(self, x: Tensor, axes: tuple[str, ...], op: str, tag: str) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, self._group(axes))
        return out

    def _start_all_reduce(self, flat: Tensor, axes: tuple[str, ...], tag: str) -> Work:
        return Work(dist.all_reduce(flat, group=self._group(axes), async_op=True))

    def _all_gather(self, x: Tensor, axis: str, tag: str) -> list[Tensor]:
        out = x.new_empty((self.size(axis), *x.shape))
        parts = list(out.unbind(0))
        dist.all_gather(parts, x.contiguous(), self._group((axis,)))
        return parts

    def _reduce_scatter(self, parts: Sequence[Tensor], axis: str, tag: str) -> Tensor:
        if self.device.type == "cuda":
            out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
            dist.reduce_scatter(out, [p.contiguous() for p in parts], group=self._group((axis,)))
            return out
        # gloo's reduce_scatter is an all_reduce underneath: exchanging the parts sends half as much
        got = self._all_to_all(parts, axis, tag)
        total = got[0]
        for other in got[1:]:
            total += other
        return total

    def _all_to_all(self, parts: Sequence[Tensor], axis: str, tag: str) -> list[Tensor]:
        sent = torch.stack([p.contiguous() for p in parts])
        out = torch.empty_like(sent)
        dist.all_to_all_single(out, sent, group=self._group((axis,)))
        return list(out.unbind(0))

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def close(self) -> None:
        """Leave the world, if this mesh joined it."""
        if self.owner and dist.is_initialized():
            dist.destroy_process_group()
