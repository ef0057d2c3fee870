"""Keep a run alive when its output cannot be written: `| head`, a closed terminal, a full disk.

The text that cannot be written is dropped, and the run continues: no training should be lost because a `print` of
shardc or of the user fails.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys


class _Lasting(io.FileIO):
    """A file descriptor to write to. After an error it drops text. reports: print a note about the first error."""

    def __init__(self, descriptor: int, reports: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._reports = reports

    def write(self, data: bytes) -> int:  # type: ignore[override]
        while True:
            try:
                return os.write(self.fileno(), data)
            except BlockingIOError:  # a full pipe that does not block
                select.select([], [self.fileno()], [])
            except OSError as e:
                if self._reports:
                    self._reports = False
                    lost = f"note: standard output is closed ({e.strerror}): the run goes on without its lines"
                    print(f"{lost} (--log DIR keeps every step in a file)", file=sys.stderr, flush=True)
                return len(data)


def install(*, report_loss: bool = True) -> None:
    """Protect `sys.stdout` and `sys.stderr` if they are the originals. report_loss: report a lost stdout."""
    for name, reports in (("stdout", report_loss), ("stderr", False)):
        stream = getattr(sys, name)
        original = stream is not None and stream is getattr(sys, f"__{name}__")
        if not original or isinstance(getattr(stream.buffer, "raw", None), _Lasting):
            continue
        with contextlib.suppress(OSError):  # the next line of the run meets it, too
            stream.flush()
        raw = io.BufferedWriter(_Lasting(stream.fileno(), reports))  # type: ignore[type-var]
        lines = stream.line_buffering or stream.isatty()
        lasting = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=lines)
        setattr(sys, name, lasting)
        setattr(sys, f"__{name}__", lasting)
