"""Choose the device of its machine that a rank uses. It never falls back to the CPU silently."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

from shardc.errors import ShardcError
from shardc.runtime.mesh.activity import waiting


def local_device(device: torch.device | str | None = None) -> torch.device:
    """Return the device of this process.

    device: "cpu", "cuda" or "cuda:1"; None: CUDA where this process sees a GPU and its world, if it has joined one, can
    use it; else the CPU. Which GPU: the named one; the only visible one (Slurm's --gpus-per-task=1 shows each task only
    its GPU); else the one whose number is LOCAL_RANK. Raises ShardcError if there is no such GPU, if this machine runs
    more ranks than it has GPUs, or if the process group cannot send tensors of the device.
    """
    chosen = torch.device(device) if device is not None else torch.device(_default_type())
    if chosen.type == "cuda":
        chosen = torch.device("cuda", _gpu(chosen.index))
    if dist.is_initialized() and backend_of(chosen.type) == "":
        fault = f"torch.distributed's process group has no backend for {chosen.type} tensors: it has {_backends()}"
        raise ShardcError(fault, fix='call init_process_group() without a backend, or with "cpu:gloo,cuda:nccl"')
    return chosen


def backend_of(device_type: str) -> str:
    """Return the world's backend for a device's tensors: "nccl", "gloo", "fake", ...; "" if none."""
    return _backends().get(device_type, "")


def share_no_gpu(store: Any, rank: int, here: torch.device) -> None:
    """Raise ShardcError on all processes of this machine that use the same GPU `here`.

    store: torch.distributed.Store that all ranks of the world share. Each rank looks only at the processes of its
    machine.
    """
    first = rank - int(os.environ.get("LOCAL_RANK", 0))
    beside = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    uuid = str(torch.cuda.get_device_properties(here).uuid)  # CUDA_VISIBLE_DEVICES may differ between ranks
    store.set(f"shardc/gpu/{rank}", uuid)
    with waiting():
        same = [r for r in beside if store.get(f"shardc/gpu/{r}").decode() == uuid]
    if len(same) > 1:
        fix = "start one process for each GPU: torchrun --nproc-per-node=gpu, srun --gpus-per-task=1"
        raise ShardcError(f"ranks {', '.join(map(str, same))} use the same GPU ({here}, {uuid})", fix=fix)


def _default_type() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    if dist.is_initialized() and backend_of("cuda") in ("", "gloo"):
        warnings.warn(
            "shardc: CUDA is available but not used: the process group sends over gloo. For GPUs call"
            " init_process_group() without a backend, or let shardc join the world",
            stacklevel=4,
        )
        return "cpu"
    return "cuda"


def _gpu(index: int | None) -> int:
    """Return the number of the visible GPU to use."""
    visible = torch.cuda.device_count()
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if index is None and visible > 1 and local_world > visible:
        fault = f"this machine runs {local_world} ranks, but has {visible} GPUs"
        raise ShardcError(fault, fix=f"start {visible} processes here, or train on the CPU: CUDA_VISIBLE_DEVICES=''")
    chosen = index if index is not None else 0 if visible == 1 else local_rank
    if chosen >= visible:
        fault = f"there is no GPU {chosen}: this process sees {visible or 'none'}"
        raise ShardcError(fault, fix="name a GPU that CUDA_VISIBLE_DEVICES leaves visible, or device='cpu'")
    return chosen


def _backends() -> dict[str, str]:
    """Return {device type: backend} of the world, also where no backend was named."""
    config = dist.get_backend_config()  # "cpu:gloo,cuda:nccl", or one backend's name
    return dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
