"""A mixture of experts written for shardc.nn.experts: the spec needs `experts: [{match: moe, axis: ep}]`.

docs/how-to/experts.md shows what becomes of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc.nn

VOCAB, HIDDEN, INNER, EXPERTS, CHOICES, BATCH, SEQ = 64, 64, 96, 8, 2, 8, 16


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / INNER**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.router(x).softmax(-1)
        weights, index = p.topk(CHOICES, -1)
        y = shardc.nn.experts(x, index, weights, self.up, self.down, activation="silu")
        share = F.one_hot(index, EXPERTS).to(p.dtype).mean((0, 1, 2))
        return y, EXPERTS * (share * p.mean((0, 1))).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.moe, self.head = nn.Embedding(VOCAB, HIDDEN), MoE(), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        y, balance = self.moe(x)
        return F.cross_entropy(self.head(x + y).flatten(0, 1), targets.flatten()) + 0.01 * balance


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "targets": ids.roll(-1, 1)}
