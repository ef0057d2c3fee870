"""One run at a time trains into a folder: a job that was submitted twice would otherwise go on from the other's
checkpoints, and replace them.

A POSIX lock, held by the process that writes: it goes with the process, however that ends (kill -9), is not inherited
by what it forks (a DataLoader's workers, which may live on for seconds), and is seen by other machines where the file
system is one of a network that has locks (NFS does). Where it has none, saves still refuse a folder in which somebody
else has saved meanwhile (shardc.runtime.state.saving).
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from shardc.errors import ShardcError

NAME = ".run-lock"


class SaveLock:
    """The right to save, or to log, to a folder, until `release`, or the end of the process. Raises ShardcError where
    another run has it.
    """

    def __init__(self, folder: Path, option: str = "--save") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            holder = os.pread(self._file, 200, 0).decode(errors="replace").strip()
            if e.errno in (errno.EACCES, errno.EAGAIN):
                os.close(self._file)
                fault = f"another run trains into {folder}{f' ({holder})' if holder else ''}"
                fix = "wait for it or end it, or give this run a folder of its own"
                raise ShardcError(fault, where=option, fix=fix) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    @classmethod
    def of(cls, folders: Mapping[str, str]) -> list[SaveLock]:
        """Of {option: folder}, those that are given; of one that several name, one: a process that closes a file loses
        all its locks of it.
        """
        named = {Path(folder).resolve(): (Path(folder), option) for option, folder in folders.items() if folder}
        return [cls(folder, option) for folder, option in named.values()]

    def release(self) -> None:
        os.ftruncate(self._file, 0)
        os.close(self._file)
