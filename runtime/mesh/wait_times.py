"""Measure how long a rank waits for its collectives, by their axes, for `shardc run --log`.

On a CPU the process waits, and its clock measures it. On a GPU the host goes on at once, and the stream of the
computation waits: one event before and one after measure it, and are read together with the loss of the step.
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
    """A wait for a collective. bytes: as of CommRecord; whole: from its start, so it is the whole time."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    seconds: float
    whole: bool


class Waits:
    """The waits of one rank. on: measure them. inside: one runs now. kept: the list of all, or None."""

    def __init__(self, device: torch.device) -> None:
        self.on = self.inside = False
        self.kept: list[Wait] | None = None
        self._device = device
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[tuple[str, tuple[str, ...], int, bool, Any, Any]] = []

    @contextmanager
    def during(self, kind: str, axes: tuple[str, ...], nbytes: int, *, whole: bool) -> Iterator[None]:
        """Measure the wait for a collective."""
        if self.inside or not self.on:
            yield
            return
        self.inside = True
        begin = self._now()
        try:
            yield
        finally:
            self.inside = False
            self._open.append((kind, axes, nbytes, whole, begin, self._now()))

    def keep(self) -> None:
        """List all waits from now on."""
        self.read_times()
        self.kept = []

    def take(self) -> dict[str, float]:
        """Return {axes: seconds} since the last call ("dp", "dp+tp"). On a GPU it waits for the device."""
        self.read_times()
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken

    def read_times(self) -> None:
        """Read the times since the last call, which may be on the device."""
        on_device = self._device.type == "cuda"
        if self._open and on_device:
            torch.cuda.synchronize(self._device)
        for kind, axes, nbytes, whole, begin, end in self._open:
            seconds = begin.elapsed_time(end) / 1e3 if on_device else end - begin
            self._seconds["+".join(axes)] += seconds
            if self.kept is not None:
                self.kept.append(Wait(kind, axes, nbytes, seconds, whole))
        self._open.clear()

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        now = event()
        now.record()
        return now


def event() -> Any:
    """Return a CUDA event for a GPU's stream, whose time can be read later."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
