"""What buckets of ZeRO 2 and 3 share: the gradients of every backward are reduce_scattered as they come, and add up in
this rank's part. So the whole gradients of a few buckets exist at a time, however many microbatches a step has.

    backward of microbatch 0    whole gradients  ->  reduce_scatter  ->  part
    backward of microbatch 1    whole gradients  ->  reduce_scatter  ->  part += ...
    end of the step             part             ->  all_reduce over the axes that replicate, if there are some
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardc.ir.program import Program
from shardc.runtime.offload import Offload
from shardc.runtime.zero.replicated_bucket import ReplicatedBucket
from shardc.runtime.zero.sharded_bucket import ShardedBucket


class ScatteredBucket(ShardedBucket):
    """Use: `start`, then `put` or `arrived` and `send` in each backward, `launch`, `settle`, `finish` after the last.
    last: is this the step's last backward that reaches the bucket?
    """

    def __init__(
        self, program: Program, index: int, mesh: Any, offload: Offload, last: Callable[[ReplicatedBucket], bool]
    ) -> None:
        super().__init__(program, index, mesh, offload)
        self._last = last
        self._coming: Tensor | None = None  # the sum that is under way, where earlier ones are there already
        self._flying: Tensor | None = None  # the whole gradients that it is made of
        self._final = False  # the sum under way is the step's last

    def start(self, first: bool) -> None:
        super().start(first)
        if first:
            self._sum = self._coming = self._flying = None
            self._final = False
            self._free()

    def send(self) -> None:
        """Begin the sum of what is in the buffer."""
        flat = self._filled()
        self.settle()
        part = torch.empty(self.flat.part, dtype=flat.dtype, device=flat.device)
        self._flying, self._coming = flat, part
        self._free()
        self._reduce(flat, part)
        self._final = not self.spec.late and self._last(self)  # of a late bucket, other ranks may bring the last one
        if self._final and self._sum is None:
            self._rest(part, at_once=True)

    @property
    def final(self) -> bool:
        return self._final

    def settle(self) -> None:
        if self._coming is not None:
            self._work.wait()
            if self._sum is None:
                self._sum = self._coming
            else:
                self._sum.add_(self._coming)
            self._coming = self._flying = None
            if self._final:
                self._rest(self._sum)

    def launch(self) -> None:
        """After the step's last backward: the sum over the axes that replicate."""
        if self._buffer is not None:  # its last backward did not come here
            self.send()
        self.settle()
        if self._sum is None and self.elsewhere:  # other ranks sum with this one
            self._sum = torch.zeros(self.flat.part, dtype=self.spec.dtype, device=self.mesh.device)
        if self._sum is not None:
            self._rest(self._sum)

    def finish(self) -> None:
        self._rest_work.wait()
        if self._sum is not None:
            self._give_part(self._sum)
            self._sum = None
        else:
            self._give({})
