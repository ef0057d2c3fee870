"""On-policy distillation: a student learns from a teacher on what the student itself writes.

    python examples/on_policy.py FOLDER [--steps 20]        the processes of examples/grpo.py, with another loss

The loss is the reverse KL divergence, KL(student || teacher), over the student's own tokens. The teacher is frozen, in
the same program, and split as the student is. `loss: {chunks: n}` keeps the logits of both small.
"""

from __future__ import annotations

from typing import Any

import grpo
import torch
import transformers
from torch import Tensor, nn

SPEC = {"shardc": 1, "mesh": {"dp": grpo.TRAINERS}, "data": {"zero": 3}, "loss": {"chunks": 2}}


def network(width: int, seed: int) -> nn.Module:
    """Return a small causal language model."""
    size = {"vocab_size": grpo.VOCAB, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    torch.manual_seed(seed)
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **heads))
    return model


class OnPolicy(nn.Module):
    """The reverse KL divergence on the answers' tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.teacher = network(32, 0), network(64, 1).requires_grad_(False)
        with torch.no_grad():
            self.teacher.lm_head.weight.mul_(20)  # type: ignore[operator, union-attr]  # a teacher that prefers some tokens

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        ours = self.policy(ids).logits[:, grpo.PROMPT - 1 : -1].log_softmax(-1)
        theirs = self.teacher(ids).logits[:, grpo.PROMPT - 1 : -1].log_softmax(-1)
        kl = (ours.exp() * (ours - theirs)).sum(-1).mean()
        each = ours.gather(-1, ids[:, grpo.PROMPT :, None]).squeeze(-1)
        return {"loss": kl, "log_probabilities": each}


class Task(grpo.Task):
    spec: dict[str, Any] = SPEC

    def rollout_model(self) -> nn.Module:
        return network(32, 0)

    def model(self) -> nn.Module:
        return OnPolicy()

    def example(self) -> dict[str, Tensor]:
        return {"ids": super().example()["ids"]}

    def scored(self, ids: Tensor, old: Tensor) -> dict[str, Tensor]:
        return {"ids": ids, "old": old, "reward": torch.zeros(len(ids))}


if __name__ == "__main__":
    grpo.main(Task(), __file__)
