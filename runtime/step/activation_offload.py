"""Activation offload: tensors that wait on the CPU from forward to backward (`checkpoint: {offload: cpu}`).

On CUDA the copies run on a stream of their own, overlapped with the computation, into and out of pinned memory.
(Compare torch.autograd.graph.save_on_cpu, whose copies the computation waits for.)
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


def copy_stream(device: torch.device) -> Any:
    """A CUDA stream for the copies of one forward and its backward, or None where there are no streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class OffloadedTensor:
    """A tensor that is kept on the CPU. All who `fetch` it at a time share one copy. stream: `copy_stream` of its
    device."""

    def __init__(self, x: Tensor, stream: Any) -> None:
        self.device, self._stream = x.device, stream
        self._fetched: weakref.ref[Tensor] | None = None
        x = x.detach()
        self._cpu = self._host(x)
        if stream is None:
            self._cpu.copy_(x)
            return
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self._cpu.copy_(x, non_blocking=True)
        x.record_stream(stream)  # its memory is not used anew before the copy is done

    def _host(self, x: Tensor) -> Tensor:
        """A tensor of x's shape on the CPU."""
        return torch.empty_like(x, device="cpu", pin_memory=self._stream is not None)

    @staticmethod
    def useful(x: Tensor) -> bool:
        """Does this free memory of a device? On the CPU it would only copy."""
        return x.device.type not in ("cpu", "meta")

    def fetch(self) -> Tensor:
        """The tensor on its device again."""
        x = self._fetched() if self._fetched is not None else None
        if x is None:
            x = self._copy()
            self._fetched = weakref.ref(x)
        return x

    def _copy(self) -> Tensor:
        if self._stream is None:
            return self._cpu.to(self.device, copy=True)
        compute = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):  # behind the copy to the CPU
            x = torch.empty_like(self._cpu, device=self.device)
            x.copy_(self._cpu, non_blocking=True)
        compute.wait_stream(self._stream)
        x.record_stream(compute)
        return x
