"""GPT-3's layers (Brown et al. 2020) as "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et
al. 2022) counts them: float16, dropout on, attention written out (unfused). Any sizes; on the meta device: nothing
takes memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Core(nn.Module):
    """Attention itself, of [batch, heads, sequence, hidden / heads]: what selective recomputation computes again."""

    mask: Tensor

    def __init__(self, sequence: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(sequence, sequence, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        weights: Tensor = self.drop(torch.softmax(scores.masked_fill(self.mask, float("-inf")), -1))
        return weights @ v


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.head = hidden // heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.proj = (nn.Linear(hidden, hidden) for _ in range(4))
        self.core = Core(sequence)
        self.fc, self.out = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        y = self.ln_1(x)
        q, k, v = (f(y).view(b, s, -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.drop(self.proj(self.core(q, k, v).transpose(1, 2).reshape(b, s, h)))
        return x + self.drop(self.out(F.gelu(self.fc(self.ln_2(x)))))  # type: ignore[no-any-return]


class GPT3(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, sequence: int, vocab: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(sequence, hidden)
        for embedding in (self.wte, self.wpe):  # as GPT-2: with torch's own, a tied head's softmax is 0 or 1, and steps
            nn.init.normal_(embedding.weight, std=0.02)  # compute with numbers below 1e-38, which takes a CPU long
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList(Block(hidden, heads, sequence) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.drop(self.wte(ids) + self.wpe.weight)
        for block in self.h:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def gpt3(
    layers: int = 3,
    hidden: int = 96,
    heads: int = 6,
    sequence: int = 40,
    vocab: int = 101,
    batch: int = 5,
    dtype: torch.dtype = torch.float16,
) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        model = GPT3(layers, hidden, heads, sequence, vocab).to(dtype)
        ids = torch.empty(batch, sequence, dtype=torch.long)
        return model, {"ids": ids, "targets": ids.clone()}
