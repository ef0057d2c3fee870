"""The temporary folder of a run: gone when the run is, also one that was killed, as the next run removes it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME, _LOCK = "shardc-run-", ".lock"


@contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder. What runs that were killed have left is removed first."""
    from shardc.runtime.state.disk_calls import Lock

    for left in Path(tempfile.gettempdir()).glob(f"{_NAME}*/{_LOCK}"):
        with suppress(OSError):  # it is in use, gone already, or somebody else's
            lock = Lock(left)
            shutil.rmtree(left.parent, ignore_errors=True)
            lock.release()
    with tempfile.TemporaryDirectory(prefix=_NAME) as folder:
        path = Path(folder) / ".new"
        lock = Lock(path)  # locked before it has the name by which others find it
        path.rename(Path(folder) / _LOCK)
        try:
            yield Path(folder)
        finally:
            lock.release()
