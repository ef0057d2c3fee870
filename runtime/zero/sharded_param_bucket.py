"""ZeRO 3: each rank has its part of the parameters alone; they are gathered for every use (shardc.runtime.zero.gather),
and gradients are reduce_scattered as soon as backward has those of the whole bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardc.ir.program import Program
from shardc.runtime.mesh import Work
from shardc.runtime.offload import Offload
from shardc.runtime.zero.gather import Gathered, views
from shardc.runtime.zero.replicated_bucket import ReplicatedBucket
from shardc.runtime.zero.rounded_gather import RoundedGather
from shardc.runtime.zero.scattered_bucket import ScatteredBucket
from shardc.runtime.zero.sharded_bucket import BucketRef


class ShardedParamBucket(ScatteredBucket):
    """Only this rank's part exists. launched: called when a sum has begun."""

    def __init__(
        self,
        program: Program,
        index: int,
        mesh: Any,
        offload: Offload,
        gathered: Gathered,
        launched: Callable[[ReplicatedBucket], None],
        last: Callable[[ReplicatedBucket], bool],
    ) -> None:
        super().__init__(program, index, mesh, offload, last)
        self._gathered, self._launched = gathered, launched
        self.prefetch, self.elements = self.spec.prefetch, self.flat.padded
        self._rounded = RoundedGather(self.spec, self.flat, self.runs, mesh, self.tag) if self.spec.rounded else None
        self._master: Tensor | None = None
        self._trained = False
        #: With `keep`: what was gathered, until the step's last backward.
        self._kept_whole: tuple[Tensor, Work] | None = None

    def adopt(self, name: str, p: nn.Parameter) -> Any:
        if self._master is None:
            self._master = self._make_master("parameters", p.dtype)
        self._trained = p.requires_grad
        run = self.runs[name]
        with torch.no_grad():
            self._slices(self._master)[name].copy_(p.reshape(-1)[run.start : run.stop])
        return BucketRef(self)

    def ready(self) -> None:
        assert self._master is not None
        self._own_slices(self._master, self._trained)
        self._keep()

    # --- parameters

    def start_gather(self, direction: str) -> tuple[Tensor, Work]:
        assert self._master is not None
        if self._kept_whole is not None:
            return self._kept_whole
        if self._home is not None:
            part = self._offload.read(self._home, direction, self.spec.compute)
        else:
            part = self._master if self.spec.compute is None else self._master.to(self.spec.compute)
        if self._rounded is not None:
            return self._until_step_ends(self._rounded.start(part, self._slices(part), direction))
        whole = torch.empty(self.flat.padded, dtype=part.dtype, device=part.device)
        work = self.mesh.start_all_gather(part, whole, self.spec.shard, direction=direction, tag=self.tag)
        return self._until_step_ends((whole, work))

    def _until_step_ends(self, started: tuple[Tensor, Work]) -> tuple[Tensor, Work]:
        """The gather, kept where the bucket stays whole until a step's end."""
        if self.spec.keep and self.mesh.step.trains:
            self._kept_whole = started
        return started

    def reset(self) -> None:
        self._kept_whole = None

    def publish(self) -> None:
        self._kept_whole = None  # it is what was before the update

    def gather(self) -> None:
        """Begin to gather for forward."""
        self._gathered.start(self)

    def regather(self) -> Callable[[], Tensor]:
        """Begin to gather for a backward graph."""
        return self._gathered.again(self)

    def used(self) -> tuple[Tensor, ...]:
        """The gathered parameters."""
        return self.parts(self._gathered.take(self))

    def parts(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The parameters, views of what was gathered."""
        return views(whole, self.flat.starts, self.flat.shapes)

    def wholes(self) -> dict[str, Tensor]:
        assert self._master is not None
        return self._gathered_wholes(self._master.to(self.mesh.device))

    # --- gradients

    def arrived(self, grads: Sequence[Tensor | None]) -> None:
        """Backward has all gradients of this bucket: begin their sum, or wait for those of the microbatches to come."""
        for name, grad in zip(self.spec.params, grads, strict=True):
            if grad is not None:
                self._add(name, grad)
        if not self.spec.keep or self._last(self):
            self._kept_whole = None
            self.send()
            self._launched(self)

    def finish(self) -> None:
        self._kept_whole = None
        super().finish()
