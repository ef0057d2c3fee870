"""One rank of a larger mesh, alone on its device: what comes from others is what they would send if all of them had
this rank's data.

Collectives go through torch.distributed and its fake backend, as those of a real rank go through NCCL. The fake backend
sends nothing and leaves most results as they were allocated, so that what a program makes of them would be chance; here
it is the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (it registers the backend)

from shardc.ir.program import Program
from shardc.runtime.mesh import TorchMesh, Work
from shardc.runtime.mesh.base import Axes, Rows
from shardc.runtime.stage.communicators import groups_of


class TwinMesh(TorchMesh):
    def _place(self, axes: tuple[str, ...]) -> int:
        """This rank's number in its group."""
        return self.layout.group(self.rank, axes).index(self.rank)

    def _all_reduce(self, flat: Tensor, axes: tuple[str, ...], op: str, tag: str, background: bool) -> Work:
        mine = flat.clone()
        super()._all_reduce(flat, axes, op, tag, background).wait()
        flat.copy_(mine if op == "max" else mine * self.members(axes))
        if not flat.is_cuda:
            return Work()
        stream = torch.cuda.current_stream()  # as NCCL's work: who waits for it waits for what has begun here
        return Work(then=lambda: torch.cuda.current_stream().wait_stream(stream))

    def _all_gather(self, part: Tensor, whole: Tensor, axis: str, tag: str, background: bool) -> Work:
        mine = part.clone()  # perhaps a place in `whole`
        work = super()._all_gather(part, whole, axis, tag, background)
        whole.view(self.size(axis), -1).copy_(mine.expand(self.size(axis), -1))
        return work

    def _reduce_scatter(self, flat: Tensor, part: Tensor, axis: str, tag: str, background: bool) -> Work:
        mine = flat.view(self.size(axis), -1)[self.coordinate(axis)] * self.size(axis)
        super()._reduce_scatter(flat, part, axis, tag, background).wait()
        part.copy_(mine)
        return Work()

    def _all_to_all(self, x: Tensor, into: Tensor, rows: Rows, axes: Axes, tag: str, background: bool) -> Work:
        super()._all_to_all(x, into, rows, axes, tag, background).wait()
        sent, received = rows
        place = self._place(axes)
        if not sent:
            into.copy_(x.chunk(self.members(axes))[place].repeat(self.members(axes), *[1] * (x.dim() - 1)))
        # else twins send what this rank sends itself
        elif received[place] == sent[place] and set(received) == {sent[place]}:
            start = sum(sent[:place])
            into.copy_(x[start : start + sent[place]].repeat(len(sent), *[1] * (x.dim() - 1)))
        else:
            into.copy_(x.sum(0) / max(len(x), 1))  # the way back, where twins had other rows: the mean, for all
        return Work()

    def _receive(self, into: Tensor, axis: str, source: int, tag: str) -> Work:
        work = super()._receive(into, axis, source, tag)
        into.fill_(0.125 if into.is_floating_point() else 1)
        return work


@contextmanager
def twin(program: Program, rank: int, device: str) -> Iterator[TwinMesh]:
    """This process as a rank of the program's mesh, whose others are not there. device: "cpu", "cuda"."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=program.mesh.world)
    try:
        lines = (program.axis,) if program.axis else ()
        yield TwinMesh(program.mesh, groups_of(program), lines=lines, device=device, watch=0)
    finally:
        if dist.is_initialized():  # a step that failed has left
            dist.destroy_process_group()
