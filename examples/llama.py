"""A Llama of transformers over bytes, trained on the text of examples/gpt.py: what `make generate` writes with, and
what `make adapters` adapts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpt import BATCH, SEQ, optimizer, text

__all__ = ["batch", "data", "model", "optimizer"]


def model() -> nn.Module:
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends))


def batch() -> dict[str, Tensor]:
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


class Windows(Dataset[dict[str, Tensor]]):
    """Every stretch of SEQ bytes of a text. The model itself compares each with the byte that follows."""

    def __init__(self, source: Tensor) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source) - SEQ + 1

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = self.source[i : i + SEQ].long()
        return {"input_ids": row, "labels": row}


def batches(source: Tensor, number: int) -> list[dict[str, Tensor]]:
    """Global batches spread over all of a text."""
    windows = Windows(source)
    starts = torch.linspace(0, len(windows) - 1, number * BATCH).long()
    return [default_collate([windows[i] for i in part]) for part in starts.view(number, BATCH).tolist()]


def data(split: str) -> Iterable[dict[str, Tensor]] | Windows:
    return Windows(text(split)) if split == "train" else batches(text(split), 10)
