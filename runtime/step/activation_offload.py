"""Activation offload: tensors that wait on the CPU from forward to backward (`checkpoint: {offload: cpu}`).

On CUDA the copies run on a stream of their own, overlapped with the computation, into and out of pinned memory.
(Compare torch.autograd.graph.save_on_cpu, whose copies the computation waits for.) Under autograd: while backward works
with one tensor, the one that it will ask for next is already copied back: known from the last backward of the same
graph, which asked in the same order; in the first one, the one that forward kept before. So one tensor more than is
asked for is on the device, and only the first one that backward asks for is waited for.

A lowered stage says itself when copies begin and are waited for (shardc.runtime.ops.host_handle).
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor


class OffloadedTensors:
    """What one forward keeps on the CPU, numbered in the order in which it was kept. after: which one
    backward asked for after it had asked for one (its number) for the n-th time; all forwards of a graph share it.
    """

    def __init__(self, device: torch.device, after: dict[tuple[int, int], int]) -> None:
        self.device, self._after = device, after
        on_gpu = device.type == "cuda"
        self.stream: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.ahead = on_gpu  # elsewhere copies are not in the background: to copy ahead would gain nothing
        self._all: list[weakref.ref[OffloadedTensor]] = []
        self._asked: tuple[int, int] | None = None  # what backward asked for last
        self._times: Counter[int] = Counter()

    @staticmethod
    def useful(x: Tensor) -> bool:
        """Does this free memory of a device? On the CPU it would only copy."""
        return x.device.type not in ("cpu", "meta")

    def host(self, x: Tensor) -> Tensor:
        """A tensor of x's shape on the CPU."""
        return torch.empty_like(x, device="cpu", pin_memory=self.stream is not None)

    def to_host(self, x: Tensor, tag: str = "") -> tuple[Tensor, Any]:
        """Begin to copy x to the CPU, behind what computes it: (its place there, for `wait`). tag: the region."""
        kept = self.host(x)
        if self.stream is None:
            return kept.copy_(x), None
        self.stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.stream):
            kept.copy_(x, non_blocking=True)
            return kept, self.stream.record_event()

    def to_device(self, kept: Tensor, *, behind: bool = False, tag: str = "") -> tuple[Tensor, Any]:
        """Begin to copy what is on the CPU back: (the tensor, what `wait` takes). behind: no earlier than what was
        computed so far, in memory that this has freed; else as soon as the copies before it are done.
        """
        if self.stream is None:
            return kept.to(self.device, copy=True), None
        compute = torch.cuda.current_stream(self.device)
        if behind:
            x = torch.empty_like(kept, device=self.device)
            self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            if not behind:
                x = torch.empty_like(kept, device=self.device)
            x.copy_(kept, non_blocking=True)
            return x, self.stream.record_event()

    def wait(self, copied: Any) -> None:
        """What is computed from here on comes behind a copy."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)

    def keep(self, x: Tensor, tag: str = "") -> OffloadedTensor:
        """Begin to copy x to the CPU."""
        kept = OffloadedTensor(x.detach(), self, len(self._all), tag)
        self._all.append(weakref.ref(kept))
        return kept

    def asked(self, number: int) -> None:
        """Backward has got this one. Begin to copy back what it will ask for next."""
        if not self.ahead:
            return
        if self._asked is not None:
            self._after[self._asked] = number
        self._times[number] += 1
        self._asked = number, self._times[number]
        # what was recorded may be past the end (a forward that keeps fewer), and nothing was kept before the first
        following = self._after.get(self._asked, number - 1)
        if 0 <= following < len(self._all) and (kept := self._all[following]()) is not None:
            kept.begin()


class OffloadedTensor:
    """A tensor that is kept on the CPU. All who `fetch` it at a time share one copy."""

    def __init__(self, x: Tensor, among: OffloadedTensors, number: int, tag: str) -> None:
        self._among, self._number, self._tag = among, number, tag
        self._shared: weakref.ref[Tensor] | None = None  # what was fetched, as long as somebody works with it
        self._coming: tuple[Tensor, Any] | None = None  # the copy that is under way, and what `wait` takes
        self._cpu, _ = among.to_host(x, tag)
        if among.stream is not None:
            x.record_stream(among.stream)  # its memory is not used anew before the copy is done

    def begin(self) -> None:
        """Begin to copy it back. If it is on its device, it stays there until it is asked for."""
        if self._coming is not None:
            return
        here = self._shared() if self._shared is not None else None
        self._coming = (here, None) if here is not None else self._among.to_device(self._cpu, tag=self._tag)

    def fetch(self) -> Tensor:
        """The tensor on its device again. The one that will be asked for next begins to come."""
        self.begin()
        assert self._coming is not None
        (x, copied), self._coming = self._coming, None
        self._among.wait(copied)
        if self._among.stream is not None:
            x.record_stream(torch.cuda.current_stream(self._among.device))
        self._shared = weakref.ref(x)
        self._among.asked(self._number)
        return x
