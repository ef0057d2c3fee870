"""Define RankMesh, the interface of all meshes: coordinates of a rank, and raw collectives by axis."""

from __future__ import annotations

import copy
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.metadata import CommRecord
from shardc.runtime.mesh.activity import Activity
from shardc.runtime.mesh.step_context import StepContext
from shardc.runtime.mesh.wait_times import Waits

Axes = tuple[str, ...]
#: Numbers of rows for and from each rank; empty: equally many.
Rows = tuple[list[int], list[int]]


class Work:
    """A collective in progress; `wait` returns when its tensor is ready.

    then: called by `wait` when the tensor is ready. kept: a tensor that must live until then. waiting: makes the
    context in which `wait` waits.
    """

    def __init__(self, handle: Any = None, then: Callable[[], None] | None = None, kept: Tensor | None = None) -> None:
        self._handle, self._then, self._kept = handle, then, kept
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    def wait(self) -> None:
        if self._handle is not None or self._then is not None:
            with self.waiting():
                if self._handle is not None:
                    self._handle.wait()
                if self._then is not None:
                    self._then()
        self.abandon()

    def abandon(self) -> None:
        """Drop the handle without waiting. A handle that is held keeps its connections open."""
        self._handle = self._then = self._kept = None

    def pass_on(self) -> None:
        """Let the current CUDA stream wait for the collective. Users of its tensor still have to call `wait`."""
        if self._handle is not None:
            self._handle.wait()


class RankMesh(ABC):
    """The base of all meshes, also of shardc.cost.fake_mesh. Groups of one rank send and record nothing.

    layout: the mesh; rank: the number of this rank in it; device: where its tensors are; record: list in `.records`
    what ran.
    The name of an axis that is seen as several digits (shardc.ir.mesh) means all of them.
    `.step`: the state of the running step that ops can read (shardc.runtime.mesh.step_context): ops receive only the
    mesh.
    `.activity`: what the rank is doing, for messages about ranks that hang or are killed. `.waits`: how long it waits.
    Gathers and exchanges take and return *stacks* [ranks of the axis, ...] (shardc.runtime.ops.shard_parts).
    """

    def __init__(self, layout: Mesh, rank: int, device: torch.device | str = "cpu", record: bool = False) -> None:
        self.rank, self.device = rank, torch.device(device)
        self._set_layout(layout)
        self.step, self.activity, self.waits = StepContext(), Activity(), Waits(self.device)
        self.records: list[CommRecord] = []
        self.recording = record

    def new_view(self) -> RankMesh:
        """Return a view of this mesh with a separate step, for another microbatch that runs at the same time."""
        view = copy.copy(self)
        view.step = StepContext()
        return view

    def _set_layout(self, layout: Mesh) -> None:
        self.layout, self._coords, self._sizes = layout, layout.coords(self.rank), dict(layout.axes)
        for axis in {n.partition(".")[0] for n in layout.names} - set(layout.names):
            self._sizes[axis] = layout.size(axis)
            self._coords[axis] = layout.group(self.rank, (axis,)).index(self.rank)

    def in_digits(self, layout: Mesh, axes: Iterable[tuple[str, ...]]) -> RankMesh:
        """Return a view of this mesh that sees axes as digits, in the same step; axes: as of `seen_as`. Collective."""
        view = copy.copy(self)
        view._set_layout(layout)
        return view

    def add_groups(self, axes: Iterable[tuple[str, ...]]) -> None:
        """Make the process groups for more sets of axes, if the mesh has any. Collective where some are missing."""
        return

    def note(self, text: str) -> None:
        """Print a line for the user, on the first rank's stderr."""
        if self.rank == 0:
            print(f"note: {text}", file=sys.stderr, flush=True)

    def coordinate(self, axis: str) -> int:
        """Return this rank's coordinate on an axis. The microbatches of a step are an axis too."""
        if axis == MICROBATCH:
            return self.step.running.index
        if axis not in self._coords:  # several axes together
            self._coords[axis] = self.layout.group(self.rank, (axis,)).index(self.rank)
        return self._coords[axis]

    def size(self, axis: str) -> int:
        if axis == MICROBATCH:
            return self.step.running.count
        return self._sizes[axis] if axis in self._sizes else self.layout.size(axis)

    def members(self, axes: Iterable[str]) -> int:
        """Return the number of ranks in a group over `axes`."""
        return math.prod(self.size(a) for a in axes)

    @property
    def streams(self) -> bool:
        """Whether the device queues computation and collectives on streams, without blocking the host."""
        return self.device.type == "cuda"

    def after(self, work: Work) -> AbstractContextManager[None]:
        """Start this context's collectives after `work` and after earlier computation. Needs `streams`."""
        raise NotImplementedError

    def _note(self, kind: str, axes: Axes, nbytes: int, direction: str, tag: str) -> None:
        self.activity.begin(kind, axes, tag)
        if self.recording:
            direction = "recompute" if self.step.in_backward and direction == "forward" else direction
            self.records.append(CommRecord(kind, axes, nbytes, direction, tag))

    def _blocking(self, kind: str, axes: Axes, nbytes: int, direction: str, tag: str) -> AbstractContextManager[None]:
        """Record a collective that the rank waits for from its start, and measure it in this context."""
        self._note(kind, axes, nbytes, direction, tag)
        return self.waits.during(kind, axes, nbytes, whole=True)

    def _background(self, work: Work, kind: str, axes: Axes, nbytes: int) -> Work:
        """Prepare a collective that has begun so that its later wait is measured. kind: as recorded, or "receive"."""
        recorded = "send_recv" if kind == "receive" else kind
        work.waiting = partial(self.waits.during, recorded, axes, nbytes, whole=False)
        return work

    # --- called by programs

    def all_reduce(
        self, x: Tensor, axes: Axes, *, op: str = "sum", direction: str = "forward", tag: str = ""
    ) -> Tensor:
        """Return the sum (or max) over the ranks of `axes`, as a new tensor."""
        if self.members(axes) == 1:
            return x.clone()
        with self._blocking("all_reduce", axes, x.nbytes, direction, tag):
            total = x.detach().clone(memory_format=torch.contiguous_format)
            self._all_reduce(total, axes, op, tag, False).wait()
        return total

    def start_all_reduce(self, flat: Tensor, axes: Axes, *, direction: str = "backward", tag: str = "") -> Work:
        """Sum in place over the ranks of `axes`, in the background. flat: contiguous."""
        if self.members(axes) == 1:
            return Work()
        self._note("all_reduce", axes, flat.nbytes, direction, tag)
        return self._background(self._all_reduce(flat, axes, "sum", tag, True), "all_reduce", axes, flat.nbytes)

    def all_gather(self, x: Tensor, axis: str, *, direction: str = "forward", tag: str = "") -> Tensor:
        """Return every rank's x in the order of the axis: [ranks, *x.shape]."""
        if self.size(axis) == 1:
            return x.unsqueeze(0)
        with self._blocking("all_gather", (axis,), x.nbytes * self.size(axis), direction, tag):
            whole = x.new_empty((self.size(axis), *x.shape))
            self._all_gather(x.detach().contiguous().view(-1), whole.view(-1), axis, tag, False).wait()
        return whole

    def start_all_gather(
        self, part: Tensor, whole: Tensor, axis: str, *, direction: str = "forward", tag: str = ""
    ) -> Work:
        """Gather every rank's part [n] into whole [ranks * n], in the order of the axis, in the background.

        Both are contiguous. part may be this rank's slice of whole, which is then not written: data that other code
        writes there meanwhile stays (it is undefined whether it is sent).
        """
        if self.size(axis) == 1:
            whole.copy_(part)
            return Work()
        self._note("all_gather", (axis,), whole.nbytes, direction, tag)
        return self._background(self._all_gather(part, whole, axis, tag, True), "all_gather", (axis,), whole.nbytes)

    def reduce_scatter(self, parts: Tensor, axis: str, *, direction: str = "forward", tag: str = "") -> Tensor:
        """Return the sum over ranks of the part that each has for this rank: parts [ranks, ...] -> [...]."""
        if self.size(axis) == 1:
            return parts[0].clone()
        with self._blocking("reduce_scatter", (axis,), parts.nbytes, direction, tag):
            part = parts.new_empty(parts.shape[1:])
            self._reduce_scatter(parts.detach().contiguous().view(-1), part.view(-1), axis, tag, False).wait()
        return part

    def start_reduce_scatter(
        self, flat: Tensor, part: Tensor, axis: str, *, direction: str = "backward", tag: str = ""
    ) -> Work:
        """Sum every rank's flat [ranks * n], and write this rank's part into part [n], in the background.

        Both are contiguous. part may be this rank's slice of flat. flat may not be used until then. Needs more than one
        rank.
        """
        self._note("reduce_scatter", (axis,), flat.nbytes, direction, tag)
        work = self._reduce_scatter(flat, part, axis, tag, True)
        return self._background(work, "reduce_scatter", (axis,), flat.nbytes)

    def all_to_all(self, parts: Tensor, axis: str, *, direction: str = "forward", tag: str = "") -> Tensor:
        """Send part i of parts [ranks, ...] to rank i of the axis; return the received parts, by rank."""
        return self.all_to_all_rows(parts, ([], []), (axis,), direction=direction, tag=tag)

    def all_to_all_rows(self, x: Tensor, rows: Rows, axes: Axes, *, direction: str = "forward", tag: str) -> Tensor:
        """Send rows[0][i] consecutive rows of x to rank i of the group; return the received rows, by rank.

        x [rows, ...]. rows[1]: the number of rows from each rank. Numbers may be 0; none: equally many for all.
        """
        if self.members(axes) == 1:
            return x
        with self._blocking("all_to_all", axes, x.nbytes, direction, tag):
            into = x.new_empty((sum(rows[1]) if rows[1] else len(x), *x.shape[1:]))
            self._all_to_all(x.detach().contiguous(), into, rows, axes, tag, False).wait()
        return into

    def start_all_to_all_rows(
        self, x: Tensor, into: Tensor, rows: Rows, axes: Axes, *, direction: str = "forward", tag: str
    ) -> Work:
        """Start all_to_all_rows in the background, into a tensor of `sum(rows[1])` rows. Both are contiguous."""
        if self.members(axes) == 1:
            into.copy_(x)
            return Work()
        self._note("all_to_all", axes, x.nbytes, direction, tag)
        work = self._all_to_all(x, into, rows, axes, tag, True)
        return self._background(work, "all_to_all", axes, x.nbytes)

    def start_send(self, x: Tensor, axis: str, to: int, *, direction: str = "forward", tag: str = "") -> Work:
        """Send a tensor to the rank at coordinate `to` of `axis`, in the background.

        x may not be changed until then. Tensors from one rank to another arrive in the order of sending, and must be
        received in it.
        """
        self._note("send_recv", (axis,), x.nbytes, direction, tag)
        return self._background(self._send(x.detach().contiguous(), axis, to, tag), "send_recv", (axis,), x.nbytes)

    def start_receive(self, into: Tensor, axis: str, source: int, *, tag: str = "") -> Work:
        """Receive the next tensor from coordinate `source` of `axis`, in the background. into: contiguous."""
        self.activity.begin("receive", (axis,), tag)
        return self._background(self._receive(into, axis, source, tag), "receive", (axis,), into.nbytes)

    def sum_on_host(self, numbers: Sequence[int]) -> list[int]:
        """Sum integers (int64) elementwise over all ranks, on the host: a few bytes, not in `.records`."""
        if self.layout.world == 1:
            return list(numbers)
        self.activity.begin("all_reduce", self.layout.names, "what ranks agree on")
        sums: list[int] = self._sum_on_host(torch.tensor(numbers, dtype=torch.int64)).tolist()
        return sums

    def broadcast(self, x: Tensor, *, tag: str = "") -> Tensor:
        """Return rank 0's x on every rank; x has the same shape and dtype everywhere."""
        if self.layout.world == 1:
            return x
        whole = x.detach().contiguous()
        data = whole.view(-1).view(torch.uint8) if whole.numel() else whole.view(-1)
        data = data.to(self.device) if self.rank == 0 else torch.zeros_like(data, device=self.device)
        data = self.all_reduce(data, self.layout.names, direction="state", tag=tag)
        return data.view(whole.dtype).view(whole.shape)

    def seen_as(self, layout: Mesh, axes: Iterable[tuple[str, ...]] = (), lines: Iterable[str] = ()) -> RankMesh:
        """Return the same ranks as a mesh of another layout. axes, lines: as of TorchMesh. Collective."""
        raise NotImplementedError

    def together(self, doing: str) -> AbstractContextManager[Any]:
        """Run a joint action (`doing`, such as "step 5"): if some ranks fail, the rest raise RankFailedError."""
        return self.activity.during(doing)

    def reconnect(self) -> None:
        """Connect all ranks again after such an error, so that they can save. Collective."""
        return

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank of the mesh is here."""

    # --- implementations define these: more than one rank, contiguous tensors. Results are written into an argument.
    # background: `wait` of the result waits for it; else the call may wait itself

    @abstractmethod
    def _sum_on_host(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _all_reduce(self, flat: Tensor, axes: Axes, op: str, tag: str, background: bool) -> Work: ...

    @abstractmethod
    def _all_gather(self, part: Tensor, whole: Tensor, axis: str, tag: str, background: bool) -> Work: ...

    @abstractmethod
    def _reduce_scatter(self, flat: Tensor, part: Tensor, axis: str, tag: str, background: bool) -> Work: ...

    @abstractmethod
    def _all_to_all(self, x: Tensor, into: Tensor, rows: Rows, axes: Axes, tag: str, background: bool) -> Work:
        """Exchange rows."""

    @abstractmethod
    def _send(self, x: Tensor, axis: str, to: int, tag: str) -> Work: ...

    @abstractmethod
    def _receive(self, into: Tensor, axis: str, source: int, tag: str) -> Work: ...
