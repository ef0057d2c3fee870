"""examples/llama.py, trained on Python, adapted to another text: this repository's pages (`make adapters`)."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from llama import Windows, batch, batches, model  # noqa: E402  (the example beside this one)

__all__ = ["batch", "data", "model", "optimizer"]


def optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def pages(split: str) -> Tensor:
    """Markdown as u8[n]: every fifth page is held out."""
    files = sorted((HERE.parent / "docs").glob("*.md"))
    chosen = files[::5] if split == "valid" else [f for i, f in enumerate(files) if i % 5]
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in chosen)), dtype=torch.uint8)


def data(split: str) -> Iterable[dict[str, Tensor]] | Windows:
    return Windows(pages(split)) if split == "train" else batches(pages(split), 10)
