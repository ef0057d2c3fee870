"""Record the memory of CUDA's allocator, and keep a stream busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.cuda.memory import _dump_snapshot, _record_memory_history  # documented under these names


@contextmanager
def memory_recorded(file: Path) -> Iterator[None]:
    """Record what CUDA's allocator does, with lines of code, for https://pytorch.org/memory_viz."""
    _record_memory_history(max_entries=1_000_000)
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        _dump_snapshot(str(file))  # type: ignore[no-untyped-call]
        _record_memory_history(enabled=None)


def busy_gpu(cycles: int = 200_000) -> None:
    """Keep the current GPU's stream busy for a tenth of a millisecond, without memory access.

    Kernels that are queued meanwhile start directly after each other. (torch's tests of streams use it.)
    """
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
