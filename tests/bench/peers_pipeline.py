"""Pipelines as torch.distributed.pipelining runs them (docs.pytorch.org/docs/stable/distributed.pipelining.html):
stages cut by hand.

Its schedules return no loss that others could see: rank 0 gets it from the last stage, as ours does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama
import torch
import torch.distributed as dist
from contenders import MICROBATCHES, Step
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}


class Part(nn.Module):
    """Consecutive layers of a LlamaForCausalLM; the first part has its embedding, the last one its head."""

    def __init__(self, model: Any, begin: int, end: int) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens if begin == 0 else None
        self.layers = model.model.layers[begin:end]
        self.rotary = model.model.rotary_emb
        last = end == len(model.model.layers)
        self.norm, self.head = (model.model.norm, model.lm_head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) if self.embed is not None else x
        positions = torch.arange(h.shape[1]).unsqueeze(0)
        rotary = self.rotary(h, positions)
        for layer in self.layers:
            h = layer(h, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return self.head(self.norm(h)) if self.head is not None and self.norm is not None else h


def prepare(name: str) -> Callable[[Any], Step]:
    make, chunks = SCHEDULES[name.removeprefix("pipelining ")]
    return lambda model: _step(model, make, chunks)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def _step(model: Any, make: Any, chunks: int) -> Step:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = chunks * ranks
    per = llama.SIZE.layers // count
    parts = [(s, Part(model, s * per, (s + 1) * per)) for s in range(rank, count, ranks)]
    stages = [PipelineStage(part, s, count, torch.device("cpu")) for s, part in parts]
    schedule = make(stages if chunks > 1 else stages[0], MICROBATCHES, loss_fn=_loss)
    optimizer = llama.optimizer([p for _, part in parts for p in part.parameters()])
    last = any(s == count - 1 for s, _ in parts)

    def step(batch: dict[str, Tensor]) -> float:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([batch["input_ids"]] if rank == 0 else []),
            **({"target": batch["labels"], "losses": losses} if last else {}),
        )
        optimizer.step()
        loss = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.all_reduce(loss)
        return float(loss)

    return step
