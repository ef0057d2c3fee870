"""Models whose attention is of a kind of its own, or that scan a sequence, for tests of a split sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import BATCH, HIDDEN, SEQ, VOCAB, labels, tokens
from tests.zoo.hf import EXPERTS, GQA, Family, row
from tests.zoo.plain import DiTBlock, ids, real, sinusoid


class PrefixLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class PrefixLM(nn.Module):
    """A row's first tokens, of a number that the batch says, see one another; what follows is causal, as in T5's
    prefix LM and PaliGemma.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layers = nn.ModuleList(PrefixLayer() for _ in range(2))

    def forward(self, input_ids: Tensor, prefix: Tensor, labels: Tensor) -> Tensor:
        i = torch.arange(input_ids.shape[1])
        mask = (i[:, None] >= i) | (i < prefix[:, None, None, None])
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class DiTOfTokens(nn.Module):
    """adaLN-zero blocks over patches that come as tokens: attention sees all of them, a time is of a row."""

    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(features, HIDDEN), nn.Linear(HIDDEN, features)
        self.time = nn.Sequential(nn.Linear(16, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.place = nn.Embedding(SEQ, HIDDEN)
        self.blocks = nn.ModuleList(DiTBlock(HIDDEN, 8) for _ in range(2))

    def forward(self, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        c = self.time(sinusoid(t.to(x.dtype), 16))
        h = self.embed(x + noise) + self.place(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h, c)
        return F.mse_loss(self.out(h), noise)


def prefix_lm() -> tuple[nn.Module, dict[str, Any]]:
    return PrefixLM(), {"input_ids": tokens(), "prefix": torch.arange(BATCH), "labels": labels()}


def dit_of_tokens() -> tuple[nn.Module, dict[str, Any]]:
    noise = real(BATCH, SEQ, 4, seed=2)
    return DiTOfTokens(), {"x": real(BATCH, SEQ, 4), "noise": noise, "t": ids(1000, BATCH)}


MODELS = {"dit": dit_of_tokens, "prefix_lm": prefix_lm}

#: Families whose layers scan a sequence, besides those of zoo/hf_more.py. A row here is not tried on other meshes.
GDN = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, Family] = {
    "falcon_mamba": row("FalconMambaForCausalLM", state_size=4, time_step_rank=4),
    "jamba": row(
        "JambaForCausalLM",
        **GQA,
        **EXPERTS,
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "nemotron_h": row(
        "NemotronHForCausalLM",
        **GQA,
        head_dim=8,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=4,
        chunk_size=4,
        layers_block_type=["mamba", "attention"],
        use_mamba_kernels=False,
    ),
    "qwen3_5": row("Qwen3_5ForCausalLM", **GQA, **GDN, **LAYERS, head_dim=16),
    "minimax": row(
        "MiniMaxForCausalLM",
        **GQA,
        **EXPERTS,
        **LAYERS,
        head_dim=8,
        block_size=4,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}
