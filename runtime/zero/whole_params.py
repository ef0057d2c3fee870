"""What buckets of ZeRO 1 and 2 share: every rank has the parameters whole, as views of one flat buffer, and updates its
part of them; then the parts are gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardc.runtime.mesh import Work
from shardc.runtime.zero.gather import views
from shardc.runtime.zero.sharded_bucket import BucketRef, ShardedBucket


class WholeParams(ShardedBucket):
    """Whole parameters, of which this rank updates its part."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._whole: Tensor | None = None
        self._master: Tensor | None = None
        self._gather = Work()
        self._versions = 0

    def adopt(self, name: str, p: nn.Parameter) -> Any:
        if self._whole is None:
            self._whole = torch.zeros(self.flat.padded, dtype=self.spec.compute or p.dtype, device=p.device)
            self._master = self._whole[self.low : self.high]
            if self._whole.dtype != p.dtype:
                self._master = self._make_master("optimizer", p.dtype)
            self._places = dict(
                zip(self.spec.params, views(self._whole, self.flat.starts, self.flat.shapes), strict=True)
            )
        assert self._master is not None
        with torch.no_grad():
            self._places[name].copy_(p)
            run = self.runs[name]
            self._slices(self._master)[name].copy_(p.reshape(-1)[run.start : run.stop])
        self.params[name] = nn.Parameter(self._places[name], requires_grad=p.requires_grad)
        return BucketRef(self)

    def ready(self) -> None:
        assert self._master is not None
        # An engine asks whether anybody wrote to them (`written`): what gathers write beside them is counted apart. In
        # a loop of the user's own torch has to see what is written between forward and backward.
        self._own_slices(self._master if self.gives_empty else self._master.data, trained=True)
        for name, p in self.owned.items():
            p.requires_grad_(self.params[name].requires_grad)
        self._keep()
        self._versions = self._version()

    def _version(self) -> int:
        return sum(p._version for p in self.owned.values())

    @property
    def written(self) -> bool:
        """Has anybody written to this rank's part since it was last gathered? (Not by `.data`: torch does not count
        such writes. Of an engine: where buckets are those of a loop of the user's, gathers count too.)
        """
        return self._version() != self._versions

    def publish(self) -> None:
        assert self._whole is not None
        assert self._master is not None
        self._gather.wait()  # of two at once the first may end last
        mine = self._whole[self.low : self.high]
        if self.spec.compute is not None:
            mine.copy_(self._master)
            if self._home is not None:
                self._home.slot.behind()
        self._gather = self.mesh.start_all_gather(mine, self._whole, self.spec.shard, direction="update", tag=self.tag)
        self._versions = self._version()

    def wait_for_gather(self) -> None:
        self._gather.wait()

    def filled(self) -> None:
        self._versions = self._version()

    def updated(self) -> tuple[nn.Parameter, ...]:
        """The whole parameters."""
        self.wait_for_gather()
        return tuple(self.params[n] for n in self.spec.params)

    def wholes(self) -> dict[str, Tensor]:
        self.wait_for_gather()
        assert self._master is not None
        if self.spec.compute is None:
            return super().wholes()
        return self._gathered_wholes(self._master.to(self.mesh.device))
