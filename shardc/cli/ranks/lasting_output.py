"""Keep a run alive when its output cannot be written: `| head`, a closed terminal, a full disk.

The text that cannot be written is dropped, and the run continues: no training should be lost because a `print` of
shardc or of the user fails.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable


class _Lasting(io.RawIOBase):
    """A file descriptor to write to. After an error it drops text; the first error goes to a callback."""

    def __init__(self, descriptor: int, on_error: Callable[[OSError], None]) -> None:
        self._descriptor, self._on_error, self._failed = descriptor, on_error, False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        while True:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # a full pipe that does not block
                select.select([], [self._descriptor], [])
            except OSError as e:
                if not self._failed:
                    self._failed = True
                    self._on_error(e)
                return len(data)


def install(*, report_loss: bool = True) -> None:
    """Protect `sys.stdout` and `sys.stderr` if they are the originals. report_loss: report a lost stdout."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None and not isinstance(_raw(sys.stdout), _Lasting):
        sys.stdout = sys.__stdout__ = _lasting(sys.stdout, _report_loss if report_loss else _ignore)  # type: ignore[misc]
    if sys.stderr is sys.__stderr__ and sys.stderr is not None and not isinstance(_raw(sys.stderr), _Lasting):
        sys.stderr = sys.__stderr__ = _lasting(sys.stderr, _ignore)  # type: ignore[misc]


def _raw(stream: object) -> object:
    return getattr(getattr(stream, "buffer", None), "raw", None)


def _lasting(stream: io.TextIOWrapper | object, on_error: Callable[[OSError], None]) -> io.TextIOWrapper:
    assert isinstance(stream, io.TextIOWrapper)
    try:
        stream.flush()
    except OSError as e:
        on_error(e)
    raw = io.BufferedWriter(_Lasting(stream.fileno(), on_error))  # type: ignore[type-var]
    lines = stream.line_buffering or stream.isatty()
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=lines)


def _ignore(_: OSError) -> None:
    """Ignore the error: there is no place to report it."""


def _report_loss(error: OSError) -> None:
    print(
        f"note: standard output is closed ({error.strerror}): the run goes on without its lines"
        " (--log DIR keeps every step in a file)",
        file=sys.stderr,
        flush=True,
    )
