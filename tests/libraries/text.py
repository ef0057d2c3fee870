"""x-transformers, esm, open_clip, and lucidrains' packages of text."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import torch
from torch import nn

from tests.libraries import Case, given, ids, image, reals, row, tokens


def _x(kind: str = "Decoder", length: int = 16, trained: bool = False, **settings: Any) -> Case:
    """A TransformerWrapper. trained: inside of an AutoregressiveWrapper, which computes the loss."""

    def make() -> nn.Module:
        x = importlib.import_module("x_transformers")
        layers = getattr(x, kind)(**{"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8, **settings})
        model = x.TransformerWrapper(num_tokens=64, max_seq_len=length + 4, attn_layers=layers)
        return x.AutoregressiveWrapper(model) if trained else model  # type: ignore[no-any-return]

    return Case(make, tokens(64, length + trained), given) if trained else Case(make, tokens(64, length))


LM: dict[str, Any] = {"num_tokens": 64, "dim": 32, "depth": 2}
HEADS: dict[str, Any] = {"heads": 4, "dim_head": 8}


def _alphabet(kind: str) -> Any:
    return importlib.import_module("esm").data.Alphabet.from_architecture(kind)


def _esm1(kind: str) -> nn.Module:
    args = argparse.Namespace(
        arch=kind,
        layers=2,
        embed_dim=32,
        ffn_embed_dim=64,
        attention_heads=4,
        max_positions=64,
        max_tokens=64,
        final_bias=True,
        logit_bias=True,
        token_dropout=False,
        emb_layer_norm_before=True,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        max_tokens_per_msa=2**14,
        embed_positions_msa=True,
        embed_positions_msa_dim=32,
    )
    name = "MSATransformer" if kind == "msa_transformer" else "ProteinBertModel"
    module = "esm.model.msa_transformer" if kind == "msa_transformer" else "esm.model.esm1"
    model: nn.Module = getattr(importlib.import_module(module), name)(args, _alphabet(kind))
    return model


def _esm2() -> nn.Module:
    model: nn.Module = importlib.import_module("esm").ESM2(2, 32, 4, _alphabet("ESM-1b"), token_dropout=False)
    return model


def _clip(name: str = "CLIP") -> nn.Module:
    module = importlib.import_module("open_clip.model")
    vision = {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32}
    text = {"context_length": 16, "vocab_size": 64, "width": 32, "heads": 4, "layers": 2, "no_causal_mask": False}
    model: nn.Module = getattr(module, name)(embed_dim=32, vision_cfg=vision, text_cfg=text)
    return model


def _pairs() -> tuple[torch.Tensor, ...]:
    return (*image()(), ids(64, 16))


CASES = {
    "x-transformers decoder": _x(),
    "x-transformers encoder": _x("Encoder"),
    "x-transformers rotary": _x(rotary_pos_emb=True),
    "x-transformers rotary xpos": _x(rotary_pos_emb=True, rotary_xpos=True),
    "x-transformers alibi": _x(alibi_pos_bias=True),
    "x-transformers t5 bias": _x(rel_pos_bias=True),
    "x-transformers dynamic positions": _x(dynamic_pos_bias=True),
    "x-transformers gated mlp": _x(ff_glu=True, ff_swish=True, ff_no_bias=True),
    "x-transformers rms norm": _x(use_rmsnorm=True),
    "x-transformers scale norm": _x(use_scalenorm=True),
    "x-transformers sandwich norm": _x(sandwich_norm=True),
    "x-transformers post norm": _x(pre_norm=False),
    "x-transformers one kv head": _x(attn_one_kv_head=True),
    "x-transformers grouped queries": _x(attn_kv_heads=2),
    "x-transformers flash": _x(attn_flash=True),
    "x-transformers qk norm": _x(attn_qk_norm=True),
    "x-transformers talking heads": _x(attn_pre_talking_heads=True, attn_post_talking_heads=True),
    "x-transformers memory keys": _x(attn_num_mem_kv=4),
    "x-transformers gated values": _x(attn_gate_values=True),
    "x-transformers sparse topk": _x(attn_sparse_topk=4),
    "x-transformers macaron": _x(macaron=True),
    "x-transformers sandwich": _x(sandwich_coef=1, depth=2),
    "x-transformers token shift": _x(shift_tokens=1),
    "x-transformers gated residual": _x(gate_residual=True),
    "x-transformers value residual": _x(add_value_residual=True),
    "x-transformers hyper connections": _x(num_residual_streams=2),
    "x-transformers softclamped": _x(attn_softclamp_logits=True),
    "x-transformers laser": _x(attn_laser=True),
    "x-transformers differential": _x(attn_num_mem_kv=0, attn_head_scale=True),
    "x-transformers residual attention": _x(residual_attn=True),
    "x-transformers trained": _x(trained=True),
    "x-transformers xl": Case(
        lambda: importlib.import_module("x_transformers").ContinuousTransformerWrapper(
            dim_in=16,
            dim_out=16,
            max_seq_len=32,
            attn_layers=importlib.import_module("x_transformers").Encoder(dim=32, depth=2, heads=4, attn_dim_head=8),
        ),
        lambda: (reals(16, 16),),
    ),
    "x-transformers translation": Case(
        lambda: importlib.import_module("x_transformers").XTransformer(
            dim=32,
            enc_num_tokens=64,
            enc_depth=2,
            enc_heads=4,
            enc_max_seq_len=16,
            enc_attn_dim_head=8,
            dec_num_tokens=64,
            dec_depth=2,
            dec_heads=4,
            dec_max_seq_len=16,
            dec_attn_dim_head=8,
        ),
        lambda: (ids(64, 16), ids(64, 16, seed=2)),
        given,
    ),
    "esm-1b": Case(lambda: _esm1("roberta_large"), lambda: (ids(24, 16),)),
    "esm-1": Case(lambda: _esm1("protein_bert_base"), lambda: (ids(24, 16),)),
    "esm-2": Case(_esm2, lambda: (ids(24, 16),)),
    "esm msa": Case(lambda: _esm1("msa_transformer"), lambda: (ids(24, 4, 16),)),
    "open_clip": Case(_clip, _pairs),
    "open_clip custom text": Case(lambda: _clip("CustomTextCLIP"), _pairs),
    "performer-pytorch": row(
        "performer_pytorch:PerformerLM",
        tokens(),
        **LM,
        max_seq_len=16,
        **HEADS,
        nb_features=8,
        generalized_attention=True,
    ),
    "performer-pytorch causal": row(
        "performer_pytorch:PerformerLM", tokens(), **LM, max_seq_len=16, **HEADS, nb_features=8, causal=True
    ),
    "linformer": row("linformer:LinformerLM", tokens(), **LM, seq_len=16, k=8, heads=4),
    "linformer reversible": row("linformer:LinformerLM", tokens(), **LM, seq_len=16, k=8, heads=4, reversible=True),
    "nystrom-attention": row(
        "nystrom_attention:Nystromformer",
        lambda: (reals(16, 32),),
        dim=32,
        depth=2,
        **HEADS,
        num_landmarks=4,
        attn_values_residual_conv_kernel=3,
    ),
    "linear-attention-transformer": row(
        "linear_attention_transformer:LinearAttentionTransformerLM", tokens(), **LM, max_seq_len=16, heads=4
    ),
    "g-mlp-pytorch": row("g_mlp_pytorch:gMLP", tokens(), **LM, seq_len=16, causal=True),
    "perceiver-pytorch lm": row(
        "perceiver_pytorch:PerceiverLM",
        tokens(),
        num_tokens=64,
        dim=32,
        max_seq_len=16,
        depth=2,
        num_latents=8,
        latent_dim=32,
        latent_heads=4,
        cross_dim_head=8,
        latent_dim_head=8,
    ),
    "mega-pytorch": row(
        "mega_pytorch:Mega", tokens(), **LM, ema_heads=4, attn_dim_qk=8, attn_dim_value=32, laplacian_attn_fn=True
    ),
    "flash-pytorch": row("flash_pytorch:FLASHTransformer", tokens(), **LM, group_size=8, query_key_dim=8, causal=True),
    "sinkhorn-transformer": row(
        "sinkhorn_transformer:SinkhornTransformerLM", tokens(), **LM, max_seq_len=16, heads=4, bucket_size=4
    ),
    "reformer-pytorch": row(
        "reformer_pytorch:ReformerLM", tokens(), **LM, max_seq_len=16, heads=4, dim_head=8, bucket_size=4, n_hashes=2
    ),
    "minGRU-pytorch": row("minGRU_pytorch.minLM:minLM", tokens(), num_tokens=64, dim=32, depth=2),
    "soft-moe-pytorch": row("soft_moe_pytorch:SoftMoE", lambda: (reals(16, 32),), dim=32, seq_len=16, num_experts=4),
    "st-moe-pytorch": row(
        "st_moe_pytorch:MoE", lambda: (reals(16, 32),), dim=32, num_experts=4, gating_top_n=2, expert_hidden_mult=2
    ),
    "mixture-of-experts": row(
        "mixture_of_experts:MoE",
        lambda: (reals(16, 32),),
        dim=32,
        num_experts=4,
        hidden_dim=32,
        loss_coef=0.01,
        second_policy_train="all",
        second_policy_eval="all",
    ),
    "PEER-pytorch": row(
        "PEER_pytorch:PEER",
        lambda: (reals(16, 32),),
        dim=32,
        heads=2,
        num_experts=64,
        num_experts_per_head=4,
        dim_key=8,
    ),
    "local-attention": row(
        "local_attention:LocalTransformer",
        tokens(),
        num_tokens=64,
        max_seq_len=16,
        dim=32,
        depth=2,
        causal=True,
        local_attn_window_size=4,
        heads=4,
        dim_head=8,
    ),
    "x-clip": row(
        "x_clip:CLIP",
        lambda: (ids(64, 16), *image()()),
        dim_text=32,
        dim_image=32,
        dim_latent=32,
        num_text_tokens=64,
        text_enc_depth=2,
        text_seq_len=16,
        text_heads=4,
        visual_enc_depth=2,
        visual_image_size=32,
        visual_patch_size=8,
        visual_heads=4,
        text_dim_head=8,
        visual_dim_head=8,
        visual_patch_dropout=0.0,
        loss=lambda o, b: o.sum(),
    ),
}
