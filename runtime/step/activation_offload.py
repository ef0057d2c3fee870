"""Activation offload: tensors that wait on the CPU from forward to backward (`checkpoint: {offload: cpu}`).

On CUDA the copies run on a stream of their own, overlapped with the computation, into and out of pinned memory.
(Compare torch.autograd.graph.save_on_cpu, whose copies the computation waits for.) While backward works with one
tensor, the one that it will ask for next is already copied back: known from the last backward of the same graph, which
asked in the same order; in the first one, the one that forward kept before. So one tensor more than is asked for is on
the device, and only the first one that backward asks for is waited for.
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

    def keep(self, x: Tensor) -> OffloadedTensor:
        """Begin to copy x to the CPU."""
        kept = OffloadedTensor(x.detach(), self, len(self._all))
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

    def __init__(self, x: Tensor, among: OffloadedTensors, number: int) -> None:
        self._among, self._number = among, number
        self._shared: weakref.ref[Tensor] | None = None  # what was fetched, as long as somebody works with it
        self._coming: tuple[Tensor, Any] | None = None  # the copy that is under way, and the event of its end
        self._cpu = among.host(x)
        stream = among.stream
        if stream is None:
            self._cpu.copy_(x)
            return
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self._cpu.copy_(x, non_blocking=True)
        x.record_stream(stream)  # its memory is not used anew before the copy is done

    def begin(self) -> None:
        """Begin to copy it back. If it is on its device, it stays there until it is asked for."""
        if self._coming is not None:
            return
        here = self._shared() if self._shared is not None else None
        if here is not None:
            self._coming = here, None
            return
        device, stream = self._among.device, self._among.stream
        if stream is None:
            self._coming = self._cpu.to(device, copy=True), None
            return
        with torch.cuda.stream(stream):  # behind the copy to the CPU
            x = torch.empty_like(self._cpu, device=device)
            x.copy_(self._cpu, non_blocking=True)
            self._coming = x, stream.record_event()

    def fetch(self) -> Tensor:
        """The tensor on its device again. The one that will be asked for next begins to come."""
        self.begin()
        assert self._coming is not None
        (x, ready), self._coming = self._coming, None
        if ready is not None:
            compute = torch.cuda.current_stream(self._among.device)
            compute.wait_event(ready)
            x.record_stream(compute)
        self._shared = weakref.ref(x)
        self._among.asked(self._number)
        return x
