"""Close connections to other ranks in processes that this one forks, such as workers of a DataLoader.

A connection ends with the last process that has it open. If a worker kept it, ranks that wait for one that left, or was
killed, would not be woken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_OPEN = "/proc/self/fd"  # Linux only; elsewhere nothing is closed
_ours: dict[int, str] = {}  # {descriptor: socket}, as descriptors are reused


@contextmanager
def not_inherited() -> Iterator[None]:
    """Keep the connections that are made in this context out of forked processes."""
    before = _sockets()
    try:
        yield
    finally:
        _ours.update(_sockets().items() - before.items())


def _sockets() -> dict[int, str]:
    """Return {descriptor: "socket:[NUMBER]"} of this process."""
    with suppress(OSError):
        return {fd: name for fd in map(int, os.listdir(_OPEN)) if (name := _name(fd)).startswith("socket:")}
    return {}


def _name(descriptor: int) -> str:
    with suppress(OSError):
        return os.readlink(f"{_OPEN}/{descriptor}")
    return ""


def _close() -> None:
    """Close the registered sockets, in a forked process."""
    for fd, name in _ours.items():
        if _name(fd) == name:
            os.close(fd)
    _ours.clear()


os.register_at_fork(after_in_child=_close)
