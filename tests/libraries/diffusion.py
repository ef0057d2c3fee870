"""diffusers, and other models of diffusion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.libraries import Case, ids, reals, row


def _diffusers(name: str, batch: Callable[[], dict[str, Any]], **settings: Any) -> Case:
    return row(f"diffusers:{name}", batch, **settings)


def _times() -> Tensor:
    return ids(1000)


def _batch(*sample: int, text: tuple[int, ...] = (), **more: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    """A noisy sample, its time, and what it is conditioned on."""

    def batch() -> dict[str, Any]:
        found: dict[str, Any] = {"hidden_states": reals(*sample), "timestep": _times()}
        if text:
            found["encoder_hidden_states"] = reals(*text, seed=5)
        return found | {name: value() for name, value in more.items()}

    return batch


def _unet(*sample: int, **more: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"sample": reals(*sample), "timestep": _times(), **{n: v() for n, v in more.items()}}


def _places(n: int) -> Callable[[], Tensor]:
    """Ids of a grid, the same of all rows."""
    return lambda: torch.arange(3 * n, dtype=torch.float64).view(n, 3) % 4


HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8}
BLOCKS: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
FLUX: dict[str, Any] = HEADS | {
    "in_channels": 8,
    "num_layers": 1,
    "num_single_layers": 1,
    "joint_attention_dim": 16,
    "axes_dims_rope": (2, 2, 4),
}
CASES = {
    "diffusers unet 2d": _diffusers(
        "UNet2DModel",
        _unet(3, 16, 16),
        sample_size=16,
        in_channels=3,
        out_channels=3,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **BLOCKS,
    ),
    "diffusers unet 1d": _diffusers(
        "UNet1DModel",
        _unet(2, 64),
        sample_size=64,
        in_channels=2,
        out_channels=2,
        extra_in_channels=32,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
        up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
    ),
    "diffusers unet, conditional": _diffusers(
        "UNet2DConditionModel",
        _unet(4, 16, 16, encoder_hidden_states=lambda: reals(6, 16, seed=5)),
        sample_size=16,
        cross_attention_dim=16,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **BLOCKS,
    ),
    "diffusers unet, sdxl": _diffusers(
        "UNet2DConditionModel",
        _unet(
            4,
            16,
            16,
            encoder_hidden_states=lambda: reals(6, 16, seed=5),
            added_cond_kwargs=lambda: {"text_embeds": reals(16, seed=6), "time_ids": reals(6, seed=7)},
        ),
        sample_size=16,
        cross_attention_dim=16,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=64,
        transformer_layers_per_block=(1, 1),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **BLOCKS,
    ),
    "diffusers vq": _diffusers(
        "VQModel",
        lambda: {"sample": reals(3, 16, 16)},
        block_out_channels=(16,),
        norm_num_groups=8,
        latent_channels=4,
        num_vq_embeddings=16,
    ),
    "diffusers vae": _diffusers(
        "AutoencoderKL",
        lambda: {"sample": reals(3, 16, 16), "sample_posterior": False},
        block_out_channels=(16, 16),
        norm_num_groups=8,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "diffusers vae, deep compression": _diffusers(
        "AutoencoderDC",
        lambda: {"sample": reals(3, 16, 16)},
        latent_channels=4,
        attention_head_dim=8,
        encoder_block_types="ResBlock",
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(16, 32),
        decoder_block_out_channels=(16, 32),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), (5,)),
    ),
    "diffusers dit": _diffusers(
        "DiTTransformer2DModel",
        _batch(4, 8, 8, class_labels=lambda: ids(10)),
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
        **HEADS,
    ),
    "diffusers pixart": _diffusers(
        "PixArtTransformer2DModel",
        _batch(4, 8, 8, text=(6, 16)),
        num_layers=2,
        sample_size=8,
        cross_attention_dim=32,
        caption_channels=16,
        **HEADS,
        use_additional_conditions=False,
    ),
    "diffusers sana": _diffusers(
        "SanaTransformer2DModel",
        _batch(8, 8, 8, text=(6, 16)),
        in_channels=8,
        out_channels=8,
        num_layers=2,
        num_cross_attention_heads=4,
        cross_attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=16,
        sample_size=8,
        **HEADS,
    ),
    "diffusers sd3": _diffusers(
        "SD3Transformer2DModel",
        _batch(8, 8, 8, text=(6, 16), pooled_projections=lambda: reals(16, seed=6)),
        sample_size=8,
        in_channels=8,
        out_channels=8,
        num_layers=2,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
        **HEADS,
    ),
    "diffusers flux": _diffusers(
        "FluxTransformer2DModel",
        _batch(
            16, 8, text=(6, 16), pooled_projections=lambda: reals(16, seed=6), img_ids=_places(16), txt_ids=_places(6)
        ),
        pooled_projection_dim=16,
        **FLUX,
    ),
    "diffusers chroma": _diffusers(
        "ChromaTransformer2DModel",
        _batch(16, 8, text=(6, 16), img_ids=_places(16), txt_ids=_places(6)),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
        **FLUX,
    ),
    "diffusers bria": _diffusers(
        "BriaTransformer2DModel", _batch(16, 8, text=(6, 16), img_ids=_places(16), txt_ids=_places(6)), **FLUX
    ),
    "diffusers auraflow": _diffusers(
        "AuraFlowTransformer2DModel",
        _batch(4, 8, 8, text=(6, 16)),
        sample_size=8,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pos_embed_max_size=16,
        **HEADS,
    ),
    "diffusers cogvideox": _diffusers(
        "CogVideoXTransformer3DModel",
        _batch(2, 4, 8, 8, text=(6, 16)),
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        max_text_seq_length=6,
        **HEADS,
    ),
    "diffusers cogview4": _diffusers(
        "CogView4Transformer2DModel",
        _batch(
            4,
            8,
            8,
            text=(6, 16),
            **dict.fromkeys(("original_size", "target_size", "crop_coords"), lambda: reals(2, seed=6).abs()),
        ),
        in_channels=4,
        out_channels=4,
        num_layers=2,
        text_embed_dim=16,
        time_embed_dim=16,
        condition_dim=8,
        sample_size=8,
        rope_axes_dim=(8, 8),
        **HEADS,
    ),
    "diffusers wan": _diffusers(
        "WanTransformer3DModel",
        _batch(4, 2, 8, 8, text=(6, 16)),
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=32,
        num_attention_heads=4,
        attention_head_dim=12,
    ),
    "diffusers mochi": _diffusers(
        "MochiTransformer3DModel",
        _batch(4, 2, 8, 8, text=(8, 16), encoder_attention_mask=lambda: torch.ones(8, 8, dtype=torch.bool)),
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=8,
        max_sequence_length=8,
        **HEADS,
    ),
    "diffusers ltx": _diffusers(
        "LTXVideoTransformer3DModel",
        lambda: (
            _batch(32, 8, text=(6, 16), encoder_attention_mask=lambda: torch.ones(8, 6, dtype=torch.long))()
            | {"num_frames": 2, "height": 4, "width": 4}
        ),
        in_channels=8,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=32,
        caption_channels=16,
        **HEADS,
    ),
    "diffusers lumina2": _diffusers(
        "Lumina2Transformer2DModel",
        _batch(4, 8, 8, text=(6, 16), encoder_attention_mask=lambda: torch.ones(8, 6, dtype=torch.long)),
        sample_size=8,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(32, 8, 8),
        cap_feat_dim=16,
    ),
    "diffusers qwen-image": _diffusers(
        "QwenImageTransformer2DModel",
        lambda: (
            _batch(16, 8, text=(6, 16), encoder_hidden_states_mask=lambda: torch.ones(8, 6, dtype=torch.long))()
            | {"img_shapes": [[(1, 4, 4)]] * 8, "timestep": torch.linspace(0, 1, 8, dtype=torch.float64)}
        ),
        in_channels=8,
        out_channels=2,
        num_layers=2,
        joint_attention_dim=16,
        axes_dims_rope=(2, 2, 4),
        **HEADS,
    ),
    "diffusers hunyuan video": _diffusers(
        "HunyuanVideoTransformer3DModel",
        _batch(
            4,
            2,
            8,
            8,
            text=(6, 16),
            encoder_attention_mask=lambda: torch.ones(8, 6, dtype=torch.bool),
            pooled_projections=lambda: reals(16, seed=6),
            guidance=lambda: reals(seed=7).abs(),
        ),
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=16,
        pooled_projection_dim=16,
        rope_axes_dim=(4, 2, 2),
        **HEADS,
    ),
    "diffusers allegro": _diffusers(
        "AllegroTransformer3DModel",
        _batch(
            4,
            2,
            8,
            8,
            text=(6, 16),
            attention_mask=lambda: torch.ones(8, 2, 8, 8, dtype=torch.long),
            encoder_attention_mask=lambda: torch.ones(8, 6, dtype=torch.long),
            image_rotary_emb=lambda: None,
        ),
        num_layers=2,
        cross_attention_dim=32,
        caption_channels=16,
        sample_height=8,
        sample_width=8,
        sample_frames=2,
        **HEADS,
    ),
    "diffusers prior": _diffusers(
        "PriorTransformer",
        _batch(16, proj_embedding=lambda: reals(16, seed=5), encoder_hidden_states=lambda: reals(6, 16, seed=6)),
        num_layers=2,
        embedding_dim=16,
        num_embeddings=6,
        **HEADS,
    ),
    "diffusers stable audio": _diffusers(
        "StableAudioDiTModel",
        _batch(8, 16, text=(6, 16), global_hidden_states=lambda: reals(1, 16, seed=6)),
        sample_size=16,
        in_channels=8,
        out_channels=8,
        num_layers=2,
        num_key_value_attention_heads=2,
        cross_attention_dim=16,
        time_proj_dim=8,
        global_states_input_dim=16,
        cross_attention_input_dim=16,
        **HEADS,
    ),
    "denoising-diffusion-pytorch": row(
        "denoising_diffusion_pytorch:Unet",
        lambda: (reals(3, 16, 16), _times()),
        dim=16,
        dim_mults=(1, 2),
        flash_attn=False,
        attn_dim_head=8,
    ),
    "denoising-diffusion-pytorch 1d": row(
        "denoising_diffusion_pytorch:Unet1D", lambda: (reals(4, 32), _times()), dim=16, dim_mults=(1, 2), channels=4
    ),
}
