"""Connections to other ranks belong to one process: those that it forks, as DataLoader does its workers, close them.

A connection ends with the last process that has it open. If a worker kept it, ranks that wait for one that left, or was
killed, would not be woken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_OPEN = "/proc/self/fd"  # Linux; elsewhere nothing is known, and nothing closed
_ours: dict[int, str] = {}  # by descriptor: which socket, as the number may be given anew


@contextmanager
def not_inherited() -> Iterator[None]:
    """What is connected meanwhile stays with this process."""
    before = _sockets()
    try:
        yield
    finally:
        _ours.update(_sockets().items() - before.items())


def _sockets() -> dict[int, str]:
    """{descriptor: "socket:[NUMBER]"}"""
    with suppress(OSError):
        return {fd: name for fd in map(int, os.listdir(_OPEN)) if (name := _name(fd)).startswith("socket:")}
    return {}


def _name(descriptor: int) -> str:
    with suppress(OSError):
        return os.readlink(f"{_OPEN}/{descriptor}")
    return ""


def _close() -> None:
    """In a process that was forked."""
    for fd, name in _ours.items():
        if _name(fd) == name:
            os.close(fd)
    _ours.clear()


os.register_at_fork(after_in_child=_close)
