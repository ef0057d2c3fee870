"""Define a mesh for one rank (shardc.runtime.mesh.shapes) that records its collectives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor

from shardc.cost.ledger import Ledger
from shardc.ir.mesh import Mesh
from shardc.machine.work import Sent, Waited
from shardc.runtime.mesh import Work
from shardc.runtime.mesh.shapes import ShapeMesh


class _Keyed(Work):
    """Work with a key, as in Sent."""

    def __init__(self, key: int, then: Callable[[], None], kept: Tensor | None) -> None:
        super().__init__(then=then, kept=kept)
        self.key = key


class FakeMesh(ShapeMesh):
    """Records collectives in a ledger. buckets: tags of collectives of parameters and gradients."""

    def __init__(self, mesh: Mesh, rank: int, ledger: Ledger, *, streams: bool, buckets: Collection[str] = ()) -> None:
        super().__init__(mesh, rank, torch.device("cpu"), record=True)
        self._ledger, self._streams, self._buckets = ledger, streams, buckets
        self._keys = count()
        self._after: int | None = None

    def _mark(self, tag: str, kind: str, *buffers: Tensor) -> None:
        """Set the kind of a bucket's tensors in a collective; other collectives' tensors have no kind yet."""
        if tag in self._buckets:
            self._ledger.mark(buffers, kind)

    def _background(self, work: Work, kind: str, axes: tuple[str, ...], nbytes: int) -> Work:
        """Let the last recorded collective overlap until it is waited for; nobody waits for what was sent."""
        if kind == "receive":  # is not recorded
            return work
        key, done = next(self._keys), self._ledger.parts[-1].work
        last = next(i for i in reversed(range(len(done))) if isinstance(done[i], Sent))
        done[last] = done[last]._replace(key=key)  # type: ignore[call-arg]
        if kind == "send_recv":
            return work
        return _Keyed(key, lambda: self._ledger.parts[-1].work.append(Waited(key)), work._kept)

    @property
    def streams(self) -> bool:
        """Whether the priced device has streams."""
        return self._streams

    @contextmanager
    def after(self, work: Work) -> Iterator[None]:
        """Let collectives inside the block begin after `work` has ended."""
        self._after = work.key if isinstance(work, _Keyed) else None
        try:
            yield
        finally:
            self._after = None

    def _note(self, kind: str, axes: tuple[str, ...], nbytes: int, direction: str, tag: str) -> None:
        super()._note(kind, axes, nbytes, direction, tag)
        self._ledger.parts[-1].work.append(Sent(self.records[-1], after=self._after))

    def _all_reduce(self, flat: Tensor, axes: tuple[str, ...], op: str, tag: str, background: bool) -> Work:
        self._mark(tag, "gradients", flat)
        return Work()

    def _all_gather(self, part: Tensor, whole: Tensor, axis: str, tag: str, background: bool) -> Work:
        self._mark(tag, "gathered", whole)
        return Work(kept=part)

    def _reduce_scatter(self, flat: Tensor, part: Tensor, axis: str, tag: str, background: bool) -> Work:
        self._mark(tag, "gradients", flat, part)
        return Work()


def rank_of(mesh: Mesh, axis: str, coordinate: int) -> int:
    """Return the last rank of a coordinate on the pipeline's axis: first ranks keep what others recompute."""
    coords: dict[str, Any] = {a: mesh.size(a) - 1 for a in mesh.names}
    return mesh.rank({**coords, axis: coordinate} if axis else coords)
