"""Choose the cores of the machine on which a rank on the CPU computes.

Ranks wake each other by messages, and Linux likes to wake a process on the core of the one that woke it. Two ranks then
share a core for seconds while another core is idle, and one step in a few takes twice as long. So each rank of a
machine keeps to its share of the cores, as with `python -m torch.backends.xeon.run_cpu` and mpirun's --bind-to. If
there are more ranks than cores, they take turns on all of them: a waiting rank leaves its core to another.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


def pin_process(rank: int, ranks: int) -> None:
    """Pin this process, as one of `ranks` on this machine, to its share of the cores. Linux only.

    Threads and processes that it starts later inherit it. Only cores that the process may use (taskset, a container)
    are shared.
    """
    if hasattr(os, "sched_setaffinity") and (cores := share(os.sched_getaffinity(0), rank, ranks)):
        os.sched_setaffinity(0, cores)


def share(cores: Collection[int], rank: int, ranks: int) -> set[int]:
    """Return the cores of one rank: neighbours, equally many for each; none where there are too few.

    >>> [share(range(6), rank, 2) for rank in range(2)]
    [{0, 1, 2}, {3, 4, 5}]
    """
    count = len(cores) // ranks
    # by processor, and by core in it: hardware threads of one core are neighbours
    near = sorted(cores, key=lambda core: (_number(core, "physical_package_id"), _number(core, "core_id"), core))
    return set(near[rank * count :][:count])


def _number(core: int, what: str) -> int:
    file = Path(_TOPOLOGY.format(core, what))
    return int(file.read_text()) if file.is_file() else 0
