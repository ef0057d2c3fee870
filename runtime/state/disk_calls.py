"""Every call by which a checkpoint reaches a disk, in one place: what is written is on the disk before it gets its
name, and tests put a crash, a full disk or an I/O error into any of these calls.

    write, read       bytes at a place in an open file, all of them
    Stream            a new file from its beginning to its end, past the system's cache
    sync, sync_folder until the disk has them (fsync); of a folder, the names in it
    rename, unlink    the two calls that change what a name means; a name appears and disappears at once
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

PAGE = 4096  # bytes; where memory and a file's place have to begin for O_DIRECT
#: Bytes that a stream collects before it writes them.
BUFFER = 1 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # systems other than Linux lack it


def create(path: Path) -> int:
    """A new file, open for writing; its descriptor. Raises FileExistsError where the name is taken."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(descriptor: int, data: memoryview, place: int) -> None:
    """All bytes of data, from `place` on. Raises OSError: a full disk, an I/O error."""
    while data:
        count = os.pwrite(descriptor, data, place)
        data, place = data[count:], place + count


class Stream:
    """A new file that is written from its beginning to its end, past the system's cache where the file system can do
    so (O_DIRECT): copying 512 MiB into that cache takes 0.5 s of a core here, which the steps beside a save lack, and
    what the disk fetches by itself 0.03 s. It fetches whole pages; so what does not begin at the same place of a page
    in memory as in the file (`aligned`) is collected in a buffer first, for 0.08 s.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = create(path)
        self._memory = np.frombuffer(mmap.mmap(-1, BUFFER), dtype=np.uint8)  # begins at a page
        self._filled = self._place = 0  # bytes in it, and in the file
        self._page = PAGE if self._set(direct=True) else 1

    def add(self, data: memoryview) -> None:
        """More bytes. Raises OSError: a full disk, an I/O error."""
        given = np.frombuffer(data, dtype=np.uint8)
        place = self._place + self._filled
        if len(given) >= BUFFER and (given.ctypes.data - place) % self._page == 0:
            start = -place % self._page
            stop = len(given) - (len(given) - start) % self._page
            self._collect(given[:start])
            self._write(self._memory[: self._filled])
            self._write(given[start:stop])
            self._filled, given = 0, given[stop:]
        self._collect(given)

    def _collect(self, given: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        while len(given):
            count = min(len(given), BUFFER - self._filled)
            np.copyto(self._memory[self._filled : self._filled + count], given[:count])  # other threads run meanwhile
            self._filled, given = self._filled + count, given[count:]
            if self._filled == BUFFER:
                self._write(self._memory)
                self._filled = 0

    def finish(self) -> None:
        """Until the disk has all of it."""
        self._set(direct=False)  # what is left fills no page
        self._write(self._memory[: self._filled])
        sync(self.descriptor)

    def close(self) -> None:
        """Without it, the file stays open. What was not finished may be missing."""
        os.close(self.descriptor)

    def _write(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        try:
            write(self.descriptor, data.data, self._place)
        except OSError as e:
            if self._page == 1 or e.errno != errno.EINVAL:
                raise
            self._set(direct=False)  # its pages are larger, or it took a part of one
            self._page = 1
            write(self.descriptor, data.data, self._place)
        self._place += len(data)

    def _set(self, *, direct: bool) -> bool:
        """Whether that can be."""
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | _DIRECT if direct else flags & ~_DIRECT)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            return False
        return bool(_DIRECT)


def aligned(nbytes: int, place: int, *, pinned: bool = False) -> Tensor:
    """Memory u8[nbytes] for what a file has from `place` on, which a stream writes without copying it."""
    import torch  # others read and write bytes

    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=pinned)
    start = (place - memory.data_ptr()) % PAGE
    return memory[start : start + nbytes]


def sync(descriptor: int) -> None:
    """Until the disk has what was written."""
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Until the disk has the names in a folder."""
    with _open(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def rename(old: Path, new: Path) -> None:
    """The name becomes another one, at once; a folder of that name has to be empty."""
    os.rename(old, new)


def unlink(path: Path) -> None:
    """Remove a file."""
    os.unlink(path)


def make_folder(path: Path) -> None:
    """A folder, with those above it that are missing."""
    path.mkdir(parents=True, exist_ok=True)


def remove_folder(path: Path) -> None:
    """A folder of files, and the files in it, which need not be there."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(path):
            unlink(path / name)
        os.rmdir(path)


def write_file(path: Path, data: bytes) -> None:
    """A new file, on the disk when this returns."""
    descriptor = create(path)
    try:
        write(descriptor, memoryview(data), 0)
        sync(descriptor)
    finally:
        os.close(descriptor)


# --- reading: the files may be anybody's


@contextlib.contextmanager
def opened(path: Path, *, links: bool = False) -> Iterator[int]:
    """A regular file, open for reading. links: follow a symbolic link, which may lead out of the folder. Raises OSError
    for anything else, such as a pipe, which would be waited for.
    """
    with _open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        yield descriptor


def read_into(descriptor: int, into: memoryview, place: int) -> None:
    """Bytes from `place` on, as many as fit. Raises OSError where the file is shorter."""
    while into:
        count = os.preadv(descriptor, [into], place)
        if not count:
            raise OSError(f"the file ends at byte {place}")
        into, place = into[count:], place + count


def read_file(path: Path, limit: int) -> bytes:
    """A whole regular file. Raises OSError for one of more than `limit` bytes, before it is read."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise OSError(f"the file has {size} bytes, more than {limit}")
        data = bytearray(size)
        read_into(descriptor, memoryview(data), 0)
        return bytes(data)


@contextlib.contextmanager
def _open(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# --- one writer at a time


def named(path: str | Path) -> Path:
    """The path that a user wrote, of which `~` is the home folder, as in a shell."""
    return Path(path).expanduser()


class Lock:
    """A lock on a folder, held by a process until it lets go or ends, however it ends. file: made if it is missing.

    Raises BlockingIOError where somebody else has it. A file system that knows no locks gives one to everybody.
    """

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                os.close(self._descriptor)
                raise

    def release(self) -> None:
        # closing is not enough: a process forked meanwhile, such as a DataLoader's worker, holds the same lock
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
