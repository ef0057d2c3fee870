"""Measure this machine: what `shardc device --measure` writes.

A device is one process: with the threads that torch has here on a CPU, or with one GPU. Times are the best of several
rounds, as other load only adds to them.

    flops       products of large square matrices, by dtype
    bandwidth   a copy of a tensor that fits into no cache: bytes read and written
    launch      a small op, with its record in autograd
    within      an all_reduce of two processes
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed as dist

from shardc.cost.device import Device, Link

#: Seconds that one number is measured for, and rounds in them.
SECONDS, ROUNDS = 0.6, 4
#: Bytes of a tensor that fits into no cache of a CPU.
LARGE = 2**28
#: Of a link: bytes of the large message, calls of the small one, rounds of both.
MESSAGES = 2**25, 200, 5
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Kind = Literal["cpu", "cuda"]


def measure(kind: Kind | None = None, on: Callable[[str], None] = lambda subject: None) -> Device:
    """This machine as a device. kind: default: a GPU where there is one. on: called with what is measured next."""
    device = torch.device(kind or ("cuda" if torch.cuda.is_available() else "cpu"))
    flops = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        on(f"products in {name}")
        flops[name] = _flops(device, dtype)
    on("memory bandwidth")
    bandwidth = _bandwidth(device)
    on("small ops")
    launch = _launch(device)
    on("links between processes")
    link, how = _link(device)
    return Device(
        name=device.type,
        source=f"{_name(device)}, measured {date.today()}, torch {torch.__version__}; link: {how}",
        kind="gpu" if device.type == "cuda" else "cpu",
        memory=_memory(device),
        flops=flops,
        bandwidth=bandwidth,
        launch=launch,
        node=_devices(device),
        within=link,
        between=link,
    )


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call: the best of some rounds."""

    def settle() -> None:
        if device.type == "cuda":
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


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    """Per second: the better of two sizes, or the smaller where the larger would take long, as on CPUs without fast
    products of 16-bit numbers.
    """
    best = 0.0
    for n in (256, 1024) if device.type == "cpu" else (4096, 8192):
        a, b, out = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(3))
        took = _seconds(partial(torch.mm, a, b, out=out), device)
        best = max(best, 2 * n**3 / took)
        if took * 4**3 > SECONDS:
            break
    return best


def _bandwidth(device: torch.device) -> float:
    nbytes = LARGE if device.type == "cpu" else 8 * LARGE
    a = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    b = torch.zeros_like(a)
    return 2 * nbytes / _seconds(lambda: b.copy_(a), device)


def _launch(device: torch.device) -> float:
    """Seconds of a small op: the mean of a product, a sum and a norm in forward."""
    x, w = torch.ones(4, 8, device=device), torch.ones(8, 8, device=device, requires_grad=True)

    def run() -> None:
        y = torch.nn.functional.linear(x, w)
        torch.nn.functional.layer_norm(y + x, (8,))

    return _seconds(run, device) / 3


def _link(device: torch.device) -> tuple[Link, str]:
    if device.type == "cpu":
        return _link_between_processes("gloo", torch.get_num_threads()), "gloo between two processes of this machine"
    if torch.cuda.device_count() > 1:
        return _link_between_processes("nccl", 1), "NCCL between two GPUs of this machine"
    here, there = (
        torch.zeros(2**28, dtype=torch.uint8, device=device),
        torch.zeros(2**28, dtype=torch.uint8, pin_memory=True),
    )
    took, small = _seconds(lambda: here.copy_(there), device), _seconds(lambda: here[:1].copy_(there[:1]), device)
    return (
        Link(bandwidth=here.numel() / took, latency=small),
        "there is only one GPU: copies from the machine's memory instead",
    )


def _link_between_processes(backend: str, threads: int) -> Link:
    """Between two processes with so many threads each, which are started here and end here. Its all_reduce sends each
    byte once in either direction.
    """
    with (
        tempfile.TemporaryDirectory(prefix="shardc-links-") as folder,
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool,
    ):
        process = partial(_link_process, backend=backend, threads=threads, folder=folder, messages=MESSAGES)
        (large, small), _ = pool.map(process, range(2))
    return Link(bandwidth=MESSAGES[0] / max(large - small, 1e-9), latency=small / 2)


def _link_process(
    rank: int, backend: str, threads: int, folder: str, messages: tuple[int, int, int]
) -> tuple[float, float]:
    """One of the two: seconds of a large and of a small all_reduce."""
    torch.set_num_threads(threads)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    nbytes, calls, rounds = messages
    large = _all_reduce_seconds(torch.zeros(nbytes // 4, device=device), 1, rounds)
    small = _all_reduce_seconds(torch.zeros(1, device=device), calls, rounds)
    dist.destroy_process_group()
    return large, small


def _all_reduce_seconds(x: torch.Tensor, calls: int, rounds: int) -> float:
    """Seconds of one all_reduce: the best round's mean."""
    best = float("inf")
    for _ in range(rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - begin) / calls)
    return best


def _memory(device: torch.device) -> float:
    """Bytes of a GPU, or one CPU device's part of the machine's memory that this process may have."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total / _devices(device)


def _devices(device: torch.device) -> int:
    """How many devices this machine has."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // torch.get_num_threads(), 1)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' if threads > 1 else ''} a process"
