"""Direct preference optimization (Rafailov et al. 2023): of two answers, the better one becomes likelier (`make dpo`).

The reference is a frozen copy of the policy in the same model. `Scored` has none: its log-probabilities were computed
before, with `shardc score` or `program.forward(...)`, and come with the batch.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

sys.path.insert(0, str(Path(__file__).resolve().parent))

from distill import llama

BETA, PROMPT, SEQ, BATCH = 0.1, 8, 24, 8


def log_probability(model: nn.Module, ids: Tensor, answer: Tensor) -> Tensor:
    """Of the answers' tokens: ids i64[b, s], answer bool[b, s] -> f[b]."""
    scores = model(ids).logits[:, :-1].log_softmax(-1)
    each = scores.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (each * answer[:, 1:]).sum(-1)


class Preference(nn.Module):
    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy, self.reference = policy, copy.deepcopy(policy).requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor, chosen_answer: Tensor, rejected_answer: Tensor) -> Tensor:
        ids, answer = torch.cat([chosen, rejected]), torch.cat([chosen_answer, rejected_answer])
        gain = log_probability(self.policy, ids, answer) - log_probability(self.reference, ids, answer)
        return preferred(gain)


def preferred(gain: Tensor) -> Tensor:
    """The loss of what the policy gained over the reference: f[2 b], chosen answers first."""
    better, worse = gain.chunk(2)
    return -F.logsigmoid(BETA * (better - worse)).mean()


class Scored(nn.Module):
    """The same, with log-probabilities of the reference in the batch: reference f[b, 2], chosen and rejected."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(
        self,
        chosen: Tensor,
        rejected: Tensor,
        chosen_answer: Tensor,
        rejected_answer: Tensor,
        reference: Tensor,
    ) -> Tensor:
        ids, answer = torch.cat([chosen, rejected]), torch.cat([chosen_answer, rejected_answer])
        return preferred(log_probability(self.policy, ids, answer) - reference.t().flatten())


class Pairs(Dataset[dict[str, Tensor]]):
    """A prompt, and two answers: the better one repeats the prompt, the other is at random."""

    def __init__(self, number: int, seed: int) -> None:
        self.number, self.seed = number, seed

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        draw = random.Random(1_000_000 * self.seed + i)
        prompt = [draw.randrange(64) for _ in range(PROMPT)]
        chosen = torch.tensor((prompt * SEQ)[:SEQ])
        rejected = torch.tensor(prompt + [draw.randrange(64) for _ in range(SEQ - PROMPT)])
        answer = torch.arange(SEQ) >= PROMPT
        return {"chosen": chosen, "rejected": rejected, "chosen_answer": answer, "rejected_answer": answer}


def model() -> nn.Module:
    return Preference(llama(layers=2, hidden=64))


def batch() -> dict[str, Tensor]:
    pairs = Pairs(BATCH, 2)
    return default_collate([pairs[i] for i in range(BATCH)])


def data(split: str) -> Pairs:
    return Pairs(4096, 0) if split == "train" else Pairs(32, 1)


def optimizer(params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)
