"""Distillation: a small model learns from a large one, which is frozen. Both are in one model file (`make distill`)."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpt import BATCH, SEQ, Windows, text

HEAT, WEIGHT = 2.0, 0.5


def llama(layers: int, hidden: int) -> nn.Module:
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None, pad_token_id=None))


class Distillation(nn.Module):
    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Kullback-Leibler divergence to the teacher's softened probabilities, and the loss of the text."""
        ours = self.student(input_ids).logits.flatten(0, 1)
        theirs = self.teacher(input_ids).logits.flatten(0, 1)
        soft = F.kl_div((ours / HEAT).log_softmax(-1), (theirs / HEAT).log_softmax(-1), None, None, "batchmean", True)
        return WEIGHT * HEAT**2 * soft + (1 - WEIGHT) * F.cross_entropy(ours, labels.flatten())


def model() -> nn.Module:
    """In earnest: from_pretrained(...) twice."""
    return Distillation(llama(layers=2, hidden=64), llama(layers=4, hidden=128))


def batch() -> dict[str, Tensor]:
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def data(split: str) -> Windows:
    return Windows(text(split)) if split == "train" else Windows(text(split)[: SEQ + 64])


def optimizer(params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)
