"""Activation offload: tensors that wait on the CPU from forward to backward (`checkpoint: {offload: cpu}`).

On CUDA the copies run on a stream of their own, overlapped with the computation, into and out of pinned memory. The
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
