"""vit-pytorch, segmentation, and other models of images and videos."""

from __future__ import annotations

import importlib
from typing import Any

from tests.libraries import Case, image, reals, row

VIT: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 12,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 64,
    "dim_head": 8,
}
SERIES: dict[str, Any] = {k: v for k, v in VIT.items() if k != "image_size"} | {"seq_len": 64}
VIDEO: dict[str, Any] = {k: v for k, v in VIT.items() if k != "patch_size"} | {
    "image_patch_size": 8,
    "frames": 4,
    "frame_patch_size": 2,
}
UNET: dict[str, Any] = {"encoder_weights": None, "in_channels": 3, "classes": 4, "encoder_depth": 3}


def _vit(module: str, name: str = "ViT", **settings: Any) -> Case:
    return row(f"vit_pytorch.{module}:{name}", image(), **{**VIT, **settings})


def _without(*names: str, **settings: Any) -> dict[str, Any]:
    return {k: v for k, v in VIT.items() if k not in names} | settings


def _segmenter(name: str, **settings: Any) -> Case:
    given = {"encoder_name": "timm-mobilenetv3_small_minimal_100", **UNET, **settings}
    return row(f"segmentation_models_pytorch:{name}", image(64), **given)


CASES = {
    "vit-pytorch vit": _vit("vit"),
    "vit-pytorch vit, mean": _vit("vit", pool="mean"),
    "vit-pytorch simple vit": _vit("simple_vit", "SimpleViT"),
    "vit-pytorch deepvit": _vit("deepvit", "DeepViT"),
    "vit-pytorch cait": _vit("cait", "CaiT", cls_depth=1),
    "vit-pytorch parallel vit": _vit("parallel_vit"),
    "vit-pytorch small dataset": _vit("vit_for_small_dataset"),
    "vit-pytorch patch merger": _vit("vit_with_patch_merger", patch_merge_layer=1),
    "vit-pytorch normalized vit": _vit("normalized_vit", "nViT"),
    "vit-pytorch rvt": _vit("rvt", "RvT"),
    "vit-pytorch xcit": _vit("xcit", "XCiT", cls_depth=1),
    "vit-pytorch pit": _vit("pit", "PiT", depth=(1, 1)),
    "vit-pytorch registers": _vit("simple_vit_with_register_tokens", "SimpleViT"),
    "vit-pytorch qk norm": _vit("simple_vit_with_qk_norm", "SimpleViT"),
    "vit-pytorch value residual": _vit("simple_vit_with_value_residual", "SimpleViT"),
    "vit-pytorch fft": _vit("simple_vit_with_fft", "SimpleViT", freq_patch_size=8),
    "vit-pytorch hyper connections": _vit("simple_vit_with_hyper_connections", "SimpleViT", num_residual_streams=2),
    "vit-pytorch jumbo vit": _vit("jumbo_vit", "JumboViT", jumbo_cls_k=2, dim=16, jumbo_ff_mult=1),
    "vit-pytorch u-vit": _vit("simple_uvit", "SimpleUViT"),
    "vit-pytorch adaptive tokens": _vit("ats_vit", max_tokens_per_depth=(16, 8)),
    "vit-pytorch t2t": row("vit_pytorch.t2t:T2TViT", image(), **_without("patch_size"), t2t_layers=((7, 4), (3, 2))),
    "vit-pytorch levit": row(
        "vit_pytorch.levit:LeViT",
        image(64),
        image_size=64,
        num_classes=12,
        dim=(32, 32),
        depth=1,
        heads=(2, 4),
        mlp_mult=2,
        stages=2,
        dim_key=8,
        dim_value=8,
    ),
    "vit-pytorch cct": row(
        "vit_pytorch.cct:CCT",
        image(),
        img_size=32,
        embedding_dim=32,
        n_conv_layers=1,
        num_layers=2,
        num_heads=4,
        mlp_ratio=2.0,
        num_classes=12,
        attention_dropout=0.0,
        stochastic_depth_rate=0.0,
        dropout_rate=0.0,
    ),
    "vit-pytorch cross vit": row(
        "vit_pytorch.cross_vit:CrossViT",
        image(),
        image_size=32,
        num_classes=12,
        sm_dim=16,
        lg_dim=32,
        sm_patch_size=8,
        sm_enc_heads=4,
        sm_enc_mlp_dim=32,
        sm_enc_dim_head=8,
        lg_patch_size=16,
        lg_enc_depth=1,
        lg_enc_heads=4,
        lg_enc_mlp_dim=64,
        lg_enc_dim_head=8,
        cross_attn_depth=1,
        cross_attn_heads=4,
        cross_attn_dim_head=8,
        depth=2,
    ),
    "vit-pytorch crossformer": row(
        "vit_pytorch.crossformer:CrossFormer",
        image(),
        dim=(32, 32, 64, 64),
        depth=(1, 1, 1, 1),
        global_window_size=(4, 2, 1, 1),
        local_window_size=1,
        num_classes=12,
    ),
    "vit-pytorch cvt": row(
        "vit_pytorch.cvt:CvT",
        image(),
        num_classes=12,
        s1_emb_dim=8,
        s2_emb_dim=16,
        s3_emb_dim=32,
        s2_heads=2,
        s2_depth=1,
        s3_heads=4,
        s3_depth=1,
    ),
    "vit-pytorch maxvit": row(
        "vit_pytorch.max_vit:MaxViT",
        image(64),
        num_classes=12,
        dim=16,
        depth=(1, 1),
        dim_head=8,
        window_size=4,
        dropout=0.0,
    ),
    "vit-pytorch mobile vit": row(
        "vit_pytorch.mobile_vit:MobileViT",
        image(64),
        (64, 64),
        [16, 16, 32],
        [8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 16],
        12,
        depths=(1, 1, 1),
    ),
    "vit-pytorch nest": row(
        "vit_pytorch.nest:NesT",
        image(),
        image_size=32,
        patch_size=4,
        num_classes=12,
        dim=16,
        heads=2,
        num_hierarchies=2,
        block_repeats=(1, 1),
        dim_head=8,
    ),
    "vit-pytorch regionvit": row(
        "vit_pytorch.regionvit:RegionViT",
        image(64),
        dim=(8, 16, 16, 32),
        depth=(1, 1, 1, 1),
        window_size=2,
        num_classes=12,
    ),
    "vit-pytorch scalable vit": row(
        "vit_pytorch.scalable_vit:ScalableViT",
        image(64),
        num_classes=12,
        dim=16,
        heads=(2, 4),
        depth=(1, 1),
        reduction_factor=(2, 1),
        window_size=(4, None),
        iwsa_dim_key=8,
        iwsa_dim_value=8,
        ssa_dim_key=8,
        ssa_dim_value=8,
    ),
    "vit-pytorch sep vit": row(
        "vit_pytorch.sep_vit:SepViT", image(56), num_classes=12, dim=16, dim_head=8, heads=(1, 2), depth=(1, 1)
    ),
    "vit-pytorch twins": row(
        "vit_pytorch.twins_svt:TwinsSVT",
        image(64),
        num_classes=12,
        s1_emb_dim=8,
        s1_local_patch_size=4,
        s1_global_k=4,
        s2_emb_dim=16,
        s2_local_patch_size=4,
        s2_global_k=2,
        s3_emb_dim=16,
        s3_local_patch_size=2,
        s3_global_k=2,
        s3_depth=1,
        s4_emb_dim=32,
        s4_local_patch_size=1,
        s4_global_k=1,
    ),
    "vit-pytorch look vit": row(
        "vit_pytorch.look_vit:LookViT",
        image(),
        dim=32,
        image_size=32,
        num_classes=12,
        depth=2,
        patch_size=16,
        heads=4,
        dim_head=8,
        highres_patch_size=8,
        cross_attn_heads=4,
        cross_attn_dim_head=8,
        patch_conv_kernel_size=3,
        dropout=0.0,
    ),
    "vit-pytorch 1d": row("vit_pytorch.vit_1d:ViT", lambda: (reals(3, 64),), **SERIES),
    "vit-pytorch 3d": row("vit_pytorch.vit_3d:ViT", lambda: (reals(3, 4, 32, 32),), **VIDEO),
    "vit-pytorch vivit": row(
        "vit_pytorch.vivit:ViViT",
        lambda: (reals(3, 4, 32, 32),),
        **{k: v for k, v in VIDEO.items() if k != "depth"},
        spatial_depth=1,
        temporal_depth=1,
    ),
    "vit-pytorch nd rotary": row(
        "vit_pytorch.vit_nd_rotary:ViTND",
        lambda: (reals(3, 4, 16, 16),),
        ndim=3,
        input_shape=(4, 16, 16),
        patch_size=(2, 4, 4),
        num_classes=12,
        dim=32,
        depth=2,
        heads=4,
        mlp_dim=64,
        dim_head=12,
    ),
    # --- segmentation-models-pytorch
    "segmentation unet": _segmenter("Unet", decoder_channels=(16, 8, 8)),
    "segmentation unet++": _segmenter("UnetPlusPlus", decoder_channels=(16, 8, 8)),
    "segmentation unet, resnet": _segmenter("Unet", decoder_channels=(16, 8, 8), encoder_name="resnet18"),
    "segmentation unet, attention": _segmenter("Unet", decoder_channels=(32, 16, 16), decoder_attention_type="scse"),
    "segmentation linknet": _segmenter("Linknet"),
    "segmentation fpn": _segmenter(
        "FPN", encoder_depth=5, decoder_pyramid_channels=16, decoder_segmentation_channels=32, decoder_dropout=0.0
    ),
    "segmentation pspnet": _segmenter("PSPNet", psp_out_channels=16, psp_dropout=0.0),
    "segmentation manet": _segmenter("MAnet", decoder_channels=(16, 8, 8), decoder_pab_channels=8),
    "segmentation deeplab v3+": _segmenter(
        "DeepLabV3Plus",
        encoder_depth=5,
        decoder_channels=16,
        decoder_atrous_rates=(2, 4, 6),
        decoder_aspp_dropout=0.0,
        encoder_name="resnet18",
    ),
    "segmentation segformer": _segmenter(
        "Segformer", encoder_depth=5, decoder_segmentation_channels=16, encoder_name="resnet18"
    ),
    # --- others
    "mlp-mixer-pytorch": row(
        "mlp_mixer_pytorch:MLPMixer", image(), image_size=32, channels=3, patch_size=8, dim=32, depth=2, num_classes=12
    ),
    "mlp-mixer-pytorch permutator": row(
        "mlp_mixer_pytorch:Permutator",
        image(),
        image_size=32,
        patch_size=8,
        dim=32,
        depth=2,
        num_classes=12,
        segments=4,
    ),
    "g-mlp-pytorch vision": row(
        "g_mlp_pytorch:gMLPVision", image(), image_size=32, patch_size=8, num_classes=12, dim=32, depth=2
    ),
    "perceiver-pytorch": row(
        "perceiver_pytorch:Perceiver",
        lambda: (reals(8, 8, 3),),
        num_freq_bands=2,
        depth=2,
        max_freq=4.0,
        num_latents=8,
        latent_dim=32,
        latent_heads=4,
        cross_dim_head=8,
        latent_dim_head=8,
        num_classes=12,
    ),
    "timesformer-pytorch": row(
        "timesformer_pytorch:TimeSformer",
        lambda: (reals(4, 3, 16, 16),),
        dim=32,
        num_frames=4,
        num_classes=12,
        image_size=16,
        patch_size=8,
        depth=2,
        heads=4,
        dim_head=8,
    ),
    "axial-attention": row(
        "axial_attention:AxialImageTransformer", lambda: (reals(16, 8, 8),), dim=16, depth=2, heads=4, reversible=False
    ),
    "lambda-networks": row(
        "lambda_networks:LambdaLayer", lambda: (reals(16, 8, 8),), dim=16, dim_out=16, r=3, dim_k=8, heads=4, dim_u=2
    ),
    "x-transformers vit": Case(
        lambda: importlib.import_module("x_transformers").ViTransformerWrapper(
            image_size=32,
            patch_size=8,
            num_classes=12,
            attn_layers=importlib.import_module("x_transformers").Encoder(dim=32, depth=2, heads=4, attn_dim_head=8),
        ),
        image(),
    ),
}
