"""How long a rank waits for its collectives, by their axes: what `shardc run --log` writes for every step.

On a CPU the process itself waits, and its clock says how long. On a GPU the host goes on at once, and the stream of the
computation waits: an event before and one after, read when the step's loss is.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Wait:
    """A collective that was waited for. bytes: as of CommRecord; of a receive those of its tensor. seconds: the wait.
    whole: from its begin on, so seconds are all that it took on this rank.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    seconds: float
    whole: bool


class Waits:
    """on: they are measured. inside: a collective is waited for now. kept: where each one is noted; None: nowhere."""

    def __init__(self, device: torch.device) -> None:
        self.on = self.inside = False
        self.kept: list[Wait] | None = None
        self._device = device
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[tuple[str, tuple[str, ...], int, bool, Any, Any]] = []

    @contextmanager
    def during(self, kind: str, axes: tuple[str, ...], nbytes: int, *, whole: bool) -> Iterator[None]:
        """Around what waits for a collective."""
        if self.inside or not self.on:
            yield
            return
        self.inside = True
        begin = self._now()
        try:
            yield
        finally:
            self.inside = False
            end = self._now()
            if self._device.type == "cuda":
                self._open.append((kind, axes, nbytes, whole, begin, end))
            else:
                self._add(Wait(kind, axes, nbytes, end - begin, whole))

    def take(self) -> dict[str, float]:
        """{axes: seconds} since the last time ("dp", "dp+tp"). On a GPU it waits for the device."""
        self.settle()
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken

    def settle(self) -> None:
        """Read what is still on the device."""
        if self._open:
            torch.cuda.synchronize(self._device)
        for kind, axes, nbytes, whole, begin, end in self._open:
            self._add(Wait(kind, axes, nbytes, begin.elapsed_time(end) / 1e3, whole))
        self._open.clear()

    def _add(self, wait: Wait) -> None:
        self._seconds["+".join(wait.axes)] += wait.seconds
        if self.kept is not None:
            self.kept.append(wait)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        now = event()
        now.record()
        return now


def event() -> Any:
    """A moment on a GPU's stream, whose time can be read later."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
