"""ZeRO 3's gathers: parameters that exist only as parts are gathered ahead of their use, freed after it, and gathered
again in backward.

A gathered bucket is one flat tensor; ops get views of it, and it is freed when the last view is gone. The trouble is
autograd, which saves such views for backward and would keep every bucket alive until then. So what it saves is replaced
by a note, and the note is looked up in what backward gathers:

    forward     linear(x, w), w a view of bucket 0     autograd saves (bucket 0, offset, size, stride) in place of w
                                                       bucket 0 is freed when no op uses it
    backward    the note of bucket 0 is unpacked       bucket 0 is gathered; the next `prefetch` buckets that backward
                                                       will need start too
                all gradients of bucket 0 are there    it is freed, and their reduce_scatter starts

Backward uses buckets in the reverse order of their last use in forward: the notes say which comes next, on all ranks
alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardc.runtime.mesh import Work


class Source(Protocol):
    """A bucket that can be gathered."""

    prefetch: int

    def start_gather(self, direction: str) -> tuple[Tensor, Work]:
        """A flat tensor, and when the bucket's parameters will be in it."""


@dataclass(frozen=True)
class _Saved:
    """A note of a view of a gathered bucket, in place of the view that autograd wanted to save."""

    bucket: Source
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Gathered:
    """The gathered buckets of one rank, forward and backward."""

    def __init__(self) -> None:
        self._under_way: dict[Source, tuple[Tensor, Work]] = {}
        self._alive: dict[tuple[StorageWeakRef, torch.dtype], Source] = {}  # what forward has gathered
        # of each forward that waits for its backward: how many notes of each bucket are not unpacked yet, in the order
        # of last use
        self._waiting: dict[Hashable, dict[Source, int]] = {}
        self._needed: dict[Source, int] = {}  # of the forward or backward that runs
        self._here: dict[Source, Tensor] = {}  # in backward
        self._current: Source | None = None

    # --- forward

    def start(self, bucket: Source) -> None:
        """Begin to gather, unless it is under way."""
        if bucket not in self._under_way:
            self._under_way[bucket] = bucket.start_gather("forward")

    def take(self, bucket: Source) -> Tensor:
        """The gathered bucket; who holds it, or views of it, keeps it alive."""
        self.start(bucket)
        whole, work = self._under_way.pop(bucket)
        work.wait()
        self._alive[_storage(whole)] = bucket
        return whole

    @contextmanager
    def saving(self, run: Hashable = 0) -> Iterator[None]:
        """Around forward: autograd keeps notes of gathered buckets instead of the buckets."""
        self._needed = self._waiting[run] = {}
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._alive.clear()

    def _pack(self, x: Tensor) -> Tensor | _Saved:
        bucket = self._alive.get(_storage(x)) if x.layout is torch.strided else None
        if bucket is None or x.is_conj() or x.is_neg() or x.numel() == 0:
            return x
        self._needed[bucket] = self._needed.pop(bucket, 0) + 1
        return _Saved(bucket, int(x.storage_offset()), x.shape, x.stride())

    def begin_backward(self, run: Hashable) -> None:
        """Backward of this run of forward comes next."""
        self._needed = self._waiting.setdefault(run, {})

    # --- backward, which uses buckets in the reverse order of their last use in forward, on all ranks alike

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        bucket = saved.bucket
        if bucket is not self._current:
            self._fetch(bucket)
        self._needed[bucket] = self._needed.get(bucket, 0) - 1
        return self._here[bucket].as_strided(saved.size, saved.stride, saved.offset)

    def _fetch(self, bucket: Source) -> None:
        """Have a bucket whole, let go of those that are done with, and start the next ones."""
        for done in [b for b in self._here if self._needed.get(b, 0) <= 0]:
            del self._here[done]  # an op that still works with it keeps it alive
        self._current = bucket
        if bucket not in self._here:
            whole, work = self._under_way.pop(bucket) if bucket in self._under_way else bucket.start_gather("backward")
            work.wait()
            self._here[bucket] = whole
        order = list(self._needed)
        before = order[: order.index(bucket)] if bucket in order else []
        for ahead in before[::-1][: bucket.prefetch]:
            if ahead not in self._here and ahead not in self._under_way and self._needed[ahead] > 0:
                self._under_way[ahead] = ahead.start_gather("backward")

    def drop(self, bucket: Source) -> None:
        """Its gradients are there: backward needs it no more."""
        self._here.pop(bucket, None)
        if self._current is bucket:
            self._current = None

    def finish(self) -> None:
        """After backward: nothing is kept."""
        for _, work in self._under_way.values():
            work.wait()
        self._under_way.clear()
        self._needed.clear()
        self._alive.clear()  # an evaluation's gathers are nobody's to note
        self._here.clear()
        self._current = None


def _storage(x: Tensor) -> tuple[StorageWeakRef, torch.dtype]:
    """Equal for tensors that share memory as numbers of one dtype, and never given twice while it is kept; does not
    keep the memory.
    """
    return StorageWeakRef(x.untyped_storage()), x.dtype  # type: ignore[no-untyped-call]


def views(whole: Tensor, starts: list[int], shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    """A flat tensor's parts, of these shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return tuple(
        whole[start : start + size].view(shape) for start, size, shape in zip(starts, sizes, shapes, strict=True)
    )


class Use(torch.autograd.Function):
    """Views of a gathered bucket. When backward has all their gradients, the bucket's reduction starts.

    anchor: any tensor that needs a gradient, so that backward comes here; it gets none.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, bucket: Any) -> Any:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        return bucket.views()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.bucket.arrived(grads)
        return None, None
