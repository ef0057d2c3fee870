"""Copy tensors between a device and the host asynchronously.

A copy from or to ordinary (pageable) memory makes the host wait until the GPU has finished all queued work; one from or
to pinned memory is queued like any other work.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_host(x: Tensor) -> Tensor:
    """Copy x to the CPU and wait for it. It is the one wait for the device where Python needs values."""
    if x.device.type != "cuda":
        return x.cpu()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    copied.synchronize()
    return host


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy x from the CPU to a device, without waiting. x may be changed or freed afterwards."""
    if device.type == "cuda" and not x.is_pinned():
        x = x.pin_memory()  # torch keeps it until the copy is done
    return x.to(device, non_blocking=True)
