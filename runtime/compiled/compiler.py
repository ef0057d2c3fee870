"""Compile fused regions by torch's Inductor, each distinct one once in a process.

All layers, microbatches and ranks share it. Inductor caches its code on disk, by the lines of the region, sizes,
strides, dtypes, device and the version of torch (TORCHINDUCTOR_CACHE_DIR, else a folder of the user's below /tmp):
another run, or another process of the same machine, loads it in milliseconds. If several processes of a machine need a
region at the same time, one compiles it and the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.torch_private import inductor_compiled, no_compiler

Run = Callable[[list[Tensor]], Any]
#: Seconds after which a note names the region that is being compiled.
PATIENCE = 2.0
_LOCK = threading.RLock()
_DONE: dict[Any, Run | str] = {}  # of this process; the reason where Inductor fails
_EXPECTED: dict[str, None] = {}
_REPORTED: set[str] = set()


class Compiler:
    """The compiler of one program. strict: a region that cannot be compiled is an error, not a note."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def expect(self, key: str) -> None:
        """Count a region that will be compiled, for the number that is shown."""
        _EXPECTED[key] = None

    def compiled(
        self, key: str, function: Callable[..., Any], inputs: Sequence[Tensor], where: str, *, any_rows: bool = False
    ) -> Run | None:
        """Compile a function of tensors for inputs of these sizes, strides and dtypes.

        Returns None if it has to run line by line; a note has said why. key: of its lines; where: for messages;
        any_rows: for any size of the first dims. Raises ShardcError under `strict` if it cannot be compiled.
        """
        sizes = ((tuple(x.shape[any_rows:]), x.stride(), x.dtype, x.device) for x in inputs)
        whole = (key, *sizes, torch.get_num_threads())
        with _LOCK:
            if whole not in _DONE:
                run = partial(inductor_compiled, function, inputs, any_rows=any_rows)
                _DONE[whole] = self._compile(key, repr(whole), run, inputs[0].device, where)
            result = _DONE[whole]
        if not isinstance(result, str):
            return result
        if self._strict:
            fix = "leave `strict` out, or `compile: layers`"
            raise ShardcError(f"a region is not compiled: {result}", where=where, fix=fix)
        return None

    def _compile(
        self, key: str, whole: str, compiled: Callable[[], Run], device: torch.device, where: str
    ) -> Run | str:
        if why := no_compiler(device):
            _warn(f"regions are not compiled, and run line by line: {why}")
            return why
        number = f"{list(_EXPECTED).index(key) + 1} of {len(_EXPECTED)}"
        try:
            with _print_progress(f"compiling region {number} ({where})"), _alone(whole):
                return compiled()
        except Exception as e:  # compilers raise any class
            message = (str(e).strip() or type(e).__name__).splitlines()[0]
            _warn(f"region {number} ({where}) is not compiled, and runs line by line: {type(e).__name__}: {message}")
            return f"{type(e).__name__}: {message}"


def _warn(text: str) -> None:
    """Print a note once, on the first rank's stderr."""
    if text not in _REPORTED and os.environ.get("RANK", "0") == "0":
        _REPORTED.add(text)
        print(f"note: {text}", file=sys.stderr, flush=True)


@contextmanager
def _print_progress(text: str) -> Iterator[None]:
    """Print a note about work that takes long."""
    began, timer = time.monotonic(), threading.Timer(PATIENCE, _warn, (f"{text} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if f"{text} ..." in _REPORTED:
            _REPORTED.discard(f"{text} ...")
            _warn(f"{text} took {time.monotonic() - began:.1f} s")


@contextmanager
def _alone(key: str) -> Iterator[None]:
    """Hold a lock so that no other process of this user compiles the same region now."""
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()) / f"shardc-locks-{os.getuid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / hashlib.sha256(key.encode()).hexdigest()[:32], "a")  # noqa: SIM115 (held below)
    except OSError:  # cannot write: every process compiles
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # closing is not enough: a process forked in the meantime has the same lock
            fcntl.flock(file, fcntl.LOCK_UN)
