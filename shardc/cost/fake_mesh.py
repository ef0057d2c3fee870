"""A mesh for one rank alone (shardc.runtime.mesh.shapes), that notes what would be sent, and when."""

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
    """key: as in Sent."""

    def __init__(self, key: int, then: Callable[[], None], kept: Tensor | None) -> None:
        super().__init__(then=then, kept=kept)
        self.key = key


class FakeMesh(ShapeMesh):
    """Records collectives in a ledger. buckets: tags of those that gather parameters, or sum their gradients."""

    def __init__(
        self, layout: Mesh, rank: int, ledger: Ledger, *, streams: bool, buckets: Collection[str] = ()
    ) -> None:
        super().__init__(layout, rank, torch.device("cpu"), record=True)
        self._ledger, self._streams, self._buckets = ledger, streams, buckets
        self._keys = count()
        self._after: int | None = None

    def _mark(self, tag: str, kind: str, *buffers: Tensor) -> None:
        """What such a collective takes or gives; what others do is of no kind yet."""
        if tag in self._buckets:
            self._ledger.mark(buffers, kind)

    def _started(self, kept: Tensor | None = None) -> Work:
        """Let the collective recorded last overlap with what comes next, until it is waited for. kept: what is sent."""
        key, work = next(self._keys), self._ledger.parts[-1].work
        last = next(i for i in reversed(range(len(work))) if isinstance(work[i], Sent))
        work[last] = work[last]._replace(key=key)  # type: ignore[call-arg]
        return _Keyed(key, lambda: self._ledger.parts[-1].work.append(Waited(key)), kept)

    @property
    def streams(self) -> bool:
        """Those of the device whose cost is asked for."""
        return self._streams

    @contextmanager
    def after(self, work: Work) -> Iterator[None]:
        """See RankMesh.after."""
        self._after = work.key if isinstance(work, _Keyed) else None
        try:
            yield
        finally:
            self._after = None

    def _note(self, kind: str, axes: tuple[str, ...], nbytes: int, direction: str, tag: str) -> None:
        super()._note(kind, axes, nbytes, direction, tag)
        self._ledger.parts[-1].work.append(Sent(self.records[-1], after=self._after))

    def _start_all_reduce(self, flat: Tensor, axes: tuple[str, ...], tag: str) -> Work:
        self._mark(tag, "gradients", flat)
        return self._started()

    def _start_all_gather(self, part: Tensor, whole: Tensor, axis: str, tag: str) -> Work:
        self._mark(tag, "gathered", whole)
        return self._started(part)

    def _start_reduce_scatter(self, flat: Tensor, part: Tensor, axis: str, tag: str) -> Work:
        self._mark(tag, "gradients", flat, part)
        return self._started()

    def _start_all_to_all_rows(
        self, x: Tensor, into: Tensor, sent: list[int], received: list[int], axes: tuple[str, ...], tag: str
    ) -> Work:
        return self._started()

    def _start_send(self, x: Tensor, axis: str, to: int, tag: str) -> Work:
        self._started()
        return Work(kept=x)


def rank_of(mesh: Mesh, axis: str, coordinate: int) -> int:
    """Which rank to run, of those at one coordinate of the pipeline's axis: the last, as first ones keep what others
    compute again.
    """
    coords: dict[str, Any] = {a: mesh.size(a) - 1 for a in mesh.names}
    return mesh.rank({**coords, axis: coordinate} if axis else coords)
