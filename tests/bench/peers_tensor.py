"""DTensor, as in "Large Scale Transformer model training with Tensor Parallel"
(pytorch.org/tutorials/intermediate/TP_tutorial.html).

Its sequence-parallel plan, and its loss parallelism.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import llama
import torch
import torch.distributed as dist
from contenders import Step
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


def prepare(*, sequence: bool, loss: bool) -> Callable[[Any], Step]:
    return lambda model: _build(model, sequence=sequence, loss=loss)


def _build(model: Any, *, sequence: bool, loss: bool) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    between = Shard(1) if sequence else Replicate()  # how activations lie between blocks
    outer: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1) if loss else Replicate(), use_local_output=not loss
        ),
    }
    block: dict[str, Any] = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        outer["model.norm"] = SequenceParallel()
        block |= {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
    parallelize_module(model, mesh, outer)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, block)
    optimizer = llama.optimizer(model.parameters())
    # the embedding gives a rank its part of the sequence: positions have to be given
    positions = {"position_ids": torch.arange(llama.SIZE.seq).unsqueeze(0)} if sequence else {}

    def step(batch: dict[str, Tensor]) -> float:
        with loss_parallel() if loss else contextlib.nullcontext():
            value = model(**batch, **positions).loss
            optimizer.zero_grad()
            value.backward()
        optimizer.step()
        return float((value.full_tensor() if isinstance(value, DTensor) else value).detach())

    return step
