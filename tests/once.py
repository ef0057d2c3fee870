"""Results that several tests need and that take long to make: once in a run of tests, or once in a process."""

from __future__ import annotations

import fcntl
import functools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

FOLDER = Path()  # of this run, the same for all of its processes (conftest.py)
P, T = ParamSpec("P"), TypeVar("T")


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Of a function without arguments: one process of the run calls it, the others read the pickle of its result."""

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


def once_each(make: Callable[P, T]) -> Callable[P, T]:
    """Of a function of names, numbers and dicts of them, such as specs: called once for the same ones.

    Its callers leave the result as it is: they share it.
    """
    made: dict[str, T] = {}

    @functools.wraps(make)
    def result(*args: P.args, **named: P.kwargs) -> T:
        key = json.dumps((args, named))
        if key not in made:
            made[key] = make(*args, **named)
        return made[key]

    return result
