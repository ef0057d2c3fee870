"""Models that no test has: what tests/bench/predicted.py holds predictions against. Each as tests/zoo does:
(a model, one global batch); `wide` makes them larger, for times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo import Built, hf


@dataclass(frozen=True)
class New:
    """make: of a factor by which hidden sizes grow. layers: a pattern of what can be recomputed; cut: modules that a
    pipeline can be cut before; experts: of the module with experts; sequence: rows are sequences that can be split.
    """

    make: Callable[[int], Built]
    layers: str
    cut: str = ""
    experts: str = ""
    sequence: bool = False


def _ids(high: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def _random(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class GatingUnit(nn.Module):
    """gMLP (Liu et al. 2021): half of the channels gate the other, mixed over the sequence."""

    def __init__(self, hidden: int, length: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden)
        self.gate, self.down = nn.LayerNorm(2 * hidden), nn.Linear(2 * hidden, hidden)
        self.mix = nn.Parameter(torch.randn(length, length) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        a, b = functional.gelu(self.up(self.norm(x))).chunk(2, -1)
        return x + self.down(a * (1 + torch.einsum("st,bth->bsh", self.mix, self.gate(b))))


class GatedMlp(nn.Module):
    def __init__(self, hidden: int = 64, layers: int = 4, length: int = 24, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, hidden)
        self.layers = nn.ModuleList(GatingUnit(hidden, length) for _ in range(layers))
        self.head = nn.Linear(hidden, classes)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x.mean(1)), labels)


class ParallelBlock(nn.Module):
    """Attention with a linear bias by distance and a gated MLP, side by side, behind one norm over root mean squares."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, 3 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        b, s, h = x.shape
        y = self.norm(x)
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(y).chunk(3, -1))
        a = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(b, s, h)
        return x + self.out(a) + self.down(functional.silu(self.gate(y)) * self.up(y))


class ParallelDecoder(nn.Module):
    def __init__(self, hidden: int = 64, heads: int = 4, layers: int = 4, vocab: int = 128) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False)
        self.layers = nn.ModuleList(ParallelBlock(hidden, heads) for _ in range(layers))
        self.norm, self.heads = nn.RMSNorm(hidden), heads

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        at = torch.arange(ids.shape[1], device=ids.device)
        slopes = 2.0 ** -torch.arange(1, self.heads + 1, device=ids.device, dtype=x.dtype)
        distance = (at[None] - at[:, None]).to(x.dtype)
        bias = (slopes[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))[None]
        for layer in self.layers:
            x = layer(x, bias)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Highway(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).sigmoid()
        return gate * self.value(x).relu() + (1 - gate) * x


class CharacterCnn(nn.Module):
    """Words from their characters: convolutions of several widths, the largest of each, highways (Kim et al. 2016)."""

    def __init__(self, hidden: int = 48, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.convolutions = nn.ModuleList(nn.Conv1d(16, hidden, width, padding=width // 2) for width in (1, 3, 5))
        self.layers = nn.ModuleList(Highway(3 * hidden) for _ in range(layers))
        self.head = nn.Linear(3 * hidden, 20)

    def forward(self, characters: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(characters).transpose(1, 2)
        x = torch.cat([c(x).tanh().amax(-1) for c in self.convolutions], -1)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x), labels)


class DenseBlock(nn.Module):
    """Each layer takes what all before it made (Huang et al. 2017)."""

    def __init__(self, channels: int, grow: int, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels + i * grow) for i in range(layers))
        self.convolutions = nn.ModuleList(nn.Conv2d(channels + i * grow, grow, 3, padding=1) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            x = torch.cat([x, convolution(norm(x).relu())], 1)
        return x


class DenseNet(nn.Module):
    def __init__(self, channels: int = 16, grow: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            self.blocks.append(DenseBlock(channels, grow, 3))
            channels += 3 * grow
            self.blocks.append(nn.Sequential(nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)))
            channels //= 2
        self.head = nn.Linear(channels, 10)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class CrossLayer(nn.Module):
    """x0 · (W x) + x (Wang et al. 2021, DCN v2)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.mlp = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        return first * self.linear(x) + x + self.mlp(x).relu()


class CrossNetwork(nn.Module):
    """Click rates from categories and numbers."""

    def __init__(self, hidden: int = 16, layers: int = 3, fields: int = 6) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(300, hidden) for _ in range(fields))
        size = hidden * fields + 8
        self.layers = nn.ModuleList(CrossLayer(size) for _ in range(layers))
        self.head = nn.Linear(size, 1)

    def forward(self, categories: Tensor, numbers: Tensor, clicked: Tensor) -> Tensor:
        first = torch.cat([*(t(categories[:, i]) for i, t in enumerate(self.tables)), numbers], -1)
        x = first
        for layer in self.layers:
            x = layer(first, x)
        return functional.binary_cross_entropy_with_logits(self.head(x).squeeze(-1), clicked)


class ConformerBlock(nn.Module):
    """Half an MLP, attention, a depthwise convolution, half an MLP (Gulati et al. 2020)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = (self._mlp(hidden) for _ in range(2))
        self.attention_norm, self.attention = (
            nn.LayerNorm(hidden),
            nn.MultiheadAttention(hidden, heads, batch_first=True),
        )
        self.norm, self.pointwise = nn.LayerNorm(hidden), nn.Linear(hidden, 2 * hidden)
        self.depthwise = nn.Conv1d(hidden, hidden, 5, padding=2, groups=hidden)
        self.back, self.last = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)

    def _mlp(self, hidden: int) -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.SiLU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.before(x)
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = functional.glu(self.pointwise(self.norm(x)), -1)
        x = x + self.back(functional.silu(self.depthwise(y.transpose(1, 2)).transpose(1, 2)))
        return self.last(x + 0.5 * self.after(x))


class Conformer(nn.Module):
    def __init__(self, hidden: int = 32, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.front = nn.Linear(20, hidden)
        self.layers = nn.ModuleList(ConformerBlock(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, 30)

    def forward(self, frames: Tensor, phones: Tensor) -> Tensor:
        x = self.front(frames)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), phones.flatten())


class TwoTowers(nn.Module):
    """Queries and documents, pooled by attention; every other document of the batch is a wrong one."""

    def __init__(self, hidden: int = 48, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, hidden)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.Mish(), nn.Linear(2 * hidden, hidden), nn.LayerNorm(hidden))
            for _ in range(layers)
        )
        self.score, self.temperature = nn.Linear(hidden, 1), nn.Parameter(torch.tensor(0.1))

    def encode(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        pooled = (self.score(x).softmax(1) * x).sum(1)
        return functional.normalize(pooled, dim=-1)

    def forward(self, queries: Tensor, documents: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.encode(queries) @ self.encode(documents).T / self.temperature, labels)


def _family(model: str, **config: Any) -> Callable[[int], Built]:
    def make(wide: int) -> Built:
        larger = {"hidden_size": 64 * wide, "intermediate_size": 256 * wide, "num_hidden_layers": 4} if wide > 1 else {}
        built = hf.build(hf.row(model, **config), torch.float32, **{**larger, **config})
        return built

    return make


DECODER = {"layers": "model.layers.*", "cut": "model.layers.*", "sequence": True}
SPARSE = {"layers": "model.layers.*", "cut": "model.layers.*", "experts": "*.experts"}


def _sparse(model: str, experts: str, chosen: str = "num_experts_per_tok", **config: Any) -> New:
    """A decoder with 4 experts, of which each token takes 2. experts, chosen: what its config calls these numbers."""
    config |= {"num_key_value_heads": 4, experts: 4, chosen: 2, "experts_implementation": "grouped_mm"}
    return New(_family(model, **config), **SPARSE)


#: One group of experts, of which all tokens take all; the first layer is dense.
GROUP = {"n_group": 1, "topk_group": 1}
DENSE = {"first_k_dense_replace": 1}
SCANS = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}
MODELS: dict[str, New] = {
    "gMLP": New(
        lambda w: (GatedMlp(64 * w).train(), {"ids": _ids(200, 16, 24), "labels": _ids(10, 16, seed=3)}),
        "layers.*",
        "layers.*",
    ),
    "parallel decoder": New(
        lambda w: (ParallelDecoder(64 * w).train(), {"ids": _ids(128, 8, 32), "targets": _ids(128, 8, 32, seed=3)}),
        "layers.*",
        "layers.*",
        sequence=True,
    ),
    "character CNN": New(
        lambda w: (CharacterCnn(48 * w).train(), {"characters": _ids(100, 32, 20), "labels": _ids(20, 32, seed=3)}),
        "layers.*",
        "layers.*",
    ),
    "DenseNet": New(
        lambda w: (DenseNet(16 * w, 8 * w).train(), {"image": _random(8, 3, 32, 32), "labels": _ids(10, 8)}),
        "blocks.*",
        "blocks.*",
    ),
    "cross network": New(
        lambda w: (
            CrossNetwork(16 * w).train(),
            {"categories": _ids(300, 64, 6), "numbers": _random(64, 8), "clicked": (_random(64, seed=5) > 0).float()},
        ),
        "layers.*",
        "layers.*",
    ),
    "Conformer": New(
        lambda w: (Conformer(32 * w).train(), {"frames": _random(8, 40, 20), "phones": _ids(30, 8, 40)}),
        "layers.*",
        "layers.*",
    ),
    "two towers": New(
        lambda w: (
            TwoTowers(48 * w).train(),
            {"queries": _ids(300, 16, 12), "documents": _ids(300, 16, 30, seed=4), "labels": torch.arange(16)},
        ),
        "layers.*",
    ),
    "nanochat": New(_family("NanoChatForCausalLM", num_key_value_heads=4), **DECODER),
    "jais2": New(_family("Jais2ForCausalLM", num_key_value_heads=4), **DECODER),
    "ministral": New(_family("MinistralForCausalLM", num_key_value_heads=4, head_dim=16), **DECODER),
    "bert_generation": New(
        _family("BertGenerationDecoder", is_decoder=True), "bert.encoder.layer.*", "bert.encoder.layer.*"
    ),
    "ernie4_5_moe": _sparse(
        "Ernie4_5_MoeForCausalLM", "moe_num_experts", "moe_k", moe_intermediate_size=64, moe_layer_start_index=0
    ),
    "flex_olmo": _sparse("FlexOlmoForCausalLM", "num_experts"),
    "afmoe": _sparse("AfmoeForCausalLM", "num_experts", moe_intermediate_size=64, num_dense_layers=1, head_dim=8),
    "bitnet": New(_family("BitNetForCausalLM", num_key_value_heads=4), **DECODER),
    "cwm": New(_family("CwmForCausalLM", num_key_value_heads=4, head_dim=8), **DECODER),
    "dots1": _sparse(
        "Dots1ForCausalLM", "n_routed_experts", n_shared_experts=1, moe_intermediate_size=64, **GROUP, **DENSE
    ),
    "falcon_h1": New(
        _family("FalconH1ForCausalLM", num_key_value_heads=4, head_dim=8, **SCANS), "model.layers.*", "model.layers.*"
    ),
    "glm4_moe": _sparse("Glm4MoeForCausalLM", "n_routed_experts", moe_intermediate_size=64, **GROUP, **DENSE),
    "granite_swa": New(_family("GraniteSWAForCausalLM", num_key_value_heads=4), **DECODER),
    "granitemoe": _sparse("GraniteMoeForCausalLM", "num_local_experts"),
    "hunyuan_v1_moe": _sparse("HunYuanMoEV1ForCausalLM", "num_experts", "moe_topk", head_dim=8),
    "mellum": _sparse("MellumForCausalLM", "num_experts", moe_intermediate_size=64, head_dim=8),
    "minimax_m2": _sparse("MiniMaxM2ForCausalLM", "num_local_experts", head_dim=8),
    "phimoe": _sparse("PhimoeForCausalLM", "num_local_experts"),
    "solar_open": _sparse("SolarOpenForCausalLM", "n_routed_experts", moe_intermediate_size=64, head_dim=8, **GROUP),
    "youtu": New(_family("YoutuForCausalLM", kv_lora_rank=32, q_lora_rank=32), **DECODER),
}
