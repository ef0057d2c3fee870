"""ZeRO 3's gathers: parameters that exist only as parts are gathered ahead of their use, freed after it, and gathered
again in backward.

A gathered bucket is one flat tensor; ops get views of it, and it is freed when the last view is gone. The trouble is
autograd, which saves such views for backward and would keep every bucket alive until then. So what it saves is replaced
by a note, and the note is looked up in what backward gathers:

    forward     linear(x, w), w a view of bucket 0     autograd saves (bucket 0, offset, size, stride) in place of w
                                                       bucket 0 is freed when no op uses it
    backward    the note of bucket 0 is unpacked       bucket 0 is gathered; the next `prefetch` buckets that backward
                                                       will ask for start too
                all gradients of bucket 0 are there    it is freed, and their reduce_scatter starts

Which bucket comes next is known from the last backward of the same stage: it asked in the same order, on all ranks
alike. The first one goes by the notes, last one first. For a region that is computed again that is forward order: it
notes what it takes in reverse (shardc.runtime.step.recompute).

    forward     region of b0, b1, b2     notes b0 b1 b2, then of what it takes b2 b1 b0
    backward    computes again b0 b1 b2, then uses b2 b1 b0"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardc.runtime.mesh import Work
from shardc.runtime.ops.by_storage import ByStorage

#: A bucket is small beside one of so many times its elements.
SMALL = 16


class Source(Protocol):
    """A bucket that can be gathered. elements: of all its parameters."""

    prefetch: int
    elements: int

    def start_gather(self, direction: str) -> tuple[Tensor, Work]:
        """A flat tensor, and when the bucket's parameters will be in it."""


@dataclass(frozen=True)
class _Saved:
    """A note of a view of a gathered bucket, in place of the view that autograd wanted to save."""

    bucket: Source
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Notes:
    """The notes of one forward. left: how many of each bucket's are not unpacked yet; order: whose they are, in the
    order in which they were made, notes of one bucket in a row once.
    """

    def __init__(self) -> None:
        self.left: Counter[Source] = Counter()
        self.order: list[Source] = []

    def add(self, bucket: Source) -> None:
        self.left[bucket] += 1
        if not self.order or self.order[-1] is not bucket:
            self.order.append(bucket)


class Gathered:
    """The gathered buckets of one rank, forward and backward."""

    def __init__(self) -> None:
        self._under_way: dict[Source, tuple[Tensor, Work]] = {}
        self._alive = ByStorage[Source]()  # what forward has gathered
        self._waiting: dict[Hashable, _Notes] = {}  # of each forward that waits for its backward
        self._notes = _Notes()  # of the forward or backward that runs
        self._here: dict[Source, Tensor] = {}  # in backward
        self._current: Source | None = None
        # of backwards of one kind: the order in which the last one asked for buckets
        self._asked: dict[Hashable, list[Source]] = {}
        self._kind: Hashable = None
        self._asking: list[Source] = []  # by the backward that runs
        self._expected: list[Source] = []
        self._place = 0  # in what is expected
        self._for_text: dict[int, Work] = {}  # under way for a lowered backward (`again`)
        self._number = itertools.count()

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
        self._alive.put(whole, bucket)
        return whole

    @contextmanager
    def saving(self, run: Hashable = 0) -> Iterator[None]:
        """Around forward: autograd keeps notes of gathered buckets instead of the buckets."""
        self._notes = self._waiting[run] = _Notes()
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._alive.clear()

    def _pack(self, x: Tensor) -> Tensor | _Saved:
        bucket = self._alive.get(x) if x.layout is torch.strided else None
        if bucket is None or x.is_conj() or x.is_neg() or x.numel() == 0:
            return x
        self._notes.add(bucket)
        return _Saved(bucket, int(x.storage_offset()), x.shape, x.stride())

    # --- backward

    def begin_backward(self, run: Hashable, kind: Hashable) -> None:
        """Backward of this run of forward comes next. kind: what backwards that ask for the same buckets have in
        common. What the one before has gathered stays, if it was not ended: parameters are the same.
        """
        self._remember()
        self._notes = self._waiting.setdefault(run, _Notes())
        self._kind, self._asking, self._place, self._current = kind, [], 0, None
        self._expected = self._asked[kind] if kind in self._asked else self._notes.order[::-1]

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        bucket = saved.bucket
        if bucket is not self._current:
            self._fetch(bucket)
        self._notes.left[bucket] -= 1
        return self._here[bucket].as_strided(saved.size, saved.stride, saved.offset)

    def _fetch(self, bucket: Source) -> None:
        """Have a bucket whole, let go of those that are done with, and start the next ones."""
        for done in [b for b in self._here if self._notes.left[b] <= 0 and b is not bucket]:
            del self._here[done]  # an op that still works with it keeps it alive
        self._current = bucket
        self._asking.append(bucket)
        if bucket not in self._here:
            whole, work = self._under_way.pop(bucket) if bucket in self._under_way else bucket.start_gather("backward")
            work.wait()
            self._here[bucket] = whole
        with suppress(ValueError):  # not expected here: it is the first backward, or one that asks for others
            self._place = self._expected.index(bucket, self._place) + 1
        for ahead in self._next(bucket):
            if ahead not in self._under_way:
                self._under_way[ahead] = ahead.start_gather("backward")

    def _next(self, bucket: Source) -> list[Source]:
        """The buckets to have under way while this one is used: the next `prefetch` that are expected and not here. A
        few small ones, as of biases, come along: an op takes them together with a large one.
        """
        ahead: list[Source] = []
        counted, room = 0, bucket.elements // SMALL
        for other in itertools.islice(self._expected, self._place, None) if bucket.prefetch else ():
            if other in self._here or other in ahead:
                continue
            if other.elements <= room:
                room -= other.elements
            elif counted == bucket.prefetch:
                break
            else:
                counted += 1
            ahead.append(other)
        return ahead

    def again(self, bucket: Source) -> Callable[[], Tensor]:
        """Begin to gather for a backward whose text says itself when a bucket is wanted, and for how long. Returns what
        waits for the gathered bucket.
        """
        whole, work = bucket.start_gather("backward")
        number = next(self._number)
        self._for_text[number] = work

        def wait() -> Tensor:
            self._for_text.pop(number, None)
            work.wait()
            return whole

        return wait

    def drop(self, bucket: Source) -> None:
        """Its gradients are there: backward needs it no more."""
        self._here.pop(bucket, None)
        if self._current is bucket:
            self._current = None

    def _remember(self) -> None:
        """The next backward of this kind will ask for buckets in the same order."""
        if self._asking:
            self._asked[self._kind] = self._asking

    def end_backward(self) -> None:
        """After a backward that ran to its end."""
        self._remember()
        self.finish()

    def finish(self) -> None:
        """Nothing is kept."""
        for work in (*(work for _, work in self._under_way.values()), *self._for_text.values()):
            work.wait()
        self._under_way.clear()
        self._for_text.clear()
        self._notes, self._asking, self._expected = _Notes(), [], []
        self._alive.clear()  # an evaluation's gathers are nobody's to note
        self._here.clear()
        self._current = None


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
