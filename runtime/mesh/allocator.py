"""Set what glibc does with large freed blocks on a CPU: by default it returns them to the system."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_SMALL, _LARGE, _ALLOWED = 2**20, 2**30, 2**25  # bytes; older versions take no more than 32 MiB


def keep_freed() -> None:
    """Keep freed memory for later, for the rest of this process, as a GPU's caching allocator does.

    A training step frees and allocates the same sizes over and over. Pages that went back to the system come back
    filled with zeros, which costs time. glibc's variables (MALLOC_TRIM_THRESHOLD_, ...) have priority if the user sets
    any.
    """
    if not any(name.startswith("MALLOC_") for name in os.environ):
        _set({_M_TRIM_THRESHOLD: _LARGE, _M_MMAP_THRESHOLD: _LARGE})


def return_freed() -> None:
    """Return blocks of 1 MiB and more to the system at once, for the rest of this process.

    glibc keeps some, and aligned ones, such as torch's, seldom fit later: with `data.offload` it kept as many MiB as
    files had freed. Each block is then paged in again, which costs time where steps compute little.
    """
    _set({_M_MMAP_THRESHOLD: _SMALL})


def _set(values: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, size in values.items():
            _ = mallopt(setting, size) or mallopt(setting, min(size, _ALLOWED))
