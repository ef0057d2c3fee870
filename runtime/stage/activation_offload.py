"""Offload activations to the CPU between forward and backward (`checkpoint: {offload: cpu}`).

On CUDA the copies run on a separate stream, overlapped with the computation, into and out of pinned memory. The
graphs say when copies begin and are waited for (shardc.runtime.ops.host_handle).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class OffloadedTensors:
    """Copies tensors to the CPU and back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self.stream: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    @staticmethod
    def useful(x: Tensor) -> bool:
        """Return whether offloading frees device memory. On the CPU it would only copy."""
        return x.device.type not in ("cpu", "meta")

    def host(self, x: Tensor) -> Tensor:
        """Allocate a tensor of x's shape on the CPU."""
        return torch.empty_like(x, device="cpu", pin_memory=self.stream is not None)

    def to_host(self, x: Tensor, tag: str = "") -> tuple[Tensor, Any]:
        """Begin to copy x to the CPU after its computation: (copy, handle for `wait`). tag: the region."""
        kept = self.host(x)
        if self.stream is None:
            return kept.copy_(x), None
        self.stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.stream):
            kept.copy_(x, non_blocking=True)
            return kept, self.stream.record_event()

    def to_device(self, kept: Tensor, *, behind: bool = False, tag: str = "") -> tuple[Tensor, Any]:
        """Begin to copy a tensor back to the device: (tensor, handle for `wait`).

        behind: start after all computation so far, in memory that it freed; else as soon as earlier copies are done.
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
        """Make later computation wait for a copy."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)
