"""Which of a machine's cores a rank on the CPU computes on.

Ranks wake each other by messages, and Linux likes to wake a process where the one is that woke it: two ranks then share
a core for seconds while the other core is idle, and one step in a few takes twice as long. So each rank of a machine
keeps to its share of the cores, as `python -m torch.backends.xeon.run_cpu` and mpirun's --bind-to do it. Where there
are more ranks than cores they take turns on all of them: whoever waits leaves its core to another.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


def use(rank: int, ranks: int) -> None:
    """This process, as one of so many on this machine, stays on its cores; so do threads and processes that it starts
    from now on. What the user allows the process (taskset, a container) is what is shared out. Linux only.
    """
    if hasattr(os, "sched_setaffinity") and (mine := share(os.sched_getaffinity(0), rank, ranks)):
        os.sched_setaffinity(0, mine)


def share(cores: Collection[int], rank: int, ranks: int) -> set[int]:
    """The cores of one of so many ranks, neighbours, equally many for each; none where they are too few.

    >>> [share(range(6), rank, 2) for rank in range(2)]
    [{0, 1, 2}, {3, 4, 5}]
    """
    each = len(cores) // ranks
    return set(sorted(cores, key=_place)[rank * each :][:each])


def _place(core: int) -> tuple[int, int, int]:
    """Its processor, its number there, its own number: hardware threads of one core are neighbours."""
    return _number(core, "physical_package_id"), _number(core, "core_id"), core


def _number(core: int, what: str) -> int:
    file = Path(_TOPOLOGY.format(core, what))
    return int(file.read_text()) if file.is_file() else 0
