"""Fine-tune a folder of transformers with LoRA (`make lora`): a folder in, an adapter for peft out.

The folder is $BASE, by default what `make pretrain` writes; any causal language model with its tokenizer will do.
The text is this repository's pages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
BASE = os.environ.get("BASE", str(ROOT / "runs" / "pretrain"))
SEQ, BATCH = 128, 8


def model() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(BASE)


def batch() -> dict[str, Tensor]:
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of SEQ tokens of the pages, which end with the tokenizer's end of text. Every fifth page is held out."""

    def __init__(self, split: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(BASE)
        pages = sorted((ROOT / "docs").rglob("*.md"))
        texts = [f.read_text() for i, f in enumerate(pages) if (i % 5 == 0) == (split == "valid")]
        ids = [t for text in texts for t in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
        self.rows = torch.tensor(ids[: len(ids) // SEQ * SEQ]).view(-1, SEQ)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def data(split: str) -> Rows:
    return Rows(split)


def optimizer(params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)
