"""Mixtures of experts as others train them.

DDP, replicated experts   every rank has all experts (transformers' grouped products)
DeepSpeed MoE             deepspeed.ai/tutorials/mixture-of-experts: MoE layers with ep_size=2, top 2, no token dropped,
                          no noise: the model's own routing
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import held
import llama
import mixtral
import peers_data
import torch
from contenders import Step
from torch import Tensor, nn


def prepare(name: str) -> Callable[[Any], Step]:
    if name.startswith("DDP"):
        return _ddp
    import deepspeed.moe.layer  # noqa: F401

    return _deepspeed


class _Contender:
    """A step, and what experts take on this rank."""

    def __init__(self, step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._step, self._model, self._optimizer = step, model, optimizer

    def __call__(self, batch: dict[str, Tensor]) -> float:
        return self._step(batch)

    def expert_bytes(self) -> int:
        return held.of_experts(self._model.named_parameters(), self._optimizer)


def _ddp(model: Any) -> Step:
    optimizers: list[torch.optim.Optimizer] = []

    def make(params: Any) -> torch.optim.Optimizer:
        optimizers.append(llama.optimizer(params))
        return optimizers[0]

    return _Contender(peers_data.ddp(model, make), model, optimizers[0])


class _Expert(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * inner, bias=False), nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        y: Tensor = self.down(nn.functional.silu(gate) * up)
        return y


class _First(nn.Module):
    """The layer's output without its loss and counts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


def _deepspeed(model: Any) -> Step:
    import deepspeed
    import torch.distributed as dist
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    for block in model.model.layers:
        old = block.mlp
        inner = old.experts.down_proj.shape[2]
        layer = MoE(
            llama.SIZE.hidden,
            _Expert(llama.SIZE.hidden, inner),
            mixtral.EXPERTS,
            ep_size=dist.get_world_size(),
            k=mixtral.CHOICES,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        moe = layer.deepspeed_moe
        mine = moe.experts.deepspeed_experts
        first = dist.get_rank() * len(mine)
        with torch.no_grad():
            moe.gate.wg.weight.copy_(old.gate.weight)
            for i, expert in enumerate(mine):
                expert.up.weight.copy_(old.experts.gate_up_proj[first + i])
                expert.down.weight.copy_(old.experts.down_proj[first + i])
        block.mlp = _First(layer)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    config = {"train_micro_batch_size_per_gpu": llama.SIZE.batch // dist.get_world_size(), "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=model, optimizer=llama.optimizer(groups), config=config)
    return _Contender(peers_data.deepspeed_loop(engine), engine.module, engine.optimizer)
