"""Any model class of transformers, tiny: its config by the names of its fields, its batch by what its forward takes.

    model, batch = hf_any.build("MiniMaxM2ForCausalLM")

A class that tests/zoo/hf.py or hf_more.py has a row for is built by that; the others by the rules here, which fit most.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.zoo import BATCH, SEQ, VOCAB, Batch, Built, labels, ready, tokens
from tests.zoo.hf import CLASSES, FAMILIES, IMAGE, PATCH, Family, _never_drop, classes, padding, random
from tests.zoo.hf import build as build_row

#: A pattern of a field's whole name -> its value. The first that fits counts.
FIELDS: tuple[tuple[str, Any], ...] = (
    (r"vocab_size(_per_layer_input)?|text_vocab_size|entity_vocab_size", VOCAB),
    (r"pad_token_id|mask_token_id", 0),
    (r"bos_token_id", 1),
    (r"eos_token_id|sep_token_id|decoder_start_token_id", 2),
    (r"(num_)?(hidden_layers|encoder_layers|decoder_layers|layers|n_layers?|num_layers|depth)", 2),
    (r"num_hidden_layers|encoder_num_hidden_layers|num_(encoder|decoder)_layers|n_layer|n_layers", 2),
    (r"(num_)?key_value_heads|num_kv_heads|n_head_kv|num_key_value_groups", 4),
    (r".*(attention_heads|num_heads|n_heads?)", 8),
    (r"(qk_rope|qk_nope|v|index)_head_dim|qk_head_dim", 8),
    (r".*head_dim|attention_head_size|d_kv", 8),
    (r"(q|kv|o|qk)_lora_rank|.*lora_(rank|dim)", 32),
    (r"moe_intermediate_size|.*expert_(intermediate|hidden)_size|shared_.*intermediate_size", 64),
    (r".*(intermediate_size|intermediate_dim|ffn_dim|mlp_dim|d_ff|n_inner|ffn_hidden_size|feed_forward_size)", 256),
    (r"num_experts_per_tok|moe_topk|moe_k|num_selected_experts|top_k_experts", 2),
    (r"(num|n)_(local_|routed_|sparse_)?experts|moe_num_experts|num_local_experts", 4),
    (r"n_group|topk_group|num_shared_experts|n_shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"index_topk", 8),
    (r"index_kpool.*", 4),
    (r"index_n_heads", 4),
    (r"(max_position_embeddings|n_positions|max_source_positions|max_target_positions|n_ctx|max_sequence_length)", 64),
    (r"sliding_window|attention_window|local_attention", 8),
    (r"image_size|img_size", IMAGE),
    (r"patch_size", PATCH),
    (r"num_labels", CLASSES),
    (r"(ssm_)?state_size|mamba_d_state|d_state", 16),
    (r"mamba_d_ssm", 64),
    (r"mamba_n_heads|mamba_num_heads|linear_num_(key|value)_heads", 8),
    (r"linear_(key|value)_head_dim|mamba_d_head|mamba_head_dim", 8),
    (r"(mamba_)?(chunk_size)", 8),
    (r"(word_)?embed(ding)?_(dim|size|proj_dim)|embedding_size", 64),
    (r"(.*_)?(hidden_size|d_model|n_embd|hidden_dim|dim|width|projection_dim|proj_dim|output_dim)", 64),
)
IMAGE_TOKEN = VOCAB - 1
#: Numbers that are tried instead where a class does not run: as many heads of keys as of queries.
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"num_key_value_heads": 8, "num_kv_heads": 8})


def _value(name: str, default: Any) -> Any:
    """What a field is to be; its default, if no rule says otherwise."""
    if isinstance(default, bool) or not (default is None or isinstance(default, int)):
        return default
    if default is None and not re.search(
        r"head_dim|key_value|group|lora|intermediate|window|token_id|hidden_size|vocab", name
    ):
        return None
    found = next((value for pattern, value in FIELDS if re.fullmatch(pattern, name)), None)
    if found is None and name.endswith(("image_token_id", "image_token_index")):
        return IMAGE_TOKEN
    if found is None and name.endswith("token_id") and isinstance(default, int) and default >= VOCAB:
        return VOCAB - 2 - len(name) % 20
    return default if found is None else found


def tiny(config_class: Any, instead: dict[str, Any]) -> Any:
    """A config of this class with small numbers, and the like in the configs that it is made of. instead: values of
    fields that it has.
    """
    fields = inspect.signature(config_class.__init__).parameters
    given: dict[str, Any] = {}
    for name, field in fields.items():
        if name in ("self", "kwargs", "args") or field.kind in (field.VAR_KEYWORD, field.VAR_POSITIONAL):
            continue
        default = None if field.default is inspect.Parameter.empty else field.default
        if (value := _value(name, default)) is not default:
            given[name] = value
    given |= {name: value for name, value in instead.items() if name in fields}
    inner = {n: c for n, c in getattr(config_class, "sub_configs", {}).items() if c.__name__ != "AutoConfig"}
    given |= {name: tiny(of, instead).to_dict() for name, of in inner.items() if name in fields}
    found = config_class(**given)
    for name in getattr(config_class, "sub_configs", {}):  # a sub config that its class chooses by itself
        sub = getattr(found, name, None)
        if name not in inner and sub is not None and not isinstance(sub, dict):
            given[name] = tiny(type(sub), instead).to_dict() | {"model_type": sub.model_type}
    found = config_class(**given)
    _never_drop(found)
    return found


def batch(model: Any) -> Batch:
    """What a forward takes, by the names of its arguments, and labels by the kind of head."""
    name, known = type(model).__name__, inspect.signature(model.forward).parameters
    config, found = model.config, Batch()
    inner = getattr(config, "vision_config", config)
    size, channels = getattr(inner, "image_size", None) or IMAGE, getattr(inner, "num_channels", 3) or 3
    if "input_ids" in known:
        found["input_ids"] = tokens(VOCAB - 24)
    if "attention_mask" in known and "input_ids" in known and "CausalLM" not in name:
        found["attention_mask"] = padding()
    grid = {"image_grid_thw", "video_grid_thw"} & known.keys()  # places of images: such a model is given text alone
    if "pixel_values" in known and not grid and ("input_ids" not in known or hasattr(config, "vision_config")):
        shape = size if isinstance(size, (tuple, list)) else (size, size)
        frames = (4,) if "Video" in name else ()
        found["pixel_values"] = random(BATCH, *frames, channels, *shape)
        if "input_ids" in known and (n := getattr(config, "image_seq_length", 0)):
            found["input_ids"][:, 1 : 1 + n] = IMAGE_TOKEN
    if "input_values" in known:
        found["input_values"] = random(BATCH, 400)
    if "input_features" in known:
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", 80)
        found["input_features"] = random(BATCH, bins, 32)
    if config.is_encoder_decoder and "decoder_input_ids" in known and "labels" not in known:
        found["decoder_input_ids"] = tokens(VOCAB - 24, 3)
    if "return_loss" in known and name.endswith("Model"):
        found["return_loss"] = True  # type: ignore[assignment]
    return found | _labels(name, known, config)


def _labels(name: str, known: Any, config: Any) -> Batch:
    if "start_positions" in known:
        return {"start_positions": classes(SEQ), "end_positions": classes(SEQ, 6)}
    if "labels" not in known:
        return {}
    if any(word in name for word in ("TokenClassification", "FrameClassification")):
        return {"labels": labels(config.num_labels)}
    if "Classification" in name or "XVector" in name:
        return {"labels": classes(config.num_labels)}
    if "NextSentence" in name:
        return {"labels": classes(2)}
    return {"labels": labels(VOCAB - 24)}


@functools.cache
def rows() -> dict[str, Family]:
    """The families with a row of their own, by the name of their class."""
    from tests.zoo import hf_more, sequences

    listed = [*FAMILIES.values(), *hf_more.FAMILIES.values(), *sequences.FAMILIES.values()]
    return {family.model: family for family in reversed(listed)}


def names() -> dict[str, str]:
    """The names of all classes with a head -> their model type, then those without one; the newest kinds first."""
    from transformers.models.auto import modeling_auto

    kinds = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT", "CTC")
    tables = sorted(n for n in dir(modeling_auto) if re.fullmatch(r"MODEL(_FOR_\w+)?_MAPPING_NAMES", n))
    first = [f"MODEL_FOR_{kind}_MAPPING_NAMES" for kind in kinds]
    tables = first + [t for t in tables if t not in first and t != "MODEL_MAPPING_NAMES"] + ["MODEL_MAPPING_NAMES"]
    found: dict[str, str] = {}
    for table in tables:
        for kind, classes_of in getattr(modeling_auto, table).items():
            for name in (classes_of,) if isinstance(classes_of, str) else classes_of:
                found.setdefault(name, kind)
    return found


def build(name: str) -> Built:
    """A class of transformers, in train mode and float64, and one global batch. Raises what its own code raises."""
    import transformers

    if (family := rows().get(name)) is not None:
        return build_row(family)
    with mock.patch("torch.jit.script", lambda function: function):
        model_class: Any = getattr(transformers, name)
    for instead in VARIANTS:
        try:
            config = tiny(model_class.config_class, instead)
            config.use_cache = False
            config._experts_implementation = "batched_mm"  # the default has no float64 kernel
            torch.manual_seed(0)
            model = ready(model_class(config), torch.float64)
            of = batch(model)
            given = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in of.items()}
            model(**given)
            return model, given
        except Exception:
            if instead == VARIANTS[-1]:
                raise
    raise AssertionError
