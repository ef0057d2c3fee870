"""Pass an error on one rank of torch.distributed's world to the others, which wait for that rank.

A rank that fails in the middle of a step never comes to the next collective, in which the others wait for it, half an
hour by default. So it reports the error in the store over which the processes met, and closes its connections: a rank
that waits for it fails in turn, reads the store, and raises an error that names the rank, what it was doing and why.

    rank 0   step 5 ── all_reduce ..................... cut off ── reads ── "rank 1 failed in step 5: ValueError"
    rank 1   step 5 ── ValueError ── says so ── is it everybody's? no ── cuts its connections

Where all ranks report their own errors within moments, such as a batch of a wrong shape, no rank waits for another: the
connections stay, and the next step can begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.mesh.activity import Activity
from shardc.runtime.mesh.processes import Processes

#: Seconds for all ranks to report an error that all have; seconds for a disconnected rank to find the cause.
OWN, CAUSE = 3.0, 10.0
_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote process exited",
    "connection refused",
    "nccl error",
)
_LATE = ("timed out waiting", "watchdog caught collective operation timeout")


class RankFailedError(ShardcError):
    """Another rank failed, and this one stopped where it waited for it."""


class Failures:
    """The failure reports of a world's ranks. number: of earlier failures. store: torch.distributed's.

    processes: of the ranks. A killed rank reports nothing; the ranks of its machine report for it.
    """

    def __init__(self, store: Any, rank: int, layout: Mesh, processes: Processes) -> None:
        self._store, self._rank, self._layout, self._world, self.number = store, rank, layout, layout.world, 0
        self._processes = processes

    def report(self, error: Exception, doing: str) -> bool:
        """Report that this rank failed. Returns whether all ranks failed, each with its own error."""
        first = next(iter(str(error).splitlines()), "")
        everybody, every = [self._key(r) for r in range(self._world)], False
        with suppress(RuntimeError):  # the store went with the process that held it: this rank's own error counts
            self._store.set(self._key(self._rank), f"failed in {doing}: {type(error).__name__}: {first}")
            every = within(OWN, lambda: self._store.check(everybody))
        self.number += 1
        return every

    def of_another(self, error: Exception, doing: str, activity: Activity) -> RankFailedError:
        """Build the error of a rank whose connection another rank closed, or that waited for too long."""
        causes: dict[int, str] = {}

        def look() -> bool:
            # before, as reports precede the end
            ended = self._processes.ended(f"in {doing}")
            for r in range(self._world):
                if r not in causes and self._store.check([self._key(r)]):
                    causes[r] = self._store.get(self._key(r)).decode(errors="replace")
            if not causes:
                for r, how in ended.items():
                    causes[r] = how
                    self._store.set(self._key(r), how)  # ranks that end because of it find this report
            return bool(causes)

        with suppress(RuntimeError):  # the store went with the process that held it
            within(CAUSE, look)
        self.number += 1
        if causes:
            rank = min(causes)
            fault = f"{self._layout.named(rank)} {causes[rank]}"
        elif _contains_any(error, _LATE):
            fault = f"the time limit passed before another rank reached {activity.collective}, {activity}"
        else:
            fault = f"the connection to another rank broke in {doing}: its process was killed or hangs"
        fix = "see the error of that rank; continue from the last checkpoint"
        if "ended without an error" in fault:  # such as `if rank == 0: module.full_state_dict()`
            fix = (
                "see the error of that rank, and continue from the last checkpoint; if it has none, call this on every"
                " rank, not only on some: all ranks run steps, saving and full_state_dict together"
            )
        return RankFailedError(fault, where=doing, fix=fix)

    def _key(self, rank: int) -> str:
        return f"shardc/failure{self.number}/rank{rank}"


def cut_off(error: BaseException) -> bool:
    """Return whether it is the error of a rank whose peer has gone, or does not come."""
    return isinstance(error, RuntimeError) and _contains_any(error, _GONE + _LATE)


def _contains_any(error: BaseException, signs: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(sign in text for sign in signs)


def within(seconds: float, done: Callable[[], bool]) -> bool:
    """Wait until `done`, at most so many seconds. Return whether it is done."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
