"""CUDA: a record of the allocator's memory, and work to keep a stream busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.cuda.memory import _dump_snapshot, _record_memory_history  # documented under these names


@contextmanager
def memory_recorded(file: Path) -> Iterator[None]:
    """Write what CUDA's allocator did meanwhile, with the lines that asked for it, for https://pytorch.org/memory_viz."""
    _record_memory_history(max_entries=1_000_000)
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        _dump_snapshot(str(file))  # type: ignore[no-untyped-call]
        _record_memory_history(enabled=None)


def busy_gpu(cycles: int = 200_000) -> None:
    """Give the current GPU's stream something to do that touches no memory, a tenth of a millisecond: kernels that are
    queued meanwhile begin one right behind the other. (torch's own tests of streams use it.)
    """
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
