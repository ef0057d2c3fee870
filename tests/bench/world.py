"""Processes that are one contender, and do as ordered, in turn with those of other contenders.

No contender shares a process with another: what one does to its process (DeepSpeed replaces functions of torch) is no
other's. Who has no order sleeps. Processes are forks of one that has imported what all need.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


class World:
    """Use: `with World(name, files) as w: w.ask("time", steps=3)`. A process that fails shows why, and ends the
    benchmark.

    files: where the parent has put weights and compiled programs. frugal: memory that is freed goes back to the system
    at once, so that resident memory follows the live tensors; it costs time. Otherwise it is as each contender leaves
    it: ours keeps it (shardc.runtime.mesh.allocator)."""

    def __init__(self, name: str, files: Path, *, frugal: bool = False) -> None:
        from contenders import ranks

        self.name = name
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch.distributed", "transformers.models.llama.modeling_llama", "shardc.runtime.step.engine", "llama"]
        )
        meeting = files / f"meeting-{time.time_ns()}"
        self._ends, self._processes = [], []
        for rank in range(ranks(name)):
            end, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, ranks(name), name, files, meeting, frugal, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(end)
            self._processes.append(process)

    def ask(self, do: str, **how: int) -> Any:
        """What rank 0 answers, once all ranks have."""
        for end in self._ends:
            end.send((do, how))
        try:
            first, *_ = [end.recv() for end in self._ends]
            return first
        except (EOFError, ConnectionResetError):
            raise SystemExit(f"{self.name} failed to {do}") from None

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()  # no more orders come
            if error is not None:
                process.kill()
        for process in self._processes:
            process.join()


# --- in each process


def _work(rank: int, ranks: int, name: str, files: Path, meeting: Path, frugal: bool, orders: Connection) -> None:
    import torch
    import torch.distributed as dist

    if frugal:
        for setting in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(setting, 64 * 1024)
        os.environ["MALLOC_TRIM_THRESHOLD_"] = str(64 * 1024)  # ours leaves alone what is set
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "DS_ACCELERATOR": "cpu",
    }
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # peers use names of torch that it has renamed
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    worker = _Worker(name, files)
    while True:
        try:
            do, how = orders.recv()
        except EOFError:
            break
        orders.send(getattr(worker, do)(**how))
    dist.destroy_process_group()


class _Worker:
    def __init__(self, name: str, files: Path) -> None:
        import contenders

        self._files, self._name = files, name
        self._make = contenders.prepare(name, files)
        self._step: Any = None

    def build(self, steps: int) -> list[float]:
        """Losses of the first steps, which warm up, too."""
        import contenders
        import llama
        from safetensors.torch import load_file

        model = contenders.model(self._name)
        model.load_state_dict(load_file(self._files / "weights.safetensors"))
        self._step = self._make(model)
        del model
        return [self._step(llama.batch(i)) for i in range(steps)]

    def time(self, steps: int) -> dict[str, list[float]]:
        """{"wall": seconds of each step, "cpu": processor seconds of all ranks, and all their threads}."""
        import llama
        import torch
        import torch.distributed as dist

        wall, cpu = [], []
        for i in range(steps):
            batch = llama.batch(i)
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            self._step(batch)
            dist.barrier()
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - busy)
        total = torch.tensor(cpu)
        dist.all_reduce(total)
        return {"wall": wall, "cpu": total.tolist()}

    def overlap(self) -> dict[str, dict[str, float]] | None:
        """Of all steps since the last call; see ours.Contender. None: not ours."""
        ask = getattr(self._step, "overlap", None)
        return ask() if ask is not None else None  # type: ignore[no-any-return]

    def experts(self) -> float:
        """MiB: what experts take on a rank, the largest over ranks."""
        import torch
        import torch.distributed as dist

        most = torch.tensor(float(self._step.expert_bytes()))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most) / 2**20

    def peak(self, steps: int) -> float:
        """MiB: the largest over ranks of resident memory's peak during steps, less what was resident after imports."""
        import llama
        import torch
        import torch.distributed as dist

        before = _resident("VmRSS")
        self.build(1)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: building is not stepping
        for i in range(steps):
            self._step(llama.batch(i))
        kib = torch.tensor(_resident("VmHWM") - before)
        dist.all_reduce(kib, dist.ReduceOp.MAX)
        return float(kib) / 1024


def _resident(key: str) -> float:
    """KiB."""
    return next(
        float(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
