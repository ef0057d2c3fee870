"""A byte-level model of the Python standard library's sources, packed: rows of 8192 bytes hold several documents each.

A document is a file, or up to 4096 bytes of a longer one. Tokens see those of their own document, by a mask of the
batch's document ids, and their positions begin anew in each. Ordinary PyTorch: nothing here knows of shardc;
`documents.yaml` splits the rows over two ranks (docs/how-to/sequence.md).
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

SEQ, LONGEST, BATCH = 8192, 4096, 1
#: A row has no more documents than this.
DOCUMENTS = 64
#: Of the tokens behind a row's last document.
NONE = -1


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(rotated(q, *turn), rotated(k, *turn), v, mask)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x f[b, heads, s, d], cos and sin f[b, 1, s, d]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Model(nn.Module):
    def __init__(self, layers: int = 2, hidden: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.size = hidden // heads
        self.embed = nn.Embedding(256, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, 256, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.05)

    def forward(self, input_ids: Tensor, document: Tensor, position: Tensor) -> Tensor:
        """Each i64[batch, seq] -> logits [batch, seq, 256]. document: which one a token is of."""
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        same = document[:, None, :, None] == document[:, None, None, :]
        mask = same & (place[None, :] <= place[:, None])
        x = self.embed(input_ids)
        speed = 10000.0 ** -(torch.arange(0, self.size, 2, dtype=x.dtype, device=x.device) / self.size)
        angle = (position[:, None, :, None] * speed).repeat(1, 1, 1, 2)
        for block in self.blocks:
            x = block(x, mask, (angle.cos(), angle.sin()))
        return self.head(self.norm(x))


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over all tokens, in nats a byte, and f[batch, DOCUMENTS]: that of each document."""
    labels, document = batch["labels"], batch["document"]
    counted = labels != -100
    each = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    of = document[..., None] == torch.arange(DOCUMENTS, device=document.device)
    sums, counts = (each[..., None] * of).sum(1), (of & counted[..., None]).sum(1)
    return each.sum() / counted.sum(), {"per_document": sums / counts.clamp(min=1)}


def model() -> nn.Module:
    return Model()


def batch() -> dict[str, Tensor]:
    """One global batch of no text."""
    zeros = torch.zeros(BATCH, SEQ, dtype=torch.long)
    return {name: zeros.clone() for name in ("input_ids", "document", "position", "labels")}


def optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)


def documents(split: str) -> Iterator[bytes]:
    """In a fixed shuffle. Every 20th file is held out: "valid" has files that "train" never sees."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
    files = sorted(f for f in root.rglob("*.py") if not skip.intersection(f.relative_to(root).parts))
    random.Random(0).shuffle(files)
    for i, file in enumerate(files):
        if (i % 20 == 0) == (split == "valid"):
            text = file.read_bytes()
            yield from (text[at : at + LONGEST] for at in range(0, len(text), LONGEST))


def row(parts: list[bytes]) -> dict[str, Tensor]:
    """Documents one behind the other, and nothing behind them. Labels are the next byte of the same document."""
    rest = SEQ - sum(map(len, parts))
    of = [i for i, part in enumerate(parts) for _ in part] + [NONE] * rest
    ids = torch.frombuffer(bytearray(b"".join(parts) + bytes(rest)), dtype=torch.uint8).long()
    document = torch.tensor(of)
    same = F.pad((document[1:] == document[:-1]) & (document[1:] != NONE), (0, 1))
    position = torch.tensor([j for part in [*parts, bytes(rest)] for j in range(len(part))])
    return {
        "input_ids": ids,
        "document": document,
        "position": position,
        "labels": torch.where(same, ids.roll(-1), -100),
    }


class Rows(Dataset[dict[str, Tensor]]):
    """Packed rows; a document that does not fit in the row that is open opens the next."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        self.rows: list[list[bytes]] = [[]]
        for text in filter(None, texts):
            last = self.rows[-1]
            if sum(map(len, last)) + len(text) > SEQ or len(last) == DOCUMENTS:
                self.rows.append([])
            self.rows[-1].append(text)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return row(self.rows[i])


def data(split: str) -> Iterable[dict[str, Tensor]] | Rows:
    """train: rows, which the run reads in an order of its own; valid: four global batches."""
    rows = Rows(documents(split))
    if split == "train":
        return rows
    return [{name: x[None] for name, x in rows[i].items()} for i in range(4)]
