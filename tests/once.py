"""Results that several tests need and that take long to make: one process of a run makes each, the others read it."""

from __future__ import annotations

import fcntl
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

FOLDER = Path()  # of this run, the same for all of its processes (conftest.py)
T = TypeVar("T")


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Of a function without arguments whose result can be pickled."""

    @functools.cache
    def result() -> T:
        file = FOLDER / f"{make.__module__}.{make.__name__}"
        with open(file.with_suffix(".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                file.write_bytes(pickle.dumps(make()))
        found: T = pickle.loads(file.read_bytes())
        return found

    return result
