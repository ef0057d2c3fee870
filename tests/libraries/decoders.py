"""What decoders.yaml calls: models of litgpt by name, and torchtitan's with the positions that its trainer gives."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn


def lit(name: str, **settings: Any) -> nn.Module:
    """litgpt's GPT, by the name of one of its configurations."""
    small = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "block_size": 32,
        "padded_vocab_size": 64,
        "vocab_size": 64,
        "intermediate_size": 64,
        **settings,
    }
    litgpt = importlib.import_module("litgpt")
    config = litgpt.Config.from_name(name)
    groups = {} if getattr(config, "n_query_groups", 1) == config.n_head else {"n_query_groups": 2}
    return litgpt.GPT(litgpt.Config.from_name(name, **groups, **small))


class Titan(nn.Module):
    """A debug model of torchtitan, small, on tokens; positions are those of its decoders: 0, 1, 2, ..."""

    def __init__(self, family: str, **settings: Any) -> None:
        super().__init__()
        module = importlib.import_module(f"torchtitan.models.{family}")
        config = module.model_registry("debugmodel", attn_backend="flex", **settings).model
        config.layers = config.layers[:2]
        self.model = config.build()
        self.model.init_states(buffer_device=torch.device("cpu"))

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return self.model(ids, at, self.model.get_attention_masks(at))
