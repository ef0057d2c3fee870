"""The processes of a world's ranks, as far as they are on this machine: which have ended, and which are stopped.

Each rank says in the store which process it is. The system knows what became of a process, so that the ranks of one
machine need not wait for an answer to find out who was killed. Elsewhere than on Linux nothing is known."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any


class Processes:
    """store: over which the ranks met. This one tells its process there."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._machine = store, _machine()
        self._others = {r: "" for r in range(world) if r != rank}  # what they told: is asked until they did
        if self._machine:
            _, born = _state(os.getpid())
            store.set(self._key(rank), f"{self._machine} {os.getpid()} {born}")

    def end(self, rank: int) -> None:
        """Kill a process that is stopped, as it heeds nothing else."""
        number = int(self._others[rank].split()[1])
        with suppress(OSError):
            os.kill(number, signal.SIGKILL)

    def ended(self) -> list[int]:
        """The ranks whose process is gone, or only waits for its parent to take note."""
        return [r for r, state in self._states() if state in ("", "Z", "X")]

    def stopped(self) -> list[int]:
        """Those whose process a signal has stopped (SIGSTOP)."""
        return [r for r, state in self._states() if state == "T"]

    def _states(self) -> list[tuple[int, str]]:
        """Of the other ranks on this machine."""
        found = []
        for r, told in self._others.items():
            if not told and self._store.check([self._key(r)]):
                told = self._others[r] = self._store.get(self._key(r)).decode()
            machine, _, process = told.partition(" ")
            if machine and machine == self._machine:
                number, began = map(int, process.split())
                state, born = _state(number)
                found.append((r, state if born == began else ""))  # else the number is another's by now
        return found

    def _key(self, rank: int) -> str:
        return f"shardc/process{rank}"


def _machine() -> str:
    """What only processes have in common that see each other; "" where that is not known."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _state(pid: int) -> tuple[str, int]:
    """(state, start): "R" runs, "S" sleeps, "T" is stopped, "Z" has ended; ("", 0) where there is none."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return "", 0
