"""Find which rank processes of this machine have ended or are stopped, and what they did last.

Each rank writes its process number to the store, and keeps what it is doing in memory that the others of its machine
can read, even after it is killed. The system knows what became of a process, so that the ranks of one machine need not
wait for an answer to find out who was killed. Only Linux is supported; elsewhere nothing is known.
"""

from __future__ import annotations

import mmap
import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardc.runtime.launch import file_of, process_state

_NOTE = 160  # bytes of the text that describes what a rank is doing
KILLED = "was killed, or ended without an error,"


@dataclass
class _Process:
    """The process of a rank. born: its start time, as numbers are reused. note: what it does, if known."""

    number: int
    born: int
    note: mmap.mmap | None = None

    @property
    def state(self) -> str:
        """The state letter of the system: "T": stopped; "": gone, or a zombie."""
        state, born = process_state(self.number)
        return "" if born != self.born or state in "ZX" else state

    @property
    def doing(self) -> str:
        """What it did last: "in step 5, at all_reduce 'h' over tp"; "" if not known."""
        return self.note[:].rstrip(b"\0").decode(errors="replace") if self.note is not None else ""


class Processes:
    """The processes of the ranks. store: over which the ranks met; this rank registers its process there.

    None: nothing is known of the others.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank, self._machine = store, rank, _machine() if store is not None else ""
        self._world = world
        self._here = int(os.environ.get("LOCAL_WORLD_SIZE", world))  # number of ranks on this machine
        self._found: dict[int, _Process] = {}
        self._note: mmap.mmap | None = None
        if store is not None:
            self._note, file = _memory(rank)
            if self._machine:
                _, born = process_state(os.getpid())
                store.append(self._key, f"{rank} {os.getpid()} {born} {file};")
            store.set(f"shardc/came/{rank}", socket.gethostname())

    def known(self) -> bool:
        """Return whether all ranks of this machine are registered, so that the store is read no more."""
        return len(self._found) >= self._here - 1

    def note(self, text: str) -> None:
        """Record what this rank is doing."""
        if self._note is not None:
            self._note[:] = text.encode()[:_NOTE].ljust(_NOTE, b"\0")

    def note_ending(self) -> None:
        """Note that a launcher, or a user, ends this process: it is not the one that failed."""
        self._store.set(f"shardc/ending/{self._rank}", "")

    def ended(self, otherwise: str = "") -> dict[int, str]:
        """Return {rank: how it ended} where the process is gone or a zombie, unless a launcher or user ended it.

        otherwise: where a rank was, if that is not known.
        """
        gone = [r for r, p in sorted(self._others().items()) if p.state == ""]
        failed = (r for r in gone if not self._store.check([f"shardc/ending/{r}"]))
        return {r: f"{KILLED} {self._found[r].doing or otherwise}" for r in failed}

    def stopped(self) -> dict[int, int]:
        """Return {rank: process} of those that a signal has stopped (SIGSTOP), some of them before they registered."""
        others = self._others()
        unknown = {} if self.known() else {r: n for r, n in _siblings().items() if r not in others}
        stopped = {r: p.number for r, p in others.items() if p.state == "T"}
        return stopped | {r: n for r, n in unknown.items() if process_state(n)[0] == "T"}

    def has_registered(self, rank: int) -> bool:
        """Return whether a rank has registered, on any machine."""
        return self._store is None or bool(self._store.check([f"shardc/came/{rank}"]))

    def on(self, ranks: Iterable[int]) -> str:
        """Return "on HOST: ", the hosts of ranks, for the start of a line; "" if one machine has the whole world."""
        if self._store is None or self._here >= self._world:
            return ""
        hosts = list[str]()
        with suppress(RuntimeError):  # the store went with its process
            hosts += [self._store.get(f"shardc/came/{r}").decode() for r in ranks if self.has_registered(r)]
        return f"on {', '.join(dict.fromkeys(hosts))}: " if hosts else ""

    def _others(self) -> dict[int, _Process]:
        """Return the other ranks on this machine, as far as they are known."""
        if not self._machine or self.known():
            return self._found
        entries = [tuple(map(int, each.split())) for each in self._store.get(self._key).decode().split(";") if each]
        last = {rank: more for rank, *more in entries if rank != self._rank}  # a process may have made several meshes
        for rank, (number, born, file) in last.items():
            if rank not in self._found:
                self._found[rank] = _Process(number, born, _memory_of(number, file))
        return self._found

    @property
    def _key(self) -> str:
        return f"shardc/processes/{self._machine}"


def _machine() -> str:
    """Return a name shared by exactly the processes that see each other; "" where that is not known."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _siblings() -> dict[int, int]:
    """Return {rank: process} of the processes that this one's launcher has started for this world."""
    started, port = dict[int, int](), f"MASTER_PORT={os.environ.get('MASTER_PORT')}".encode()  # another world's differs
    for file in Path("/proc", str(os.getppid()), "task").glob("*/children"):
        for number in map(int, _read(file).split()):
            variables = _read(Path(f"/proc/{number}/environ")).split(b"\0")
            ranks = [int(v[5:]) for v in variables if re.fullmatch(rb"RANK=\d+", v)]
            started |= dict.fromkeys(ranks if port in variables else [], number)
    return started


def _read(file: Path) -> bytes:
    with suppress(OSError):  # the process has ended
        return file.read_bytes()
    return b""


def _memory(rank: int) -> tuple[mmap.mmap | None, int]:
    """Make (memory, its descriptor): the file that `launch` reads, else without a name.

    Memory without a name vanishes when no process has it open.
    """
    if (path := file_of(rank)) is not None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    elif hasattr(os, "memfd_create"):
        file = os.memfd_create("shardc-doing")
    else:
        return None, -1
    os.ftruncate(file, _NOTE)
    return mmap.mmap(file, _NOTE), file


def _memory_of(process: int, file: int) -> mmap.mmap | None:
    """Open the memory of another running process; it stays readable after that process ends."""
    with suppress(OSError, ValueError), open(f"/proc/{process}/fd/{file}", "rb") as f:
        return mmap.mmap(f.fileno(), _NOTE, access=mmap.ACCESS_READ)
    return None
