"""How fast two processes of this machine exchange tensors."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from torch import distributed as dist

from shardc.cost.device import Link

#: Bytes of the large message, calls of the small one, rounds of both.
LARGE, SMALL, ROUNDS = 2**25, 200, 5


def between_processes(backend: str, threads: int) -> Link:
    """Two processes with so many threads each, started here and gone afterwards. An all_reduce sends each byte once
    there and once back.
    """
    with (
        tempfile.TemporaryDirectory(prefix="shardc-links-") as folder,
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool,
    ):
        (large, small), _ = pool.map(partial(_process, backend=backend, threads=threads, folder=folder), range(2))
    return Link(bandwidth=LARGE / max(large - small, 1e-9), latency=small / 2)


def _process(rank: int, backend: str, threads: int, folder: str) -> tuple[float, float]:
    """Seconds of a large and of a small all_reduce."""
    torch.set_num_threads(threads)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    large = _seconds(torch.zeros(LARGE // 4, device=device), 1)
    small = _seconds(torch.zeros(1, device=device), SMALL)
    dist.destroy_process_group()
    return large, small


def _seconds(x: torch.Tensor, calls: int) -> float:
    """Of one all_reduce: the best round's mean."""
    best = float("inf")
    for _ in range(ROUNDS + 1):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - begin) / calls)
    return best
