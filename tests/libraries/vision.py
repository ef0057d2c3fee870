"""timm and torchvision."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from tests.libraries import Case, image, row


def _timm(name: str, size: int = 32, **settings: Any) -> Case:
    def make() -> nn.Module:
        model: nn.Module = importlib.import_module("timm").create_model(name, num_classes=12, **settings)
        return model

    return Case(make, image(size))


def _torchvision(name: str, *args: Any, size: int = 32, module: str = "torchvision.models", **settings: Any) -> Case:
    def make() -> nn.Module:
        model: nn.Module = getattr(importlib.import_module(module), name)(*args, **settings)
        return model

    return Case(make, image(size))


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
MIXER = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}
SMALL = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)}
RESNET = {"layers": (1, 1, 1, 1), "channels": (8, 16, 16, 32), "stem_width": 8}
CASES = {
    # --- timm: transformers
    "timm vit": _timm("vit_tiny_patch16_224", **VIT),
    "timm vit, average pool": _timm("vit_tiny_patch16_224", **VIT, global_pool="avg", init_values=0.1),
    "timm vit, relative positions": _timm("vit_relpos_small_patch16_224", **VIT),
    "timm vit, registers": _timm("vit_small_patch14_reg4_dinov2", **VIT),
    "timm deit": _timm("deit_tiny_distilled_patch16_224", **VIT),
    "timm deit3": _timm("deit3_small_patch16_224", **VIT),
    "timm beit": _timm("beit_base_patch16_224", **VIT),
    "timm beitv2": _timm("beitv2_base_patch16_224", **VIT),
    "timm eva02": _timm("eva02_tiny_patch14_224", **VIT),
    "timm swin": _timm(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4)
    ),
    "timm swin v2": _timm(
        "swinv2_tiny_window8_256", img_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4)
    ),
    "timm swin v2 cr": _timm(
        "swinv2_cr_tiny_224", img_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4)
    ),
    "timm cait": _timm("cait_xxs24_224", **VIT, depth_token_only=1),
    "timm convit": _timm(
        "convit_tiny", img_size=32, patch_size=8, embed_dim=8, depth=2, num_heads=4, local_up_to_layer=1
    ),
    "timm xcit": _timm("xcit_nano_12_p16_224", img_size=32, embed_dim=32, depth=2, num_heads=4),
    "timm tnt": _timm(
        "tnt_s_patch16_224", img_size=32, embed_dim=32, inner_dim=8, depth=2, num_heads_outer=4, num_heads_inner=2
    ),
    "timm pit": _timm("pit_ti_224", img_size=32, patch_size=8, stride=4, base_dims=(8, 8), depth=(1, 1), heads=(2, 4)),
    "timm pvt v2": _timm("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32), num_heads=(1, 2, 4, 4)),
    "timm twins svt": _timm(
        "twins_svt_small",
        img_size=64,
        size=64,
        depths=(2, 2),
        embed_dims=(8, 16),
        num_heads=(2, 4),
        wss=(4, 4),
        mlp_ratios=(2, 2),
        sr_ratios=(2, 1),
    ),
    "timm twins pcpvt": _timm(
        "twins_pcpvt_small",
        img_size=32,
        depths=(1, 1),
        embed_dims=(8, 16),
        num_heads=(2, 4),
        mlp_ratios=(2, 2),
        sr_ratios=(2, 1),
    ),
    "timm hiera": _timm(
        "hiera_tiny_224",
        img_size=(64, 64),
        size=64,
        embed_dim=8,
        num_heads=1,
        stages=(1, 1, 1),
        q_pool=2,
        mask_unit_size=(4, 4),
    ),
    "timm crossvit": _timm(
        "crossvit_tiny_240",
        img_size=48,
        size=48,
        img_scale=(1.0, 2 / 3),
        embed_dim=(16, 32),
        depth=((1, 1, 0),),
        num_heads=(2, 4),
        mlp_ratio=(2, 2, 1),
    ),
    "timm coat": _timm(
        "coat_lite_tiny", img_size=32, embed_dims=(8, 8, 16, 16), serial_depths=(1, 1, 1, 1), num_heads=8
    ),
    "timm volo": row(
        "timm.models.volo:VOLO",
        image(),
        num_classes=12,
        img_size=32,
        patch_size=8,
        layers=(1, 1),
        embed_dims=(16, 32),
        num_heads=(2, 4),
        downsamples=(True, False),
        outlook_attention=(True, False),
        stem_hidden_dim=8,
        mlp_ratio=2,
        use_aux_head=False,
    ),
    "timm gcvit": row(
        "timm.models.gcvit:GlobalContextVit",
        image(64),
        num_classes=12,
        img_size=64,
        depths=(1, 1, 1, 1),
        num_heads=(1, 2, 2, 4),
        embed_dim=8,
        window_size=(2, 2, 2, 2),
    ),
    "timm davit": _timm("davit_tiny", size=32, depths=(1, 1), embed_dims=(8, 16), num_heads=(2, 4), window_size=4),
    "timm focalnet": row(
        "timm.models.focalnet:FocalNet",
        image(),
        num_classes=12,
        depths=(1, 1),
        embed_dim=8,
        focal_levels=(2, 2),
        focal_windows=(3, 3),
    ),
    "timm nest": row(
        "timm.models.nest:Nest",
        image(),
        num_classes=12,
        img_size=32,
        embed_dims=(8, 16),
        num_heads=(2, 4),
        depths=(1, 1),
        num_levels=2,
    ),
    "timm naflexvit": _timm("naflexvit_base_patch16_gap", patch_size=8, embed_dim=32, depth=2, num_heads=4),
    # --- timm: mixers
    "timm mixer": row("timm.models.mlp_mixer:MlpMixer", image(), num_classes=12, **MIXER),
    "timm resmlp": row(
        "timm.models.mlp_mixer:MlpMixer",
        image(),
        num_classes=12,
        block_layer="@timm.models.mlp_mixer:ResBlock",
        norm_layer="@timm.models.mlp_mixer:Affine",
        mlp_ratio=4,
        **MIXER,
    ),
    "timm gmlp": row(
        "timm.models.mlp_mixer:MlpMixer",
        image(),
        num_classes=12,
        mlp_ratio=4,
        block_layer="@timm.models.mlp_mixer:SpatialGatingBlock",
        mlp_layer="@timm.layers:GatedMlp",
        **MIXER,
    ),
    "timm sequencer": _timm(
        "sequencer2d_s",
        img_size=32,
        layers=(1, 1),
        patch_sizes=(4, 2),
        embed_dims=(16, 32),
        hidden_sizes=(8, 8),
        mlp_ratios=(2.0, 2.0),
    ),
    "timm convmixer": row(
        "timm.models.convmixer:ConvMixer", image(), 32, 2, kernel_size=3, patch_size=4, num_classes=12
    ),
    "timm poolformer": row("timm.models.metaformer:MetaFormer", image(), num_classes=12, **SMALL),
    # --- timm: convolutions
    "timm resnet": _timm("resnet18", **RESNET),
    "timm resnet, bottlenecks": _timm("resnet50", **RESNET),
    "timm resnet, squeeze and excite": _timm("seresnet50", **RESNET),
    "timm resnext": _timm(
        "resnext50_32x4d", layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), cardinality=4, base_width=16
    ),
    "timm resnest": _timm("resnest14d", layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), stem_width=4),
    "timm sknet": _timm("skresnet18", layers=(1, 1, 1, 1), channels=(16, 16, 16, 32)),
    "timm res2net": _timm("res2net50_26w_4s", layers=(1, 1, 1, 1), channels=(8, 8, 16, 16)),
    "timm resnet v2": _timm("resnetv2_50", layers=(1, 1, 1, 1), channels=(32, 32, 64, 64), stem_chs=8),
    "timm convnext": _timm("convnext_atto", **SMALL),
    "timm convnext v2": _timm("convnextv2_atto", **SMALL),
    "timm densenet": _timm("densenet121", growth_rate=4, block_config=(2, 2)),
    "timm dla": _timm("dla34", levels=(1, 1, 1, 1, 1, 1), channels=(4, 8, 8, 16, 16, 16)),
    "timm dpn": _timm("dpn48b", k_r=8, groups=4, k_sec=(1, 1, 1, 1), inc_sec=(4, 4, 4, 4)),
    "timm rexnet": _timm("rexnet_100", width_mult=0.25),
    "timm mobilenet v3": _timm("mobilenetv3_small_050"),
    "timm lcnet": _timm("lcnet_035"),
    "timm ghostnet": _timm("ghostnet_050", drop_rate=0.0),
    "timm mobileone": _timm("mobileone_s0"),
    "timm repvgg": _timm("repvgg_a0"),
    "timm inception next": _timm("inception_next_tiny", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    "timm edgenext": _timm("edgenext_xx_small", dims=(8, 16, 16, 32), depths=(1, 1, 2, 2)),
    "timm mambaout": _timm("mambaout_femto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    "timm starnet": _timm("starnet_s1", base_dim=8, depths=(1, 1)),
    "timm cspnet": _timm("cspresnet50", size=64),
    # --- torchvision
    "torchvision vit": _torchvision(
        "VisionTransformer", 32, 8, 2, 4, 32, 64, num_classes=12, module="torchvision.models.vision_transformer"
    ),
    "torchvision swin": _torchvision(
        "SwinTransformer",
        [2, 2],
        16,
        [1, 1],
        [2, 4],
        [4, 4],
        stochastic_depth_prob=0.0,
        num_classes=12,
        module="torchvision.models.swin_transformer",
    ),
    "torchvision maxvit": _torchvision(
        "MaxVit", (32, 32), 8, 2, [8, 16], [1, 1], 8, 0.0, num_classes=12, module="torchvision.models.maxvit"
    ),
    "torchvision resnet": _torchvision("resnet18", num_classes=12),
    "torchvision squeezenet": _torchvision("squeezenet1_1", num_classes=12, size=64),
    "torchvision shufflenet": _torchvision("shufflenet_v2_x0_5", num_classes=12, size=64),
    "torchvision mobilenet v2": _torchvision("mobilenet_v2", num_classes=12, width_mult=0.25),
    "torchvision mobilenet v3": _torchvision("mobilenet_v3_small", num_classes=12),
    "torchvision mnasnet": _torchvision("MNASNet", 0.25, num_classes=12, module="torchvision.models.mnasnet"),
    "torchvision densenet": _torchvision(
        "DenseNet", 4, (2, 2), 8, num_classes=12, module="torchvision.models.densenet"
    ),
    "torchvision lraspp": _torchvision(
        "lraspp_mobilenet_v3_large",
        weights=None,
        weights_backbone=None,
        num_classes=4,
        size=64,
        module="torchvision.models.segmentation",
    ),
}
