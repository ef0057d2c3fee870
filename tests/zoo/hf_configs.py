"""Tiny configs of transformers for tests/zoo/hf_any.py, by the names of their fields.

`ways` lists several, the smallest first: where a class does not run with one, the next is tried.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.zoo import VOCAB
from tests.zoo.hf import CLASSES, IMAGE, PATCH, Family, never_drop
from tests.zoo.hf import tiny as tiny_row

Fields = tuple[tuple[str, Any], ...]
IMAGE_TOKEN = VOCAB - 1
#: A pattern of a field's whole name -> its value. The first that fits counts. How many there are of something:
LAYERS: Fields = (
    (r"((text|entity|audio)_)?vocab_size(_per_layer_input)?", VOCAB),
    (r"pad_token_id|mask_token_id", 0),
    (r"bos_token_id", 1),
    (r"eos_token_id|sep_token_id|decoder_start_token_id", 2),
    (r"(num_)?(hidden_layers|encoder_layers|decoder_layers|layers|n_layers?|num_layers|depth)", 2),
    (r"num_hidden_layers|encoder_num_hidden_layers|num_(encoder|decoder)_layers|n_layer|n_layers", 2),
    (r"num_labels", CLASSES),
)
COUNTS: Fields = (
    *LAYERS,
    (r"(num_)?key_value_heads|num_kv_heads|n_head_kv|num_key_value_groups", 4),
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
    (r"(mamba_)?(chunk_size)", 8),
    (r"num_frames", 4),
    (r"num_queries|num_latents", 16),
    (r"window_size", 4),
    (r"encoder_hash_byte_group_vocab", 64),
    (r"num_(self|cross)_attends_per_block|num_blocks", 1),
)
#: ... and how wide it is.
WIDTHS: Fields = (
    (r".*(attention_heads|num_heads|n_heads?)", 8),
    (r"(qk_rope|qk_nope|v|index)_head_dim|qk_head_dim", 8),
    (r".*head_dim|attention_head_size|d_kv", 8),
    (r"(q|kv|o|qk)_lora_rank|.*lora_(rank|dim)", 32),
    (r"moe_intermediate_size|.*expert_(intermediate|hidden)_size|shared_.*intermediate_size", 64),
    (r".*(intermediate_size|intermediate_dim|ffn_dim|mlp_dim|d_ff|n_inner|ffn_hidden_size|feed_forward_size)", 256),
    (r"patch_size", PATCH),
    (r"(ssm_)?state_size|mamba_d_state|d_state", 16),
    (r"mamba_d_ssm", 64),
    (r"mamba_n_heads|mamba_num_heads|linear_num_(key|value)_heads", 8),
    (r"linear_(key|value)_head_dim|mamba_d_head|mamba_head_dim", 8),
    (r"d_latents", 64),
    (r"(word_)?embed(ding)?_(dim|size|proj_dim)|embedding_size", 64),
    (r"(.*_)?(hidden_size(_global)?|d_model|n_embd|hidden_dim|dim|width|projection_dim|proj_dim|output_dim)", 64),
)
#: Fields without a default number that have to have one.
NONE = r"head_dim|key_value|group|lora|intermediate|window|token_id|hidden_size|vocab|experts|n_embd|moe"
#: Fields that a config checks against each other, by the name of its class.
OWN: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "Glm5NextTextConfig": {"qk_rope_head_dim": 0},
    "LongcatFlashConfig": {"qk_head_dim": None},
    "Qwen4ExpTextConfig": {"indexer_head_dim": None},
    "ReformerConfig": {"axial_pos_shape": (4, 4), "axial_pos_embds_dim": (32, 32), "is_decoder": True},
    "ZambaConfig": {"layers_block_type": ["linear_attention", "hybrid"]},
    "Zamba2Config": {"layers_block_type": ["linear_attention", "hybrid"]},
    "ZayaConfig": {"num_experts_per_tok": 1},
}
#: Fields that switch off what is drawn at random.
STILL = {"apply_spec_augment": False, "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "use_cache": False}


def ways(config_class: Any, row: Family | None) -> Iterator[Callable[[], Any]]:
    """Functions that make a config. row: what tests/zoo says of another class with this config."""
    every = COUNTS + WIDTHS
    yield partial(tiny, config_class, every)
    yield partial(tiny, config_class, every, num_key_value_heads=8, num_kv_heads=8)
    if row is not None:
        yield lambda: ready(tiny_row(row, config_class))
    yield partial(tiny, config_class, every, layer_types=["full_attention"] * 2, is_decoder=True)
    for section in ([2, 1, 1], [1, 1, 0]):  # of positions in height, width and time
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
        yield partial(tiny, config_class, every, rope_parameters=rope)
    yield partial(tiny, config_class, COUNTS, image_size=2 * IMAGE)
    yield partial(tiny, config_class, LAYERS)


def _value(name: str, default: Any, rules: Fields) -> Any:
    """What a field is to be; its default, if no rule says otherwise."""
    if isinstance(default, bool) or not (default is None or isinstance(default, int)):
        return default
    if default is None and not re.search(NONE, name):
        return None
    found = next((value for pattern, value in rules if re.fullmatch(pattern, name)), None)
    if found is None and name.endswith(
        tuple(f"{of}_token_{end}" for of in ("image", "audio") for end in ("id", "index"))
    ):
        return IMAGE_TOKEN
    if found is None and name.endswith("token_id") and isinstance(default, int) and default >= VOCAB:
        return VOCAB - 2 - len(name) % 20
    return default if found is None else found


def tiny(config_class: Any, rules: Fields, **instead: Any) -> Any:
    """A config of this class with small numbers, and the like in the configs that it is made of. instead: values of
    fields that it has.
    """
    fields = inspect.signature(config_class.__init__).parameters
    defaults = {
        name: None if field.default is inspect.Parameter.empty else field.default
        for name, field in fields.items()
        if name not in ("self", "kwargs", "args") and field.kind not in (field.VAR_KEYWORD, field.VAR_POSITIONAL)
    }
    given = {
        name: value for name, default in defaults.items() if (value := _value(name, default, rules)) is not default
    }
    given |= _lists(defaults, given, narrow=rules[-1] == WIDTHS[-1])
    given |= OWN.get(config_class.__name__, {})
    text = not re.search("Vision|Audio", config_class.__name__)  # where a rotation is of time alone
    given |= {name: value for name, value in instead.items() if name in fields and (text or "rope" not in name)}
    inner = {n: c for n, c in getattr(config_class, "sub_configs", {}).items() if c.__name__ != "AutoConfig"}
    given |= {name: tiny(of, rules, **instead).to_dict() for name, of in inner.items() if name in fields}
    found = config_class(**given)
    for name in getattr(config_class, "sub_configs", {}):  # a sub config that its class chooses by itself
        sub = getattr(found, name, None)
        if name not in inner and sub is not None and not isinstance(sub, dict):
            given[name] = tiny(type(sub), rules, **instead).to_dict() | {"model_type": sub.model_type}
    return ready(config_class(**given))


def _lists(defaults: dict[str, Any], given: dict[str, Any], narrow: bool) -> dict[str, Any]:
    """Lists with an entry for each layer, as long as there are layers now; narrow: widths and depths of each stage."""
    fewer = {defaults[name]: value for name, value in given.items() if "layer" in name and value == 2}
    found: dict[str, Any] = {}
    for name, value in defaults.items():
        if not (isinstance(value, (list, tuple)) and value):
            continue
        if len(value) > 4 and len(value) in fewer:
            found[name] = value[: fewer[len(value)]]
        elif not narrow or not all(type(x) is int for x in value):
            continue
        elif re.fullmatch(r".*(dims?|hidden_sizes|channels|widths?)", name):
            found[name] = type(value)(x // 4 if x % 32 == 0 else x for x in value)
        elif name == "num_heads" and value == type(value)(value[0] * 2**i for i in range(len(value))):
            found[name] = type(value)(4 * 2**i for i in range(len(value)))
        elif re.fullmatch(r"depths?|.*_depths|(num_)?layers|num_blocks", name):
            found[name] = type(value)(min(x, 2) for x in value)
    return found


def ready(config: Any) -> Any:
    """The config, with nothing drawn at random, and what its class leaves out."""
    never_drop(config)
    for name, value in STILL.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for name, value in (("pad_token_id", 0), ("decoder_start_token_id", 2)):
        if getattr(config, "is_encoder_decoder", False) and getattr(config, name, None) is None:
            setattr(config, name, value)
    config._experts_implementation = "batched_mm"  # the default has no float64 kernel
    return config
