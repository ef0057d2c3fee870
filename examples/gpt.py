"""A byte-level GPT, trained on the source text of Python's own standard library.

Ordinary PyTorch: nothing here knows of shardc. `model`, `batch`, `data` and `optimizer` are the names
that `shardc run` looks for in a model file.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

BATCH, SEQ = 16, 128


@dataclass(frozen=True)
class Config:
    vocab: int = 256
    seq: int = SEQ
    layers: int = 4
    heads: int = 4
    hidden: int = 128
    dropout: float = 0.0


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.dropout = c.heads, c.dropout
        self.qkv = nn.Linear(c.hidden, 3 * c.hidden)
        self.proj = nn.Linear(c.hidden, c.hidden)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, d // self.heads).transpose(1, 2) for t in self.qkv(x).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.drop(self.proj(y.transpose(1, 2).reshape(b, s, d)))


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.up = nn.Linear(c.hidden, 4 * c.hidden)
        self.down = nn.Linear(4 * c.hidden, c.hidden)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(c.hidden), Attention(c)
        self.norm2, self.mlp = nn.LayerNorm(c.hidden), MLP(c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.hidden)
        self.position = nn.Embedding(c.seq, c.hidden)
        self.drop = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.hidden)
        self.head = nn.Linear(c.hidden, c.vocab, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = (2 * c.layers) ** -0.5 if name.endswith(("proj.weight", "down.weight")) else 1.0
                nn.init.normal_(p, std=0.05 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """input_ids, labels: i64[batch, seq] -> mean loss in nats per byte. Labels of -100 do not count."""
        x = self.embed(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def model() -> nn.Module:
    return GPT(Config())


def with_dropout() -> nn.Module:
    """The same with dropout: `shardc run examples/gpt.py:with_dropout ...`."""
    return GPT(Config(dropout=0.1))


def batch() -> dict[str, Tensor]:
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def text(split: str) -> Tensor:
    """The library's sources as u8[n]. Every 20th file of a fixed shuffle is held out: "valid" has files that "train"
    never sees.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
    files = sorted(f for f in root.rglob("*.py") if not skip.intersection(f.relative_to(root).parts))
    random.Random(0).shuffle(files)
    chosen = files[::20] if split == "valid" else [f for i, f in enumerate(files) if i % 20]
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in chosen)), dtype=torch.uint8)


class Windows(Dataset[dict[str, Tensor]]):
    """Every stretch of SEQ bytes of a text, with the bytes that follow them."""

    def __init__(self, source: Tensor) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source) - SEQ

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = self.source[i : i + SEQ + 1].long()
        return {"input_ids": row[:-1], "labels": row[1:]}


def data(split: str) -> Iterable[dict[str, Tensor]] | Windows:
    """train: samples, which the run reads in an order of its own; valid: 20 global batches over all held-out files."""
    windows = Windows(text(split))
    if split == "train":
        return windows
    starts = torch.linspace(0, len(windows) - 1, 20 * BATCH).long()
    return [default_collate([windows[i] for i in part]) for part in starts.view(20, BATCH).tolist()]
