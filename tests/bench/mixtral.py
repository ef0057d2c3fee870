"""What the benchmark of experts trains: a Mixtral of transformers, 4 layers of 8 experts; batches and optimizer are
llama's.
"""

from __future__ import annotations

import llama
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

EXPERTS, CHOICES, LAYERS = 8, 2, 4


def model() -> nn.Module:
    s = llama.SIZE
    config = MixtralConfig(
        vocab_size=s.vocab,
        hidden_size=s.hidden,
        intermediate_size=2 * s.hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=s.heads,
        num_key_value_heads=s.heads,
        max_position_embeddings=s.seq,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOICES,
        tie_word_embeddings=False,
        use_cache=False,
        sliding_window=None,
    )
    return MixtralForCausalLM(config).train()
