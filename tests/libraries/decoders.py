"""torchtune, torchtitan, litgpt and mambapy."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from tests.libraries import Case, reals, row, tokens

TUNE: dict[str, Any] = {
    "vocab_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "max_seq_len": 32,
    "intermediate_dim": 64,
}
GEMMA: dict[str, Any] = TUNE | {"head_dim": 8}


def _tune(module: str, name: str, **settings: Any) -> Case:
    return row(f"torchtune.models.{module}:{name}", tokens(), **settings)


def _lit(name: str, **settings: Any) -> Case:
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

    def make() -> nn.Module:
        litgpt = importlib.import_module("litgpt")
        config = litgpt.Config.from_name(name)
        small_ = small if getattr(config, "n_query_groups", 1) == config.n_head else {"n_query_groups": 2, **small}
        return litgpt.GPT(litgpt.Config.from_name(name, **small_))  # type: ignore[no-any-return]

    return Case(make, tokens())


def _mamba(module: str, name: str, **settings: Any) -> Case:
    def make() -> nn.Module:
        of = importlib.import_module(f"mambapy.{module}")
        config = of.MambaConfig(d_model=32, n_layers=2, d_state=8, **settings)
        return getattr(of, name)(config)  # type: ignore[no-any-return]

    return Case(make, lambda: (reals(16, 32),))


def _jamba() -> nn.Module:
    jamba = importlib.import_module("mambapy.jamba")
    config = jamba.JambaLMConfig(
        d_model=32,
        n_layers=4,
        mlp_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_offset=1,
        attn_layer_period=2,
        vocab_size=64,
        d_state=8,
    )
    return jamba.JambaLM(config)  # type: ignore[no-any-return]


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
        return self.model(ids, at, self.model.get_attention_masks(at))  # type: ignore[no-any-return]


CASES = {
    "torchtune llama2": _tune("llama2", "llama2", **TUNE),
    "torchtune llama3": _tune("llama3", "llama3", **TUNE),
    "torchtune llama3.1": _tune("llama3_1", "llama3_1", **TUNE),
    "torchtune llama3.2": _tune("llama3_2", "llama3_2", **TUNE),
    "torchtune mistral": _tune("mistral", "mistral", **TUNE),
    "torchtune gemma": _tune("gemma", "gemma", **GEMMA),
    "torchtune gemma2": _tune(
        "gemma2", "gemma2", **GEMMA, hidden_capping_value=30.0, final_capping_value=30.0, sliding_window_size=8
    ),
    "torchtune phi3": _tune("phi3", "phi3", **TUNE),
    "torchtune qwen2": _tune("qwen2", "qwen2", **TUNE, tie_word_embeddings=True),
    "torchtune llama3, lora": _tune(
        "llama3", "lora_llama3", lora_attn_modules=["q_proj", "v_proj"], lora_rank=4, lora_alpha=8, **TUNE
    ),
    "torchtune t5 encoder": _tune(
        "t5",
        "t5_encoder",
        embed_dim=32,
        mlp_dim=64,
        num_heads=4,
        head_dim=8,
        num_layers=2,
        rel_pos_num_buckets=8,
        rel_pos_max_dist=16,
        vocab_size=64,
        norm_eps=1e-6,
        max_seq_len=16,
    ),
    "litgpt pythia": _lit("pythia-14m"),
    "litgpt llama": _lit("Llama-2-7b-hf"),
    "litgpt llama 3": _lit("Llama-3-8B"),
    "litgpt falcon": _lit("falcon-7b"),
    "litgpt mistral": _lit("Mistral-7B-v0.1"),
    "litgpt phi": _lit("phi-2"),
    "litgpt gemma 2": _lit("Gemma-2-2b", head_size=8),
    "litgpt gemma 3": _lit("Gemma-3-1b-it", head_size=8),
    "litgpt stablelm": _lit("stablelm-3b-4e1t"),
    "litgpt qwen 2.5": _lit("Qwen2.5-0.5B"),
    "litgpt qwen 3": _lit("Qwen3-0.6B", head_size=8),
    "litgpt mixtral": _lit("Mixtral-8x7B-v0.1", moe_intermediate_size=64),
    "litgpt lora": Case(
        lambda: importlib.import_module("litgpt.lora").GPT(
            importlib.import_module("litgpt.lora").Config(
                n_layer=2,
                n_head=4,
                n_embd=32,
                block_size=32,
                padded_vocab_size=64,
                lora_r=4,
                lora_alpha=8,
                lora_query=True,
                lora_value=True,
                lora_key=True,
                lora_projection=True,
                lora_mlp=True,
                lora_head=True,
            )
        ),
        tokens(),
    ),
    "litgpt adapter": Case(
        lambda: importlib.import_module("litgpt.adapter").GPT(
            importlib.import_module("litgpt.adapter").Config(
                n_layer=2, n_head=4, n_embd=32, block_size=32, padded_vocab_size=64, adapter_start_layer=0
            )
        ),
        tokens(),
    ),
    "mambapy mamba": _mamba("mamba", "Mamba", pscan=False),
    "mambapy mamba, parallel scan": _mamba("mamba", "Mamba", pscan=True),
    "mambapy vim": _mamba("vim", "VMamba", pscan=False, bidirectional=False),
    "mambapy jamba": Case(_jamba, tokens(), lambda output, batch: output[0].square().mean()),
    "torchtitan llama3": Case(lambda: Titan("llama3"), tokens()),
    "torchtitan qwen3": Case(lambda: Titan("qwen3"), tokens()),
    "torchtitan deepseek v3": Case(  # its experts multiply in bfloat16
        lambda: Titan("deepseek_v3", moe_comm_backend="standard"), tokens(), bound=2e-2
    ),
}
