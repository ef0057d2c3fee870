"""What the C library (glibc) does with memory that is freed on a CPU: by default it gives large blocks back, and asks
for them again.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_SMALL, _LARGE, _ALLOWED = 2**20, 2**30, 2**25  # bytes; older versions take no more than 32 MiB


def keep_freed() -> None:
    """Keep it for what comes next, for the rest of this process, as a GPU's caching allocator does.

    A training step frees and allocates the same sizes over and over: pages that went back to the system come anew, each
    filled with zeros. Who has set glibc's own variables (MALLOC_TRIM_THRESHOLD_, ...) is left what was set.
    """
    if not any(name.startswith("MALLOC_") for name in os.environ):
        _set({_M_TRIM_THRESHOLD: _LARGE, _M_MMAP_THRESHOLD: _LARGE})


def return_freed() -> None:
    """Give blocks of 1 MiB and more back at once, for the rest of this process.

    glibc keeps some, and aligned ones, as torch's are, seldom fit what comes next: with `data.offload` that held as
    many MiB as files had freed. Each block is then paged in anew, which costs time where steps compute little.
    """
    _set({_M_MMAP_THRESHOLD: _SMALL})


def _set(values: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, size in values.items():
            _ = mallopt(setting, size) or mallopt(setting, min(size, _ALLOWED))
