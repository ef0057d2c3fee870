"""What the benchmark trains: a Llama of transformers, 8 layers, hidden 512, sequence 256, and the weights that every contender starts from.

`shardc.modelfile` could read this file too: it has `model()` and `batch()`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, HIDDEN, HEADS, INTER, VOCAB = 8, 512, 8, 1408, 8192
BATCH, SEQ = 4, 256


def model() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=SEQ, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def batch(step: int = 0) -> dict[str, Tensor]:
    """A global batch of random tokens: i64[4, 256] ids and labels, the same on every rank and for every contender."""
    ids = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def optimizer(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)  # type: ignore[arg-type]
