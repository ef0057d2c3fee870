"""Let only one run at a time train into a folder.

A job that was submitted twice would continue from the other's checkpoints, and replace them. The lock is a POSIX lock
of the process that writes. It always ends with the process (kill -9). Forked processes do not inherit it (workers of a
DataLoader may live on for seconds). Other machines see it on a network file system with locks, such as NFS. Without
locks, a save still refuses a folder in which another run has saved since (shardc.runtime.state.saving).
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from shardc.errors import ShardcError
from shardc.runtime.mesh.watch import within
from shardc.runtime.storage import disk_calls
from shardc.runtime.storage.urls import Url
from shardc.runtime.time_limits import FAILING

NAME = ".run-lock"


def lock(folder: Path, option: str = "--save") -> int:
    """Take the right to save, or to log, to a folder, until the end of the process or of the file that is returned.

    Raises ShardcError if another run has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        holder = os.pread(file, 200, 0).decode(errors="replace").strip()
        if e.errno in (errno.EACCES, errno.EAGAIN):
            os.close(file)
            fault = f"another run trains into {folder}{f' ({holder})' if holder else ''}"
            fix = "wait for it or end it, or use another folder for this run"
            raise ShardcError(fault, where=option, fix=fix) from None
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return file


def lock_all(folders: Mapping[str, str]) -> list[int]:
    """Lock each folder of {option: folder} that is set, only once if several options name it.

    A process that closes a file loses all its POSIX locks on it.
    """
    paths = {option: disk_calls.expanded(folder) for option, folder in folders.items() if folder}
    named = {path.resolve(): (path, option) for option, path in paths.items()}
    return [lock(*each) for each in named.values() if not isinstance(each[0], Url)]  # a store has no locks


def check_shared(save: str) -> None:
    """Raise ShardcError if the lock of rank 0 is not in this folder: it is on another disk, and no save would work."""
    folder = disk_calls.expanded(save)
    if save and not isinstance(folder, Url) and not within(FAILING, (folder / NAME).exists):
        fault = f"on {socket.gethostname()}, {folder.absolute()} is not the folder of rank 0"
        raise ShardcError(fault, where="--save", fix="name a folder that all machines see, or a URL (s3://bucket/run)")
