"""Access process groups, their store, the record of their collectives, and a DataLoader's workers."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch._C import _distributed_c10d as _c10d  # the flight recorder, which has no public name
from torch.distributed.distributed_c10d import (
    _get_default_store,  # outlives process groups
    _world,  # has the number of process groups, a part of the next one's name
)
from torch.utils.data._utils import worker as _worker  # what get_worker_info() returns


def process_groups() -> tuple[int, int]:
    """Return how many process groups this process is in, and how many were made.

    torch makes a group's name from these numbers; if only the group's ranks make it, from the first one (since torch
    2.15 from the second one). Ranks with different counts would wait for each other under different names.
    """
    return len(_world.pg_names), _world.group_count


def count_groups_from(number: int) -> None:
    """Set the number after which the next groups are named; it must be the same on all ranks."""
    _world.group_count = number


def default_store() -> Any:
    """Return the key-value store through which torch.distributed's processes met; it outlives groups."""
    return _get_default_store()


def flight_record() -> bytes:
    """Return this process's last 2,000 collectives (TORCH_FR_BUFFER_SIZE) from torch's flight recorder.

    JSON: the start of each, and with NCCL also the end; for NCCL's groups and gloo's.
    """
    return bytes(_c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))  # type: ignore[attr-defined]


def let_workers_end() -> None:
    """Replace a DataLoader's handler of SIGCHLD, which raises when a worker ends, by the previous one.

    The error would come in the middle of collectives, and hide the first one, as launchers end workers with the ranks.
    The DataLoader still checks its workers when a batch is 5 s late.
    """
    handler: Any = signal.getsignal(signal.SIGCHLD)
    if (
        getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling"
        and threading.current_thread() is threading.main_thread()
    ):
        kept = dict(zip(handler.__code__.co_freevars, handler.__closure__ or (), strict=True))
        before = kept["previous_handler"].cell_contents if "previous_handler" in kept else None
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def no_worker() -> AbstractContextManager[Any]:
    """Hide from the user's code that this is a DataLoader's worker, so that a stream does not divide itself.

    Shown as the only worker, `datasets` would still shuffle in another order than without workers.
    """
    return mock.patch.object(_worker, "_worker_info", None)
