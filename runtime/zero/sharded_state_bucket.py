"""ZeRO 1: parameters and gradients are whole on every rank; of the optimizer's state it has a part. Gradients add up
over microbatches in their buffer, and are reduce_scattered once a step; this rank's sum lies in its place there.

On a GPU nothing is freed by waiting for a sum in backward, so it is waited for afterwards: where stages of a pipeline
follow one another, each would hold up the others. On a CPU a sum under way takes as much memory again, for what is
received, so one at a time is.
"""

from __future__ import annotations

from shardc.runtime.zero.whole_params import WholeParams


class ShardedStateBucket(WholeParams):
    """Whole parameters and gradients; a part of the optimizer's state."""

    def launch(self) -> None:
        flat = self._filled()
        self._sum = flat[self.low : self.high]
        self._reduce(flat, self._sum)
        self._rest(self._sum, at_once=True)

    def settle(self) -> None:
        if self._sum is not None and (self._rest_due or not self.mesh.streams):
            self._work.wait()
            self._rest(self._sum)

    def finish(self) -> None:
        self._work.wait()
        self.settle()
        self._rest_work.wait()
        assert self._sum is not None
        self._give_part(self._sum)
        self._sum = None
        self._free()
