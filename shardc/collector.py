"""Decide when Python's cyclic garbage collector runs: not while graphs are written, and seldom in a command.

Its collections visit all objects of torch and of the graphs, and find little garbage: a sixth of the time to compile.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0  # contexts that are open now, of all threads
_was_enabled = False  # before the first of them

_DEFAULT = gc.get_threshold()


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn the collector off in this context, for all threads; contexts may be nested."""
    global _inside, _was_enabled
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_enabled:
                gc.enable()


def collect_seldom() -> None:
    """Raise the thresholds, in a command whose objects live until it ends."""
    gc.set_threshold(1_000_000, 5, 100)


def collect_as_usual() -> None:
    """Restore the default thresholds, in a rank that trains, and exclude existing objects from collection.

    A model's objects may form reference cycles, which hold a step's memory until they are collected.
    """
    gc.freeze()
    gc.set_threshold(*_DEFAULT)
