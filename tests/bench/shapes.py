"""Shapes of the Llama 3 family (Llama Team 2024, table 3), as fields of transformers' configs."""

from __future__ import annotations

from typing import Any

#: layers, hidden, heads, inner.
SIZES = {
    "8B": (32, 4096, 32, 14336),
    "70B": (80, 8192, 64, 28672),
    "405B": (126, 16384, 128, 53248),
}
VOCAB, KV_HEADS = 128256, 8


def llama(size: str, **other: Any) -> dict[str, Any]:
    """Fields of a config. other: in their place, or beside them."""
    layers, hidden, heads, inner = SIZES[size]
    own = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": inner}
    rest = {"num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "tie_word_embeddings": False, "use_cache": False}
    return {**own, **rest, **other}
