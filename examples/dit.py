"""A diffusion transformer (Peebles & Xie 2023) with flow matching (Lipman et al. 2023), on drawn shapes (`make dit`).

Time and noise are drawn inside of forward: they are the same numbers on every mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZE, PATCH, CLASSES, BATCH = 16, 4, 4, 16


class Block(nn.Module):
    """Attention and an MLP, scaled and shifted by the condition; both begin as zero."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.condition = nn.Linear(hidden, 6 * hidden)
        nn.init.zeros_(self.condition.weight)
        nn.init.zeros_(self.condition.bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(F.silu(c))[:, None].chunk(6, -1)
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(y).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + gate1 * self.proj(y.transpose(1, 2).flatten(2))
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(y)))


class DiT(nn.Module):
    def __init__(self, layers: int = 4, hidden: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.hidden = hidden
        self.patches = nn.Linear(3 * PATCH**2, hidden)
        self.position = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, hidden))
        self.time = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.label = nn.Embedding(CLASSES, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * PATCH**2)

    def velocity(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        """Of patches x f[b, n, 3 * PATCH**2] at times t f[b]: from noise at 0 to images at 1."""
        speed = 1000 * torch.exp(
            -math.log(10000) * torch.arange(self.hidden // 2, device=x.device) / (self.hidden // 2)
        )
        angle = t[:, None] * speed.to(t.dtype)
        c = self.time(torch.cat([angle.cos(), angle.sin()], -1)) + self.label(label)
        x = self.patches(x) + self.position
        for block in self.blocks:
            x = block(x, c)
        return self.head(self.norm(x))

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        """image f[b, 3, SIZE, SIZE], label i64[b] -> the mean squared error of the velocity."""
        x = F.pixel_unshuffle(image, PATCH).flatten(2).transpose(1, 2)
        noise, t = torch.randn_like(x), torch.rand(len(x), dtype=x.dtype, device=x.device)
        between = t[:, None, None] * x + (1 - t[:, None, None]) * noise
        return F.mse_loss(self.velocity(between, t, label), x - noise)


class Shapes(Dataset[dict[str, Tensor]]):
    """A disc, a square, a cross or stripes, at a place and in a colour that depend on the number."""

    def __init__(self, number: int, first: int = 0) -> None:
        self.number, self.first = number, first

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(self.first + i)
        x, y = torch.meshgrid(torch.arange(SIZE) - SIZE / 2, torch.arange(SIZE) - SIZE / 2, indexing="xy")
        x, y = (z + 4 * torch.rand((), generator=draw) - 2 for z in (x, y))
        label, colour = (self.first + i) % CLASSES, torch.rand(3, 1, 1, generator=draw)
        inside = (x**2 + y**2 < 25, (x.abs() < 4) & (y.abs() < 4), (x.abs() < 2) | (y.abs() < 2), x.round() % 4 < 2)
        return {"image": 2 * inside[label] * colour - 1, "label": torch.tensor(label)}


def model() -> nn.Module:
    return DiT()


def batch() -> dict[str, Tensor]:
    return {"image": torch.zeros(BATCH, 3, SIZE, SIZE), "label": torch.zeros(BATCH, dtype=torch.long)}


def data(split: str) -> Shapes:
    return Shapes(4096) if split == "train" else Shapes(64, first=1_000_000)


def optimizer(params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)
