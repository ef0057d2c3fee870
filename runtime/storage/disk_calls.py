"""Make every call by which a checkpoint reaches a disk, or a store (a `Url`), in one place.

Data is on the disk before it gets its name. Tests inject a crash, a full disk or an I/O error into any of these calls.

    write, read_into  all bytes at an offset of an open file
    write_file, read_file   a whole file
    opened            opens a regular file for reading
    new_file          a new file from its beginning to its end: a Stream, without the system's cache; aligned: memory
                      for it
    sync, sync_folder wait until the disk has them (fsync); of a folder, the names in it
    rename, unlink    the two calls that change what a name means; a name appears and disappears at once
    Lock              one writer at a time
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

from shardc.runtime.storage.urls import Remote, Upload, Url
from shardc.runtime.storage.urls import expanded as expanded

if TYPE_CHECKING:
    from torch import Tensor

#: A file that is open for reading: a descriptor, or an object of a store.
Opened = int | Remote
PAGE = 4096  # bytes; alignment of memory and file position for O_DIRECT
#: Bytes that a stream collects before it writes them.
BUFFER = 1 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # systems other than Linux lack it


def create(path: Path) -> int:
    """Create a new file, and return its descriptor for writing. Raises FileExistsError if it exists."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(descriptor: int, data: memoryview, place: int) -> None:
    """Write all bytes of data, from `place` on. Raises OSError: a full disk, an I/O error."""
    while data:
        count = os.pwrite(descriptor, data, place)
        data, place = data[count:], place + count


class Stream:
    """A new file, written from beginning to end, without the system's cache if possible (O_DIRECT).

    Copying into that cache takes a core's time that steps beside a save need. Direct writes take almost none, but the
    disk copies whole pages: data whose place in its page differs between memory and file (see `aligned`) is first
    collected in a buffer.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = create(path)
        self._memory = np.frombuffer(mmap.mmap(-1, BUFFER), dtype=np.uint8)  # begins at a page
        self._filled = self._place = 0  # bytes in it, and in the file
        self._page = PAGE if self._set(direct=True) else 1

    def add(self, data: memoryview) -> None:
        """Append bytes. Raises OSError: a full disk, an I/O error."""
        array = np.frombuffer(data, dtype=np.uint8)
        place = self._place + self._filled
        if len(array) >= BUFFER and (array.ctypes.data - place) % self._page == 0:
            start = -place % self._page
            stop = len(array) - (len(array) - start) % self._page
            self._collect(array[:start])
            self._write(self._memory[: self._filled])
            self._write(array[start:stop])
            self._filled, array = 0, array[stop:]
        self._collect(array)

    def _collect(self, given: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        while len(given):
            count = min(len(given), BUFFER - self._filled)
            np.copyto(self._memory[self._filled : self._filled + count], given[:count])  # other threads run meanwhile
            self._filled, given = self._filled + count, given[count:]
            if self._filled == BUFFER:
                self._write(self._memory)
                self._filled = 0

    def finish(self) -> None:
        """Write the rest, and wait until the disk has all of it."""
        self._set(direct=False)  # the rest fills no page
        self._write(self._memory[: self._filled])
        sync(self.descriptor)

    def close(self) -> None:
        """Close the file. Without `finish`, its end may be missing."""
        os.close(self.descriptor)

    def _write(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        try:
            write(self.descriptor, data.data, self._place)
        except OSError as e:
            if self._page == 1 or e.errno != errno.EINVAL:
                raise
            self._set(direct=False)  # the file system has larger pages, or wrote a part of one
            self._page = 1
            write(self.descriptor, data.data, self._place)
        self._place += len(data)

    def _set(self, *, direct: bool) -> bool:
        """Switch O_DIRECT on or off, and return whether that is possible."""
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | _DIRECT if direct else flags & ~_DIRECT)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            return False
        return bool(_DIRECT)


def new_file(path: Path) -> Stream | Upload:
    """Create a new file, to be written from beginning to end."""
    return Upload(path) if isinstance(path, Url) else Stream(path)


def aligned(nbytes: int, place: int, *, pinned: bool = False) -> Tensor:
    """Allocate u8[nbytes] for a file's bytes from `place` on, which a stream writes without a copy."""
    import torch  # here, since other users of this file need no torch

    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=pinned)
    start = (place - memory.data_ptr()) % PAGE
    return memory[start : start + nbytes]


def sync(descriptor: int) -> None:
    """Wait until the disk has what was written."""
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder."""
    if isinstance(path, Url):
        return  # a store answers when it has them
    with _open(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder atomically; a folder that it replaces must be empty."""
    os.rename(old, new)


def unlink(path: Path) -> None:
    """Remove a file."""
    path.unlink() if isinstance(path, Url) else os.unlink(path)


def make_folder(path: Path) -> None:
    """Make a folder, and missing folders above it."""
    path.mkdir(parents=True, exist_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder of files, which may be missing."""
    with contextlib.suppress(FileNotFoundError):
        if isinstance(path, Url):
            path.call("rm", recursive=True)
            return
        for name in os.listdir(path):
            unlink(path / name)
        os.rmdir(path)


def names(folder: Path) -> list[str]:
    """Return the names in a folder. Raises FileNotFoundError if it is missing."""
    return [x.name for x in folder.iterdir()] if isinstance(folder, Url) else os.listdir(folder)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file, which is on the disk when this returns."""
    if isinstance(path, Url):
        path.write_bytes(data)
        return
    descriptor = create(path)
    try:
        write(descriptor, memoryview(data), 0)
        sync(descriptor)
    finally:
        os.close(descriptor)


# --- reading: the files may be anybody's


@contextlib.contextmanager
def opened(path: Path, *, links: bool = False) -> Iterator[Opened]:
    """Open a regular file for reading. links: follow a symbolic link, which may leave the folder.

    Raises OSError for anything else, such as a pipe, which would block.
    """
    if isinstance(path, Url):
        yield Remote(path)
        return
    with _open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        yield descriptor


def size_of(descriptor: Opened) -> int:
    """Return the bytes of an open file."""
    return os.fstat(descriptor).st_size if isinstance(descriptor, int) else descriptor.size


def read_into(descriptor: Opened, into: memoryview, place: int) -> None:
    """Read bytes from `place` on until the buffer is full. Raises OSError if the file is shorter."""
    if not isinstance(descriptor, int):
        into[:] = descriptor.read(place, len(into))
        return
    while into:
        count = os.preadv(descriptor, [into], place)
        if not count:
            raise OSError(f"the file ends at byte {place}")
        into, place = into[count:], place + count


def read_range(descriptor: Opened, place: int, count: int) -> bytes:
    """Read bytes of an open file. Raises OSError if it is shorter."""
    data = bytearray(count)
    read_into(descriptor, memoryview(data), place)
    return bytes(data)


def read_file(path: Path, limit: int) -> bytes:
    """Read a whole regular file. Raises OSError, before reading, if it has more than `limit` bytes."""
    with opened(path) as descriptor:
        size = size_of(descriptor)
        if size > limit:
            raise OSError(f"the file has {size} bytes, more than {limit}")
        return read_range(descriptor, 0, size)


@contextlib.contextmanager
def _open(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# --- one writer at a time


class Lock:
    """A process's lock on a folder, until it releases it or ends. file: created if missing.

    Raises BlockingIOError if another process has it. A file system without locks lets everybody lock.
    """

    def __init__(self, file: Path) -> None:
        if isinstance(file, Url):
            self._descriptor = -1  # a store has no locks
            return
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                os.close(self._descriptor)
                raise

    def release(self) -> None:
        if self._descriptor == -1:
            return
        # closing is not enough: a process that was forked meanwhile, such as a DataLoader's worker, holds the lock too
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
