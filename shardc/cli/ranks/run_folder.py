"""Make the temporary folder of a run; the next run removes the folder of a run that was killed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME, _LOCK = "shardc-run-", ".lock"


@contextmanager
def run_folder() -> Iterator[Path]:
    """Yield a new folder, after the removal of folders that killed runs left. It is removed at the end."""
    from shardc.runtime.state.disk_calls import Lock

    for left in Path(tempfile.gettempdir()).glob(f"{_NAME}*/{_LOCK}"):
        with suppress(OSError):  # it is in use, removed, or of another user
            lock = Lock(left)
            shutil.rmtree(left.parent, ignore_errors=True)
            lock.release()
    with tempfile.TemporaryDirectory(prefix=_NAME) as folder:
        path = Path(folder) / ".new"
        lock = Lock(path)  # locked before it gets the name that others look for
        path.rename(Path(folder) / _LOCK)
        try:
            yield Path(folder)
        finally:
            lock.release()
