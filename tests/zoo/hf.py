"""transformers' model families, tiny: `build("mistral")` returns (model in train mode, one global batch) as tests/zoo
does.

A family is a row of hf.yaml: the model's class, what its config says beyond the common sizes, and its batch. Sizes are
those of tests/zoo (2 layers, hidden 64, 8 heads, 8 × 16 tokens), given in the common names of transformers' configs and
left out where a config has no such field; all probabilities of dropping something are zero. Here: the mechanism, and
the families that tests/test_models_hf.py tries on every mesh. zoo/hf_more.yaml has many others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
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


def video() -> Batch:
    return {"pixel_values": random(BATCH, 4, 3, IMAGE, IMAGE), "labels": classes()}


def captioned() -> Batch:
    return {"pixel_values": random(BATCH, 3, IMAGE, IMAGE), "input_ids": tokens(), "labels": labels()}


def shown() -> Batch:
    """Text that begins with the four places of an image."""
    ids = tokens(VOCAB - 1)
    ids[:, 1:5] = VOCAB - 1
    return {"pixel_values": random(BATCH, 3, 2 * PATCH, 2 * PATCH), "input_ids": ids, "labels": labels()}


def short_series() -> Batch:
    return {"past_values": random(BATCH, 32, 3), "future_values": random(BATCH, 4, 3)}


def series() -> Batch:
    """16 steps and 7 of lags before them."""
    return {
        "past_values": random(BATCH, 23),
        "past_time_features": random(BATCH, 23, 2),
        "past_observed_mask": torch.ones(BATCH, 23),
        "future_values": random(BATCH, 4),
        "future_time_features": random(BATCH, 4, 2),
    }


def pixels() -> Batch:
    """Images as rows of colours of a palette; the last one begins a row."""
    return {"input_ids": tokens(VOCAB - 1), "labels": labels(VOCAB - 1)}


def noisy() -> Batch:
    """Images, and the numbers by which patches are chosen that are hidden."""
    return {"pixel_values": random(BATCH, 3, IMAGE, IMAGE), "noise": random(BATCH, 16, seed=6)}


def frames() -> Batch:
    return {"input_features": random(BATCH, SEQ, 16), "labels": classes()}


def long_frames() -> Batch:
    return {"input_features": random(BATCH, 32, 16), "labels": tokens()}


def spectrum() -> Batch:
    return {"input_values": random(BATCH, 32, 16), "labels": classes()}


def waveform() -> Batch:
    return {"input_values": random(BATCH, 2000), "labels": tokens()}


@dataclass(frozen=True)
class Family:
    """model: class in transformers. config: fields beyond SIZES. batch: in float64."""

    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    batch: Callable[[], Batch] = causal


def row(model: str, batch: Callable[[], Batch] = causal, **config: Any) -> Family:
    return Family(model, config, batch)


#: Of families that tests build otherwise than the tables do.
GQA = {"num_key_value_heads": 4}
EXPERTS = {"experts_implementation": "batched_mm"}  # the default has no float64 kernel
CONVS = {
    "conv_dim": (HIDDEN, HIDDEN),
    "conv_kernel": (8, 4),
    "conv_stride": (5, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
}


class _Loader(yaml.SafeLoader):
    """Reads `!tuple [...]` too."""


_Loader.add_constructor("!tuple", lambda loader, node: tuple(loader.construct_sequence(node)))


def families(table: str) -> dict[str, Family]:
    """The rows of TABLE.yaml: of each the model, the name of its batch (above), and fields of its config."""
    rows = yaml.load(Path(__file__).with_name(f"{table}.yaml").read_text(encoding="utf-8"), _Loader)["families"]
    return {name: _family(**fields) for name, fields in rows.items()}


def _family(model: str, batch: str = "causal", **config: Any) -> Family:
    return Family(model, config, globals()[batch])


FAMILIES = families("hf")


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
