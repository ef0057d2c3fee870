"""Gather parameters of ZeRO 3 ahead of their use, free them after it, and repeat this in backward.

A gathered bucket is one flat tensor. Ops get views of it, and it is freed with the last view. The graphs define when a
gather starts, and when it is waited for (shardc.passes.joint.write).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shardc.runtime.mesh import Work


class Source(Protocol):
    """A bucket that can be gathered. elements: the number of all its parameters' elements."""

    prefetch: int
    elements: int

    def start_gather(self, direction: str) -> tuple[Tensor, Work]:
        """Start to gather; return a flat tensor, and the work after which it holds the parameters."""


class Gathered:
    """The running gathers of one rank."""

    def __init__(self) -> None:
        self._forward: dict[Source, tuple[Tensor, Work]] = {}
        self._backward: dict[int, Work] = {}
        self._number = itertools.count()

    def start(self, bucket: Source) -> None:
        """Start to gather for forward, unless the gather is already running."""
        if bucket not in self._forward:
            self._forward[bucket] = bucket.start_gather("forward")

    def take(self, bucket: Source) -> Tensor:
        """Return the gathered bucket; references to it, or to views of it, keep it alive."""
        self.start(bucket)
        whole, work = self._forward.pop(bucket)
        work.wait()
        return whole

    def again(self, bucket: Source) -> Callable[[], Tensor]:
        """Start to gather for backward. Returns a function that waits for the gathered bucket."""
        whole, work = bucket.start_gather("backward")
        number = next(self._number)
        self._backward[number] = work

        def wait() -> Tensor:
            self._backward.pop(number, None)
            work.wait()
            return whole

        return wait

    def finish(self) -> None:
        """Wait for all running gathers, and forget them: a step has ended, or failed halfway."""
        for work in (*(work for _, work in self._forward.values()), *self._backward.values()):
            work.wait()
        self._forward.clear()
        self._backward.clear()


def views(whole: Tensor, starts: list[int], shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    """Return the parts of a flat tensor as views of these shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return tuple(
        whole[start : start + size].view(shape) for start, size, shape in zip(starts, sizes, shapes, strict=True)
    )
