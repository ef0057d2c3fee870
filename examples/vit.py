"""A vision transformer that names the shapes of dit.py (`make vit`): timm's from its name alone, or transformers'."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

sys.path.insert(0, str(Path(__file__).resolve().parent))

from dit import BATCH, CLASSES, SIZE, Shapes


def model() -> nn.Module:
    """timm's (pip install timm), with random weights."""
    import timm

    sizes = {"img_size": SIZE, "patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **sizes)


class OfTransformers(nn.Module):
    """The same from transformers: `shardc run examples/vit.py:OfTransformers examples/vit.yaml`."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
        self.vit = ViTForImageClassification(ViTConfig(**sizes, image_size=SIZE, patch_size=4, num_labels=CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.vit(x).logits


def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The cross entropy, and the share of images that are named right: a sum and a number, so that means are exact."""
    label = batch["label"]
    right = logits.argmax(-1) == label
    beside = {"right": (right.sum(), torch.ones_like(label).sum())}
    return F.cross_entropy(logits, label, label_smoothing=0.1), beside


def batch() -> dict[str, Tensor]:
    return {"x": torch.zeros(BATCH, 3, SIZE, SIZE), "label": torch.zeros(BATCH, dtype=torch.long)}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """timm and the model above call an image x."""
    whole = default_collate(samples)
    return {"x": whole["image"], "label": whole["label"]}


def data(split: str) -> Shapes:
    return Shapes(4096) if split == "train" else Shapes(64, first=1_000_000)


def optimizer(params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)
