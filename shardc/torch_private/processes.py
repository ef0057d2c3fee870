"""Processes: groups, their store, the record of their collectives, and workers of a DataLoader."""

from __future__ import annotations

import signal
import threading
from typing import Any

from torch._C import _distributed_c10d as _c10d  # the flight recorder, which has no public name
from torch.distributed.distributed_c10d import (
    _get_default_store,  # outlives process groups
    _world,  # how many process groups there are: part of the next one's name
)


def process_groups() -> tuple[int, int]:
    """How many process groups this process is in, and how many were made: torch makes a group's name from these (of one
    that only its own ranks make, from the first, and since torch 2.15 from the second), so that ranks which count
    differently would wait for each other under different names.
    """
    return len(_world.pg_names), _world.group_count


def count_groups_from(number: int) -> None:
    """The next groups are named after this number and those that follow: one that is the same on all ranks."""
    _world.group_count = number


def default_store() -> Any:
    """The key-value store over which the processes of torch.distributed's world met: it outlives their groups."""
    return _get_default_store()


def flight_record() -> bytes:
    """What torch's flight recorder keeps of this process's last 2,000 collectives (TORCH_FR_BUFFER_SIZE), as JSON: when
    each was begun, and with NCCL also when it ended; of NCCL's groups and of gloo's.
    """
    return bytes(_c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))  # type: ignore[attr-defined]


def let_workers_end() -> None:
    """A DataLoader whose worker ends raises an error in the main thread, wherever it is: in the middle of what ranks do
    together, and over the error that counts, as launchers end workers with the ranks. It also looks by itself, whenever
    a batch is late for 5 s; so its handler of SIGCHLD gives way to the one that was there before.
    """
    handler: Any = signal.getsignal(signal.SIGCHLD)
    if (
        getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling"
        and threading.current_thread() is threading.main_thread()
    ):
        kept = dict(zip(handler.__code__.co_freevars, handler.__closure__ or (), strict=True))
        before = kept["previous_handler"].cell_contents if "previous_handler" in kept else None
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
