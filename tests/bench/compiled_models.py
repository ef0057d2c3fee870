"""What compiled steps train beside the Llama and the Mixtral: a GPT, and a model whose time is element-wise work. No
dropout, whose masks would be others for others. Batches and optimizer are llama's.
"""

from __future__ import annotations

from types import SimpleNamespace

import llama
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutput


def gpt() -> nn.Module:
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


class ElementWise(nn.Module):
    """A gated mixture of what transformers' blocks write out: RMS norm, rotation, gelu by tanh, dropout, gates. One
    small product a layer.
    """

    def __init__(self, layers: int = 4, width: int = 256, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[1]).float()[:, None] / 100 * torch.linspace(1, 0.1, half)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        for mix, scale in zip(self.mix, self.scales, strict=True):
            y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale
            y = y * cos + torch.cat([-y[..., half:], y[..., :half]], -1) * sin
            y = mix(y)
            y = 0.5 * y * (1 + torch.tanh(0.79788456 * (y + 0.044715 * y * y * y)))
            x = x + nn.functional.dropout(y * torch.sigmoid(x), self.dropout, self.training)
        return x.square().mean()


class OfIds(nn.Module):
    """The same on the benchmark's batches: a number for each token, times a vector."""

    def __init__(self) -> None:
        super().__init__()
        width = llama.SIZE.hidden
        self.config = SimpleNamespace(num_hidden_layers=4)
        self.vector, self.layers = nn.Parameter(torch.randn(width)), ElementWise(4, width, dropout=0.0)

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        x = (input_ids + labels) / llama.SIZE.vocab - 1
        return CausalLMOutput(loss=self.layers(x[..., None] * self.vector))


def element_wise() -> nn.Module:
    return OfIds().train()
