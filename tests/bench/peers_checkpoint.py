"""Activation checkpointing as others do it: torch.utils.checkpoint applied by hand to the same layers, under DDP.

DDP, checkpoint             checkpoint(layer, use_reentrant=False): all of a layer is computed again (docs.pytorch.org/docs/stable/checkpoint.html)
DDP, selective checkpoint   with create_selective_checkpoint_contexts: results of products and attention are kept, the rest is computed again
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import peers_data
import torch
from contenders import Step
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
KEPT = [aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]


def prepare(name: str) -> Callable[[Any], Step]:
    selective = "selective" in name
    options: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, KEPT)} if selective else {}

    def build(model: Any) -> Step:
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)
        return peers_data.ddp(model)

    return build
