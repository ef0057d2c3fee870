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
from shardc.runtime.stage.communicators import groups_of


class TwinMesh(TorchMesh):
    def _place(self, axes: tuple[str, ...]) -> int:
        """This rank's number in its group."""
        return self.layout.group(self.rank, axes).index(self.rank)

    def _all_reduce(self, x: Tensor, axes: tuple[str, ...], op: str, tag: str) -> Tensor:
        total = super()._all_reduce(x, axes, op, tag)
        return total.copy_(x if op == "max" else x * self.members(axes))

    def _start_all_reduce(self, flat: Tensor, axes: tuple[str, ...], tag: str) -> Work:
        super()._start_all_reduce(flat, axes, tag).wait()
        flat.mul_(self.members(axes))
        if not flat.is_cuda:
            return Work()
        stream = torch.cuda.current_stream()  # as NCCL's work: who waits for it waits for what has begun here
        return Work(then=lambda: torch.cuda.current_stream().wait_stream(stream))

    def _start_all_gather(self, part: Tensor, whole: Tensor, axis: str, tag: str) -> Work:
        mine = part.clone()  # perhaps a place in `whole`
        work = super()._start_all_gather(part, whole, axis, tag)
        whole.view(self.size(axis), -1).copy_(mine.expand(self.size(axis), -1))
        return work

    def _start_reduce_scatter(self, flat: Tensor, part: Tensor, axis: str, tag: str) -> Work:
        mine = flat.view(self.size(axis), -1)[self.coordinate(axis)] * self.size(axis)
        super()._start_reduce_scatter(flat, part, axis, tag).wait()
        part.copy_(mine)
        return Work()

    def _all_gather(self, x: Tensor, axis: str, tag: str) -> Tensor:
        return super()._all_gather(x, axis, tag).copy_(x.expand(self.size(axis), *x.shape))

    def _reduce_scatter(self, parts: Tensor, axis: str, tag: str) -> Tensor:
        return super()._reduce_scatter(parts, axis, tag).copy_(parts[self.coordinate(axis)] * self.size(axis))

    def _all_to_all(self, parts: Tensor, axis: str, tag: str) -> Tensor:
        return super()._all_to_all(parts, axis, tag).copy_(parts[self.coordinate(axis)].expand_as(parts))

    def _all_to_all_rows(
        self, x: Tensor, sent: list[int], received: list[int], axes: tuple[str, ...], tag: str
    ) -> Tensor:
        out = super()._all_to_all_rows(x, sent, received, axes, tag)
        place = self._place(axes)
        if received[place] == sent[place] and set(received) == {sent[place]}:  # twins send what this rank sends itself
            start = sum(sent[:place])
            return out.copy_(x[start : start + sent[place]].repeat(len(sent), *[1] * (x.dim() - 1)))
        return out.copy_(x.sum(0) / max(len(x), 1))  # the way back, where twins had other rows: the mean, for all

    def _start_receive(self, into: Tensor, axis: str, source: int, tag: str) -> Work:
        work = super()._start_receive(into, axis, source, tag)
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
