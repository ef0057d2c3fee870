"""Measure this machine: what `shardc device --measure` writes.

A device is one process: with the threads that torch has here on a CPU, or with one GPU. Times are the best of several
rounds, as whatever else runs only ever adds to them.

    flops       products of large square matrices, by dtype
    bandwidth   a copy of a tensor that fits into no cache: bytes read and written
    launch      what a small op takes, autograd's note of it included
    within      an all_reduce of two processes (shardc.cost.links)
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from shardc.cost import links
from shardc.cost.device import Device, Link

#: Seconds that one number is measured for, and rounds in them.
SECONDS, ROUNDS = 0.6, 4
#: Bytes of a tensor that fits into no cache of a CPU.
LARGE = 2**28
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Kind = Literal["cpu", "cuda"]


def measure(kind: Kind | None = None, tell: Callable[[str], None] = lambda what: None) -> Device:
    """This machine as a device. kind: default: a GPU where there is one. tell: is told what is measured next."""
    on = torch.device(kind or ("cuda" if torch.cuda.is_available() else "cpu"))
    flops = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        tell(f"products in {name}")
        flops[name] = _flops(on, dtype)
    tell("memory bandwidth")
    bandwidth = _bandwidth(on)
    tell("small ops")
    launch = _launch(on)
    tell("links between processes")
    link, how = _link(on)
    return Device(
        name=on.type,
        source=f"{_who(on)}, measured {date.today()}, torch {torch.__version__}; link: {how}",
        kind="gpu" if on.type == "cuda" else "cpu",
        memory=_memory(on),
        flops=flops,
        bandwidth=bandwidth,
        launch=launch,
        node=_devices(on),
        within=link,
        between=link,
    )


def _seconds(run: Callable[[], Any], on: torch.device) -> float:
    """Of one call: the best of some rounds."""

    def settle() -> None:
        if on.type == "cuda":
            torch.cuda.synchronize()

    run()
    settle()
    begin = time.perf_counter()
    run()
    settle()
    calls = max(int(SECONDS / ROUNDS / max(time.perf_counter() - begin, 1e-9)), 1)
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        settle()
        best = min(best, (time.perf_counter() - begin) / calls)
    return best


def _flops(on: torch.device, dtype: torch.dtype) -> float:
    """The better of two sizes; the larger one is left out where it would take long: some CPUs have no fast product of
    16-bit numbers.
    """
    best = 0.0
    for n in (256, 1024) if on.type == "cpu" else (4096, 8192):
        a, b, out = (torch.ones(n, n, dtype=dtype, device=on) for _ in range(3))
        took = _seconds(partial(torch.mm, a, b, out=out), on)
        best = max(best, 2 * n**3 / took)
        if took * 4**3 > SECONDS:
            break
    return best


def _bandwidth(on: torch.device) -> float:
    nbytes = LARGE if on.type == "cpu" else 8 * LARGE
    a = torch.zeros(nbytes, dtype=torch.uint8, device=on)
    b = torch.zeros_like(a)
    return 2 * nbytes / _seconds(lambda: b.copy_(a), on)


def _launch(on: torch.device) -> float:
    """Three ops as a forward has them: a product, a sum, a norm."""
    x, w = torch.ones(4, 8, device=on), torch.ones(8, 8, device=on, requires_grad=True)

    def run() -> None:
        y = torch.nn.functional.linear(x, w)
        torch.nn.functional.layer_norm(y + x, (8,))

    return _seconds(run, on) / 3


def _link(on: torch.device) -> tuple[Link, str]:
    if on.type == "cpu":
        return links.between_processes("gloo", torch.get_num_threads()), "gloo between two processes of this machine"
    if torch.cuda.device_count() > 1:
        return links.between_processes("nccl", 1), "NCCL between two GPUs of this machine"
    here, there = (
        torch.zeros(2**28, dtype=torch.uint8, device=on),
        torch.zeros(2**28, dtype=torch.uint8, pin_memory=True),
    )
    took, small = _seconds(lambda: here.copy_(there), on), _seconds(lambda: here[:1].copy_(there[:1]), on)
    return (
        Link(bandwidth=here.numel() / took, latency=small),
        "there is one GPU: copies from the machine's memory stand for it",
    )


def _memory(on: torch.device) -> float:
    """Bytes: of a GPU; of the machine's memory, or what this process may have of it, the part of one of its devices."""
    if on.type == "cuda":
        return float(torch.cuda.get_device_properties(on).total_memory)
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        found = min(found, int(text))
    return found / _devices(on)


def _devices(on: torch.device) -> int:
    """In this machine."""
    if on.type == "cuda":
        return torch.cuda.device_count()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // torch.get_num_threads(), 1)


def _who(on: torch.device) -> str:
    if on.type == "cuda":
        return str(torch.cuda.get_device_name(on))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' if threads > 1 else ''} a process"
