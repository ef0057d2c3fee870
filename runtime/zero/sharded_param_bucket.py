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
from shardc.runtime.zero.gather import Gathered, Use, views
from shardc.runtime.zero.replicated_bucket import ReplicatedBucket
from shardc.runtime.zero.sharded_bucket import BucketRef, ShardedBucket


class ShardedParamBucket(ShardedBucket):
    """Only this rank's part exists. launched: called when a sum has begun; last: is this the step's last backward that
    reaches the bucket?"""

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
        super().__init__(program, index, mesh, offload)
        self._gathered, self._launched, self._last = gathered, launched, last
        self.prefetch, self.elements = self.spec.prefetch, self.flat.padded
        self._master: Tensor | None = None
        self._trained = False
        self._coming: Tensor | None = None  # the sum that is under way, where earlier ones are there already
        self._flying: Tensor | None = None
        self._final = False  # the sum under way is the step's last
        #: With `keep`: what was gathered, until the step's last backward.
        self._kept_whole: tuple[Tensor, Work] | None = None
        self._anchor = torch.zeros((), device=mesh.device, requires_grad=True)

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
        whole = torch.empty(self.flat.padded, dtype=part.dtype, device=part.device)
        started = whole, self.mesh.start_all_gather(part, whole, self.spec.shard, direction=direction, tag=self.tag)
        if self.spec.keep and torch.is_grad_enabled():
            self._kept_whole = started
        return started

    def reset(self) -> None:
        self._kept_whole = None

    def publish(self) -> None:
        self._kept_whole = None  # it is what was before the update

    def gather(self) -> None:
        """Begin to gather for forward."""
        self._gathered.start(self)

    def used(self) -> tuple[Tensor, ...]:
        """The gathered parameters; backward of them brings the bucket's gradients."""
        if self._trained and torch.is_grad_enabled():
            gathered: tuple[Tensor, ...] = Use.apply(self._anchor, self)  # type: ignore[no-untyped-call]
            return gathered
        return self.views()

    def views(self) -> tuple[Tensor, ...]:
        return views(self._gathered.take(self), self.flat.starts, self.flat.shapes)

    def wholes(self) -> dict[str, Tensor]:
        assert self._master is not None
        return self._gathered_wholes(self._master.to(self.mesh.device))

    # --- gradients

    def start(self, first: bool) -> None:
        super().start(first)
        if first:
            self._fresh, self._coming, self._flying, self._final = True, None, None, False
            self._buffer, self._views = None, {}

    def arrived(self, grads: Sequence[Tensor | None]) -> None:
        """Backward has all gradients of this bucket: begin their sum, or wait for those of the microbatches to come."""
        self._gathered.drop(self)
        if fresh := self._buffer is None:
            self._flat().zero_()
        for name, grad in zip(self.spec.params, grads, strict=True):
            if grad is not None:
                self._views[name].copy_(grad) if fresh else self._views[name].add_(grad)
                self.missing.discard(name)
                self.seen.add(name)
        if not self.spec.keep or self._last(self):
            self._kept_whole = None
            self._send()

    def _send(self) -> None:
        flat = self._flat()
        self.settle()
        part = torch.empty(self.flat.part, dtype=flat.dtype, device=flat.device)
        self._flying, self._coming = flat, part
        self._buffer, self._views = None, {}
        self._reduce(flat, part)
        self._final = not self.spec.late and self._last(self)  # of a late bucket, other ranks may bring the last one
        if self._final and (self._fresh or self._sum is None):
            self._rest(part, at_once=True)
        self._launched(self)

    def settle(self) -> None:
        if self._coming is not None:
            self._work.wait()
            if self._fresh or self._sum is None:
                self._sum, self._fresh = self._coming, False
            else:
                self._sum.add_(self._coming)
            self._coming = self._flying = None
            if self._final:
                self._rest(self._sum)

    def launch(self) -> None:
        """Of the step's last backward: the sum over the axes that replicate."""
        if self._buffer is not None:  # its last backward did not come here
            self._send()
        self.settle()
        if self._fresh and self.elsewhere:  # other ranks sum with this one
            self._sum = torch.zeros(self.flat.part, dtype=self.spec.dtype, device=self.mesh.device)
            self._fresh = False
        if self._sum is not None and not self._fresh:
            self._rest(self._sum)

    def finish(self) -> None:
        self._kept_whole = None
        self._rest_work.wait()
        if self._sum is not None:
            self._give_part(self._sum)
            self._sum = None
        else:
            self._give({})
