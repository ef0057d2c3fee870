"""What buckets of ZeRO 1 to 3 share: each rank of the data axis keeps one part of the flat buffer, updates it, and gets
the sum of its gradients.

    a a a a | a b b b | c c c c      parameters of 5, 3 and 4 elements on 3 ranks; rank 1 owns a[4:5] and b[0:3]
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardc.ir.program import Program
from shardc.runtime.mesh import Work
from shardc.runtime.offload import Offload
from shardc.runtime.offload.copies import Home
from shardc.runtime.zero.gather import views
from shardc.runtime.zero.replicated_bucket import ReplicatedBucket


class BucketRef:
    """What the program's graph gets in place of a parameter of a sharded bucket; `ops.gather_start` and `ops.updated`
    take it.
    """

    def __init__(self, bucket: Any) -> None:
        self.bucket = bucket


class ShardedBucket(ReplicatedBucket):
    """This rank's part of a bucket, and the sum of gradients into it.

    gives_empty: a stretch without elements gets a gradient without elements, which a loop of the user's reads as any
    other; else None, and the optimizer has nothing to do for it.
    """

    gives_empty = False

    def __init__(self, program: Program, index: int, mesh: Any, offload: Offload) -> None:
        super().__init__(program, index, mesh)
        self._offload = offload
        self._home: Home | None = None  # where the master is, if it is not on the device
        self.rank = mesh.coordinate(self.spec.shard)
        self.runs = self.flat.runs(self.rank)
        self.rest = tuple(a for a in self.spec.axes if a != self.spec.shard)
        self.low, self.high = self.rank * self.flat.part, (self.rank + 1) * self.flat.part
        self._sum: Tensor | None = None  # the gradients' part
        self._rest_work = Work()  # the sum over the other axes
        self._rest_begun = False

    def start(self, first: bool) -> None:
        if first:
            self._rest_work.wait()  # of a step that failed halfway
            self._rest_begun = False
        super().start(first)

    def _slices(self, part: Tensor) -> dict[str, Tensor]:
        """This rank's stretch of every parameter in its part of the flat buffer."""
        starts = dict(zip(self.spec.params, self.flat.starts, strict=True))
        slices = {}
        for name, run in self.runs.items():
            first = starts[name] + run.start - self.low if run.size else 0
            slices[name] = part[first : first + run.size]
        return slices

    def _make_master(self, kind: str, dtype: torch.dtype) -> Tensor:
        """This rank's part of the parameters as stored, zeros at first. kind: the entry of `offload` that moves it."""
        self._home = self._offload.room(kind, self.flat.part, dtype)
        return (
            self._home.tensor
            if self._home is not None
            else torch.zeros(self.flat.part, dtype=dtype, device=self.mesh.device)
        )

    def _keep(self) -> None:
        """`.owned` is filled."""
        if self._home is not None:
            self._offload.keep(self.owned.values(), self._home)

    def _own_slices(self, part: Tensor, trained: bool) -> None:
        self.owned = {n: nn.Parameter(x, requires_grad=trained) for n, x in self._slices(part).items()}

    def _reduce(self, flat: Tensor, part: Tensor) -> None:
        """Begin to sum flat into part."""
        if self.spec.shard in self.spec.axes:
            self._work = self.mesh.start_reduce_scatter(flat, part, self.spec.shard, direction="backward", tag=self.tag)
        elif self.spec.zero > 1:  # else it is a part of flat
            part.copy_(flat[self.low : self.high])  # all ranks of the axis have the same gradient

    @property
    def _rest_due(self) -> bool:
        """Whether a sum over the other axes is to begin yet."""
        return not self._rest_begun and bool(self.rest) and self.mesh.members(self.rest) > 1

    def _rest(self, part: Tensor, *, at_once: bool = False) -> None:
        """Go on over the other axes, once a step. at_once: when the sum over the first axis is there, without waiting
        for it here; not on every mesh.
        """
        if not self._rest_due:
            return
        if at_once and not self.mesh.streams:
            return
        with self.mesh.after(self._work) if at_once else nullcontext():
            self._rest_work = self.mesh.start_all_reduce(part, self.rest, direction="backward", tag=self.tag)
        self._rest_begun = True

    def _give_part(self, part: Tensor) -> None:
        self._give({n: x for n, x in self._slices(part).items() if self.runs[n].size or self.gives_empty})

    def _gathered_wholes(self, part: Tensor) -> dict[str, Tensor]:
        """{name: whole local part} from this rank's part of the flat buffer. Collective."""
        whole = torch.empty(self.flat.padded, dtype=part.dtype, device=part.device)
        self.mesh.start_all_gather(part.detach(), whole, self.spec.shard, direction="state", tag=self.tag).wait()
        return dict(zip(self.spec.params, views(whole, self.flat.starts, self.flat.shapes), strict=True))
