"""Small models that choose: routers written by hand, an attention over its best keys, a sampler."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc

VOCABULARY, HIDDEN, EXPERTS, ROWS, TOKENS = 48, 16, 8, 4, 8


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = self.linear(x).softmax(-1).topk(2, -1)
        return weights / weights.sum(-1, keepdim=True), index


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.up = nn.Parameter(torch.randn(EXPERTS, 32, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, index = self.gate(flat)
        y = shardc.nn.experts(flat, index, weights, self.up, self.down, activation="silu")
        return x + y.reshape(x.shape)


class Sparse(nn.Module):
    """An attention of each token over its 3 best keys, as DSA's indexer chooses them."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.qkv = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.index(x).chunk(2, -1)
        best = (a @ b.transpose(-1, -2)).topk(3, -1).indices
        q, k, v = self.qkv(x).chunk(3, -1)
        hidden = torch.full((x.shape[0], x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype)
        mask = hidden.scatter(-1, best, 0.0)
        return x + F.scaled_dot_product_attention(q, k, v, mask)


class Drawn(nn.Module):
    """Draws a token from its scores, and adds its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.back = nn.Linear(HIDDEN, VOCABULARY), nn.Embedding(VOCABULARY, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        p = self.head(x).softmax(-1)
        drawn = torch.multinomial(p.reshape(-1, VOCABULARY), 1).reshape(x.shape[:2])
        return x + self.back(drawn)


class Model(nn.Module):
    def __init__(self, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def built(layer: type[nn.Module] = Layer) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model(layer).double()
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS + 1))
    return model, {"ids": ids[:, :-1], "labels": ids[:, 1:]}
