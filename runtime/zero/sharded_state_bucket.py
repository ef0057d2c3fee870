"""ZeRO 1: parameters and gradients are whole on every rank; of the optimizer's state it has a part. Gradients add up
over microbatches in their buffer, and are reduce_scattered once a step; this rank's sum lies in its place there.
"""

from __future__ import annotations

from shardc.runtime.zero.whole_params import WholeParams


class ShardedStateBucket(WholeParams):
    """Whole parameters and gradients; a part of the optimizer's state."""

    _settled = True

    def launch(self) -> None:
        flat = self._filled()
        self._sum = flat[self.low : self.high]
        self._reduce(flat, self._sum)
        self._rest(self._sum, at_once=True)
        self._settled = False

    def settle(self) -> None:
        if not self._settled:
            assert self._sum is not None
            self._work.wait()
            self._settled = True
            self._rest(self._sum)

    def finish(self) -> None:
        self.settle()
        self._rest_work.wait()
        assert self._sum is not None
        self._give_part(self._sum)
        self._sum = None
        self._free()
