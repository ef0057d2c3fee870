"""What benchmarks on a few processes share: each is one thread, and a rank of a world over gloo."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any


def on_ranks(work: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Call `work(rank, *args)` on each of so many new processes, and return what each returns."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world, mp_context=get_context("spawn")) as pool:
        return list(pool.map(partial(_joined, work=work, world=world, folder=folder, args=args), range(world)))


def _joined(rank: int, work: Callable[..., Any], world: int, folder: str, args: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = work(rank, *args)
    dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    return found
