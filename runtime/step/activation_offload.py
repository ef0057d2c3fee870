"""Tensors that wait on the CPU from forward to backward (`checkpoint: {offload: cpu}`).

On CUDA the copies run on a stream of their own, beside the computation, into and out of pinned memory. (Compare
torch.autograd.graph.save_on_cpu, whose copies the computation waits for.)
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


def beside(device: torch.device) -> Any:
    """A stream for the copies of one forward and its backward, or None where there are no streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class Away:
    """A tensor on the CPU. All who take it `back` at a time share one copy. stream: `beside` its device."""

    def __init__(self, x: Tensor, stream: Any) -> None:
        self.device, self._stream = x.device, stream
        self._here: weakref.ref[Tensor] | None = None
        x = x.detach()
        self._cpu = self._room(x)
        if stream is None:
            self._cpu.copy_(x)
            return
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self._cpu.copy_(x, non_blocking=True)
        x.record_stream(stream)  # its memory is not used anew before the copy is done

    def _room(self, x: Tensor) -> Tensor:
        """On the CPU, for what is in x."""
        return torch.empty_like(x, device="cpu", pin_memory=self._stream is not None)

    @staticmethod
    def useful(x: Tensor) -> bool:
        """Is there another place than the CPU that this would free?"""
        return x.device.type not in ("cpu", "meta")

    def back(self) -> Tensor:
        """On its device again."""
        x = self._here() if self._here is not None else None
        if x is None:
            x = self._fetched()
            self._here = weakref.ref(x)
        return x

    def _fetched(self) -> Tensor:
        if self._stream is None:
            return self._cpu.to(self.device, copy=True)
        here = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):  # behind the copy to the CPU
            x = torch.empty_like(self._cpu, device=self.device)
            x.copy_(self._cpu, non_blocking=True)
        here.wait_stream(self._stream)
        x.record_stream(here)
        return x
