"""How fast this machine is just now. Its speed changes, with what else runs on it and on what it shares: on a virtual
machine a step takes half as long again a minute later, and so does everything else.

So a few small pieces of work are timed beside what is measured, again and again: beside the device's numbers
(`Device.reference`), and beside the steps of a run. Where they take longer, so do the device's ops (`Device.as_fast`).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from shardc.machine.device import Reference

#: Rows of the product's matrices; elements that are added up; calls of an op that takes next to nothing.
PRODUCT, ELEMENTS, CALLS = 192, 2**18, 50


def timer() -> Callable[[], Reference]:
    """What times them once, in about 3 ms of a CPU. Each is called a few times before: what came before has left its
    operands out of the caches, and a core that has waited is slow at first, by up to twice.
    """
    a, x, small = torch.ones(PRODUCT, PRODUCT), torch.ones(ELEMENTS), torch.ones(16)
    into, total = torch.empty_like(a), torch.empty_like(x)

    def seconds(call: Callable[[], object], times: int) -> float:
        for _ in range(times):
            call()
        begin = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - begin) / times

    def once() -> Reference:
        product = seconds(lambda: torch.mm(a, a, out=into), 4)
        memory = seconds(lambda: torch.add(x, x, out=total), 4)
        return Reference(product=product, memory=memory, small=seconds(lambda: small.add(1), CALLS))

    once()
    return once


def busy() -> float:
    """Seconds that all cores of this machine have computed, for anybody; on Linux, elsewhere 0."""
    file = Path("/proc/stat")
    if not file.is_file():
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(int, file.read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def usual(found: Iterable[Reference]) -> Reference:
    """Of several: half of them took longer."""
    each = list(found)
    return Reference(
        product=statistics.median(x.product for x in each),
        memory=statistics.median(x.memory for x in each),
        small=statistics.median(x.small for x in each),
    )
