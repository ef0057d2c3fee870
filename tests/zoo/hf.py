"""transformers' model families, tiny: `build("mistral")` returns (model in train mode, one global batch) as tests/zoo
does.

A family is a row of data: the model's class, what its config says beyond the common sizes, and its batch. Sizes are
those of tests/zoo (2 layers, hidden 64, 8 heads, 8 × 16 tokens), given in the common names of transformers' configs and
left out where a config has no such field; all probabilities of dropping something are zero. Here: the mechanism, and
the families that tests/test_models_hf.py tries on every mesh. zoo/hf_more.py has many others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.zoo import BATCH, HEADS, HIDDEN, SEQ, VOCAB, Batch, Built, labels, ready, tokens

#: In the common names: a config's attribute_map translates them.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE, PATCH, CLASSES = 32, 8, 12


def random(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(n: int = CLASSES, seed: int = 5) -> Tensor:
    return torch.randint(0, n, (BATCH,), generator=torch.Generator().manual_seed(seed))


def padding() -> Tensor:
    """Attention mask i64[8, 16]: row i lacks its last i tokens."""
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    for i in range(BATCH):
        mask[i, SEQ - i :] = 0
    return mask


def causal() -> Batch:
    return {"input_ids": tokens(), "labels": labels()}


def masked() -> Batch:
    return {"input_ids": tokens(), "attention_mask": padding(), "labels": labels()}


def classified() -> Batch:
    return {"input_ids": tokens(), "attention_mask": padding(), "labels": classes()}


def image() -> Batch:
    return {"pixel_values": random(BATCH, 3, IMAGE, IMAGE), "labels": classes()}


def oblong() -> Batch:
    """15 patches of 8 × 8: with the class token 16."""
    return {"pixel_values": random(BATCH, 3, 24, 40), "labels": classes()}


def patches() -> Batch:
    return {"pixel_values": random(BATCH, 3, 64, 64), "labels": classes()}


def pair() -> Batch:
    return {
        "input_ids": tokens(),
        "pixel_values": random(BATCH, 3, IMAGE, IMAGE),
        "attention_mask": padding(),
        "return_loss": True,
    }


def sound() -> Batch:
    """Raw audio, of which CONVS make 16 frames; class of every recording."""
    return {"input_values": random(BATCH, 323), "labels": classes()}


def heard() -> Batch:
    """Spectra of 32 frames; a transcript."""
    return {"input_features": random(BATCH, 16, 32), "labels": tokens()}


@dataclass(frozen=True)
class Family:
    """model: class in transformers. config: fields beyond SIZES. batch: in float64."""

    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    batch: Callable[[], Batch] = causal


def row(model: str, batch: Callable[[], Batch] = causal, **config: Any) -> Family:
    return Family(model, config, batch)


GQA = {"num_key_value_heads": 4}
EXPERTS = {"experts_implementation": "batched_mm"}  # the default has no float64 kernel
SEQ2SEQ = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 4 * HIDDEN,
    "decoder_ffn_dim": 4 * HIDDEN,
    "d_model": HIDDEN,
    "decoder_start_token_id": 2,
}
TEXT = SIZES | {"projection_dim": HIDDEN}
VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "projection_dim": HIDDEN,
}
VIT = {"image_size": IMAGE, "patch_size": PATCH, "num_labels": CLASSES}
CONVS = {
    "conv_dim": (HIDDEN, HIDDEN),
    "conv_kernel": (8, 4),
    "conv_stride": (5, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
}

FAMILIES: dict[str, Family] = {
    # decoders
    "mistral": row("MistralForCausalLM", **GQA, sliding_window=8),
    "qwen2": row("Qwen2ForCausalLM", **GQA),
    "qwen3": row("Qwen3ForCausalLM", **GQA, head_dim=8),
    "gemma2": row("Gemma2ForCausalLM", **GQA, head_dim=8, sliding_window=8),
    "phi3": row("Phi3ForCausalLM", **GQA),
    "gpt_neox": row("GPTNeoXForCausalLM"),
    "opt": row("OPTForCausalLM", ffn_dim=4 * HIDDEN, word_embed_proj_dim=HIDDEN),
    "bloom": row("BloomForCausalLM"),
    "falcon": row("FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=4),
    "falcon_7b": row("FalconForCausalLM"),
    "falcon_alibi": row("FalconForCausalLM", alibi=True, multi_query=False),
    "mpt": row("MptForCausalLM", max_seq_len=64),
    "persimmon": row("PersimmonForCausalLM"),
    # encoder and decoder
    "bart": row("BartForConditionalGeneration", **SEQ2SEQ),
    # encoders
    "roberta": row("RobertaForMaskedLM", masked, max_position_embeddings=66),
    "distilbert": row("DistilBertForMaskedLM", masked, hidden_dim=256),
    "electra": row("ElectraForMaskedLM", masked, embedding_size=32),
    "deberta_v2": row(
        "DebertaV2ForMaskedLM",
        masked,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    # vision
    "vit": row("ViTForImageClassification", oblong, **VIT | {"image_size": (24, 40)}),
    "deit": row("DeiTForImageClassification", image, **VIT),
    "swin": row(
        "SwinForImageClassification",
        patches,
        image_size=64,
        patch_size=4,
        embed_dim=32,
        depths=[2, 2],
        num_heads=[4, 8],
        window_size=4,
        num_labels=CLASSES,
    ),
    "convnext": row(
        "ConvNextForImageClassification", image, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, num_labels=CLASSES
    ),
    # several kinds of input
    "clip": row("CLIPModel", pair, text_config=TEXT, vision_config=VISION, projection_dim=HIDDEN),
    # sound
    "wav2vec2": row("Wav2Vec2ForSequenceClassification", sound, **CONVS, num_labels=CLASSES),
    "whisper": row(
        "WhisperForConditionalGeneration",
        heard,
        **SEQ2SEQ,
        num_mel_bins=16,
        max_source_positions=16,
        max_target_positions=32,
    ),
}


def build(family: Family, dtype: torch.dtype = torch.float64, **config: Any) -> Built:
    """A family's model and batch. config: fields that override the row's."""
    import transformers

    with mock.patch("torch.jit.script", lambda function: function):  # what it compiles, `zoo.Wide` would not reach
        model_class: Any = getattr(transformers, family.model)
    found = tiny(family, model_class.config_class, **config)
    torch.manual_seed(0)
    model = ready(model_class(found), dtype)
    batch = {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in family.batch().items()
    }
    return model, batch


def tiny(family: Family, config_class: Any, **config: Any) -> Any:
    """A family's config. config: fields that override the row's."""
    renamed, known = config_class.attribute_map, inspect.signature(config_class.__init__).parameters
    own = {**family.config, **config}
    common = {renamed.get(k, k): v for k, v in SIZES.items() if k not in own}
    found = config_class(**{k: v for k, v in common.items() if k in known and k not in own}, **own)
    never_drop(found)
    return found


def never_drop(config: Any) -> None:
    """Every probability of dropping something is zero, also in the configs within."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            never_drop(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
