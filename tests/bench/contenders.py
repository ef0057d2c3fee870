"""The contenders of the benchmark. Each is built on the running world of 2 ranks and gives a `step(global batch) -> global loss`.

The peers follow their own documentation: DDP's tutorial; for tensor parallelism "Large Scale Transformer model training with Tensor
Parallel" (pytorch.org/tutorials/intermediate/TP_tutorial.html), with its sequence-parallel plan and its loss parallelism.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

Step = Callable[[dict[str, Tensor]], float]
SHARDC = {"shardc dp=2": ("llama", "dp=2,tp=1"), "shardc tp=2": ("llama", "dp=1,tp=2"), "shardc tp=2 +sp": ("llama-sp", "dp=1,tp=2")}
PEERS = ("DDP", "DTensor tp=2", "DTensor tp=2, loss parallel", "DTensor tp=2 +sp", "DTensor tp=2 +sp, loss parallel")
NAMES = (*PEERS, *SHARDC)

# whom each is measured against (the first is what the targets are about), and the targets
PAIRS = {
    "shardc dp=2": (("DDP", 1.00),),
    "shardc tp=2": (("DTensor tp=2", 0.85), ("DTensor tp=2, loss parallel", 0.85)),
    "shardc tp=2 +sp": (("DTensor tp=2 +sp", 0.95), ("DTensor tp=2 +sp, loss parallel", 0.95)),
}


def build(name: str, files: Path) -> Step:
    """files: where the parent has put the compiled artifacts and the weights, `weights.safetensors`."""
    model = llama.model()
    model.load_state_dict(load_file(files / "weights.safetensors"))
    if name in SHARDC:
        return _shardc(files / name, model)
    return _ddp(model) if name == "DDP" else _tensor_parallel(model, sequence="+sp" in name, loss="loss" in name)


def _shardc(artifact: Path, model: Any) -> Step:
    from shardc import load

    engine = load(artifact).engine(model, optimizer=llama.optimizer)
    return lambda batch: float(engine.step(batch))


def _ddp(model: Any) -> Step:
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = llama.optimizer(wrapped.parameters())
    rank, world = dist.get_rank(), dist.get_world_size()

    def step(batch: dict[str, Tensor]) -> float:
        loss = wrapped(**{k: x.chunk(world)[rank] for k, x in batch.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        return float(total) / world  # every row counts as many tokens

    return step


def _tensor_parallel(model: Any, *, sequence: bool, loss: bool) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    between = Shard(1) if sequence else Replicate()  # how activations lie between blocks
    outer: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1) if loss else Replicate(), use_local_output=not loss
        ),
    }  # fmt: skip
    block: dict[str, Any] = {
        "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(), "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }  # fmt: skip
    if sequence:
        outer["model.norm"] = SequenceParallel()
        block |= {
            "input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
            ),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }  # fmt: skip
    parallelize_module(model, mesh, outer)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, block)
    optimizer = llama.optimizer(model.parameters())
    # the embedding gives a rank its part of the sequence: positions have to be told
    positions = {"position_ids": torch.arange(llama.SEQ).unsqueeze(0)} if sequence else {}

    def step(batch: dict[str, Tensor]) -> float:
        with loss_parallel() if loss else contextlib.nullcontext():
            value = model(**batch, **positions).loss
            optimizer.zero_grad()
            value.backward()
        optimizer.step()
        return float((value.full_tensor() if isinstance(value, DTensor) else value).detach())

    return step
