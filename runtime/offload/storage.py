"""Keep tensors in places outside of the device: the machine's memory, or a file of a directory.

A file is mapped into memory: its tensors are ordinary CPU tensors, which checkpoints and users can read. The system
reads their pages when they are touched, or earlier (`Slot.prefetch`), and writes them in the background. Unused ones
are released (`Slot.release`): then they are not this process's memory, and the system's cache keeps them only while
memory is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shardc.errors import ShardcError

#: Files grow by this many bytes of address space; room on the disk is taken as it is used.
_CHUNK = 2**30
_NAME = "shardc-offload-"
_ALIGN = 64


class Slot:
    """Contiguous room outside of the device. bytes: all of it, uint8, zeros at first."""

    def __init__(self, room: Tensor) -> None:
        self.bytes = room
        self._used = 0

    def take(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return its next tensor, with size, strides and dtype of `like`, which may not overlap itself."""
        start, nbytes = self._used, room_of([like], dtype)
        self._used += nbytes
        flat = self.bytes[start : start + nbytes].view(dtype or like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def prefetch(self) -> None:
        """Announce that it will be read soon."""

    def release(self) -> None:
        """Announce that it is not needed for a while. Written data is kept."""


def room_of(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> int:
    """Return the bytes that a slot needs for tensors."""
    nbytes = 0
    for x in tensors:
        last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
        nbytes += -(-last * (dtype or x.dtype).itemsize // _ALIGN) * _ALIGN
    return nbytes


class Place(Protocol):
    """A place that makes slots."""

    def slot(self, nbytes: int) -> Slot: ...

    def close(self) -> None: ...


class Memory:
    """The machine's memory; pinned where a GPU copies from it."""

    def __init__(self, device: torch.device) -> None:
        self._pin = device.type == "cuda"

    def slot(self, nbytes: int) -> Slot:
        return Slot(torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._pin))

    def close(self) -> None:
        """Return at once: the memory is freed with its tensors."""


@dataclass
class _Chunk:
    """A stretch of a file, from `start`. mapped: all of it. used: its taken bytes."""

    mapped: mmap.mmap
    start: int
    used: int = 0


class _Mapped(Slot):
    """A slot in a chunk of a file, from `offset`, a whole number of pages."""

    def __init__(self, chunk: _Chunk, offset: int, nbytes: int, room: int) -> None:
        empty = torch.zeros(0, dtype=torch.uint8)
        super().__init__(
            torch.frombuffer(chunk.mapped, dtype=torch.uint8, count=nbytes, offset=offset) if nbytes else empty
        )
        self._chunk, self._at, self._room = chunk, offset, room

    def prefetch(self) -> None:
        if self._room:
            self._chunk.mapped.madvise(mmap.MADV_WILLNEED, self._at, self._room)

    def release(self) -> None:
        # a shared mapping loses nothing: written data is in the system's cache, or on the disk
        if self._room:
            self._chunk.mapped.madvise(mmap.MADV_DONTNEED, self._at, self._room)


class Files:
    """A growing file of one rank in a directory. It is removed by `close`, or when this process ends.

    Each process removes files that killed processes left: their owners' locks ended with them. folder: made if missing.
    where: the spec's key, for messages. Raises ShardcError where nothing can be written.
    """

    def __init__(self, folder: str, rank: int, where: str) -> None:
        self.folder, self._where = Path(folder).expanduser().absolute(), where
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _sweep(self.folder)
            self._fd, path = _create(self.folder, rank)
        except OSError as e:
            fault = f"cannot write to the directory {self.folder}: {e.strerror}"
            raise ShardcError(fault, where=where, fix="name a directory that every rank may write to, or cpu") from e
        self._size = 0
        self._chunk: _Chunk | None = None
        self.close = weakref.finalize(self, _remove, self._fd, path, os.getpid())

    def slot(self, nbytes: int) -> Slot:
        """Make a slot. Raises ShardcError if the disk is full."""
        room = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            if self._chunk is None or self._chunk.used + room > len(self._chunk.mapped):
                size = max(room, _CHUNK)
                os.ftruncate(self._fd, self._size + size)
                self._chunk = _Chunk(mmap.mmap(self._fd, size, offset=self._size), self._size)
                self._size += size
            chunk, offset = self._chunk, self._chunk.used
            if room:  # allocate now: a mapped page without room later would end the process
                os.posix_fallocate(self._fd, chunk.start + offset, room)
        except OSError as e:
            free = os.statvfs(self.folder)
            fault = (
                f"{self.folder} has no room for {nbytes:,} more bytes ({free.f_bavail * free.f_frsize:,} are free):"
                f" {e.strerror}"
            )
            raise ShardcError(
                fault, where=self._where, fix="name a directory on a larger disk, or split over more ranks"
            ) from e
        chunk.used += room
        return _Mapped(chunk, offset, nbytes, room)


def _create(folder: Path, rank: int) -> tuple[int, str]:
    while True:
        fd, path = tempfile.mkstemp(prefix=f"{_NAME}{socket.gethostname()}-{os.getpid()}-rank{rank}-", dir=folder)
        with contextlib.suppress(OSError):  # a file system without locks: no process sweeps there
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:  # no process swept it before it was locked
            return fd, path
        os.close(fd)


def _sweep(folder: Path) -> None:
    """Remove files whose owners are gone."""
    for path in folder.glob(f"{_NAME}*"):
        with contextlib.suppress(OSError):  # another process removes it, or it may not be opened
            fd = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            finally:
                os.close(fd)


def _remove(fd: int, path: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked process that only loads data
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(fd)
