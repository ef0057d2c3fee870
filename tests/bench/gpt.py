"""A GPT of transformers, of the benchmark's sizes; batches and optimizer are llama's."""

from __future__ import annotations

import llama
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


def model() -> nn.Module:
    """No dropout: its masks would be others for others."""
    s = llama.SIZE
    config = GPT2Config(
        vocab_size=s.vocab,
        n_embd=s.hidden,
        n_head=s.heads,
        n_layer=s.layers,
        n_positions=s.seq,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()
