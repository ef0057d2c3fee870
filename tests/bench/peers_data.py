"""Data parallelism and ZeRO as others do it, each as its own documentation says.

DDP              pytorch.org/tutorials/intermediate/ddp_tutorial.html, with gradients as views of buckets
ZeRO optimizer   pytorch.org/tutorials/recipes/zero_redundancy_optimizer.html, beside DDP
DeepSpeed        deepspeed.ai/getting-started, with torch's own optimizer and the bucket size of the others
torch.compile    docs.pytorch.org/docs/stable/generated/torch.compile.html: of the model, or of DDP around it
FSDP2            pytorch.org/tutorials/intermediate/FSDP_tutorial.html: fully_shard of each block and the root, or of the root alone
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama
import torch
import torch.distributed as dist
from contenders import Step
from torch import Tensor, nn

MIB = 2**20
BUCKET_MB = 25  # of DDP, and of shardc


def prepare(name: str) -> Callable[[Any], Step]:
    kind, _, how = name.partition(" ")
    if name == "DDP":
        return ddp
    if kind == "torch.compile":
        return _compiled if name.endswith("one device") else lambda model: ddp(model, compiled=True)
    if kind == "DDP,":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return lambda model: ddp(
            model, lambda ps: ZeroRedundancyOptimizer(ps, torch.optim.AdamW, lr=3e-4, parameters_as_bucket_view=True)
        )
    if kind == "DeepSpeed":
        import deepspeed  # noqa: F401

        return lambda model: _deepspeed(model, int(how))
    from torch.distributed.fsdp import fully_shard  # noqa: F401

    return lambda model: _fsdp(model, by_block=how == "by block")


def ddp(
    model: nn.Module,
    make: Callable[[Any], torch.optim.Optimizer] = llama.optimizer,
    *,
    compiled: bool = False,
) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _loop(torch.compile(wrapped) if compiled else wrapped, make(wrapped.parameters()))


def _compiled(model: nn.Module) -> Step:
    return _loop(torch.compile(model), llama.optimizer(model.parameters()))


def _fsdp(model: Any, *, by_block: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers if by_block else ():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loop(model, llama.optimizer(model.parameters()))


def _loop(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: dict[str, Tensor]) -> float:
        loss = model(**_mine(batch)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return _mean(loss)

    return step


def _deepspeed(model: nn.Module, stage: int) -> Step:
    import deepspeed

    mine = llama.SIZE.batch // dist.get_world_size()
    bucket = BUCKET_MB * MIB // 4  # DeepSpeed counts elements
    zero = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": bucket}
    config = {"train_micro_batch_size_per_gpu": mine, "zero_optimization": zero, "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=model, optimizer=llama.optimizer(model.parameters()), config=config)
    return deepspeed_loop(engine)


def deepspeed_loop(engine: Any) -> Step:
    def step(batch: dict[str, Tensor]) -> float:
        loss = engine(**_mine(batch)).loss
        engine.backward(loss)
        engine.step()
        return _mean(loss)

    return step


def _mine(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: x.chunk(dist.get_world_size())[dist.get_rank()] for k, x in batch.items()}


def _mean(loss: Tensor) -> float:
    """Every row counts as many tokens."""
    total = loss.detach()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
