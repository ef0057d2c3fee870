"""ZeRO 3's gathers: parameters that exist only as parts are gathered ahead of their use, freed after it, and gathered
again in backward. A gathered bucket is one flat tensor; ops get views of it, and it is freed when the last view is
gone. The graphs say when a gather starts, and when it is waited for (shardc.passes.joint.write).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shardc.runtime.mesh import Work


class Source(Protocol):
    """A bucket that can be gathered. elements: of all its parameters."""

    prefetch: int
    elements: int

    def start_gather(self, direction: str) -> tuple[Tensor, Work]:
        """A flat tensor, and when the bucket's parameters will be in it."""


class Gathered:
    """The gathers of one rank that are under way."""

    def __init__(self) -> None:
        self._forward: dict[Source, tuple[Tensor, Work]] = {}
        self._backward: dict[int, Work] = {}
        self._number = itertools.count()

    def start(self, bucket: Source) -> None:
        """Begin to gather for forward, unless it is under way."""
        if bucket not in self._forward:
            self._forward[bucket] = bucket.start_gather("forward")

    def take(self, bucket: Source) -> Tensor:
        """The gathered bucket; who holds it, or views of it, keeps it alive."""
        self.start(bucket)
        whole, work = self._forward.pop(bucket)
        work.wait()
        return whole

    def again(self, bucket: Source) -> Callable[[], Tensor]:
        """Begin to gather for backward. Returns what waits for the gathered bucket."""
        whole, work = bucket.start_gather("backward")
        number = next(self._number)
        self._backward[number] = work

        def wait() -> Tensor:
            self._backward.pop(number, None)
            work.wait()
            return whole

        return wait

    def finish(self) -> None:
        """Wait for all that is under way, and forget it: a step has ended, or failed halfway."""
        for work in (*(work for _, work in self._forward.values()), *self._backward.values()):
            work.wait()
        self._forward.clear()
        self._backward.clear()


def views(whole: Tensor, starts: list[int], shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    """A flat tensor's parts, of these shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return tuple(
        whole[start : start + size].view(shape) for start, size, shape in zip(starts, sizes, shapes, strict=True)
    )
