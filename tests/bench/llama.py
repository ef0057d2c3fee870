"""What the benchmark trains: a Llama of transformers, and the weights that every contender starts from.

`shardc.cli.model_file` could read this file too: it has `model()` and `batch()`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    heads: int
    inter: int
    vocab: int
    batch: int
    seq: int


FULL = Size(layers=8, hidden=512, heads=8, inter=1408, vocab=8192, batch=4, seq=256)
QUICK = Size(
    layers=4, hidden=64, heads=4, inter=128, vocab=512, batch=4, seq=32
)  # tries the harness; its figures say nothing
GPU = Size(layers=8, hidden=2048, heads=16, inter=5632, vocab=32000, batch=8, seq=1024)  # 0.54 billion parameters
SMALL = Size(
    layers=8, hidden=256, heads=4, inter=512, vocab=1024, batch=4, seq=128
)  # its ops take less than their host
SIZE = {"quick": QUICK, "gpu": GPU}.get(os.environ.get("SHARDC_BENCH", ""), FULL)  # processes inherit it


def model() -> nn.Module:
    config = LlamaConfig(
        vocab_size=SIZE.vocab,
        hidden_size=SIZE.hidden,
        intermediate_size=SIZE.inter,
        num_hidden_layers=SIZE.layers,
        num_attention_heads=SIZE.heads,
        num_key_value_heads=SIZE.heads,
        max_position_embeddings=SIZE.seq,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def batch(step: int = 0) -> dict[str, Tensor]:
    """A global batch of random tokens: i64[batch, seq] ids and labels, the same on every
    rank and for every contender.
    """
    ids = torch.randint(SIZE.vocab, (SIZE.batch, SIZE.seq), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def optimizer(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)  # type: ignore[arg-type]
