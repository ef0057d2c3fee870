"""Batches for tests/zoo/hf_any.py: what a forward takes, by the names of its arguments, and labels by the kind of head.

`ways` lists several: where a class does not run with one, the next is tried. Most of a model runs with the first.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.zoo import BATCH, SEQ, VOCAB, Batch, labels, tokens
from tests.zoo.hf import IMAGE, classes, padding, random
from tests.zoo.hf_configs import IMAGE_TOKEN

EOS = 2
WORDS = ("input_ids", "attention_mask", "labels", "decoder_input_ids", "start_positions", "end_positions", "lang_ids")


def ways(model: Any) -> Iterator[Batch]:
    """Batches of a model: with labels and without, all that it takes and words alone."""
    known = inspect.signature(model.forward).parameters
    whole = batch(model, known)
    for of in (whole, {k: v for k, v in whole.items() if "labels" not in k and "positions" not in k}):
        yield of
        yield from _pictures(of)
        yield from _sounds(of, known)
        if "input_ids" in of and len(words := {k: v for k, v in of.items() if k in WORDS}) < len(of):
            yield words
        if "input_ids" in of and (others := of.keys() - WORDS):
            yield {k: v for k, v in of.items() if k in others}


def _pictures(of: Batch) -> Iterator[Batch]:
    """Images as a list of one for each text."""
    if "pixel_values" in of and of["pixel_values"].dim() == 4:
        yield of | {"pixel_values": of["pixel_values"][:, None]}


def _sounds(of: Batch, known: Any) -> Iterator[Batch]:
    """Spectra with frames before bins, and with a mask of frames."""
    if "input_values" in of and of["input_values"].dim() == 2:
        yield {**of, "input_values": of["input_values"][:, None]}  # one channel
    if "input_features" not in of:
        return
    turned = {**of, "input_features": of["input_features"].transpose(1, 2).contiguous()}
    yield turned
    for name in {"input_features_mask", "feature_attention_mask"} & known.keys():
        for spectra in (of, turned):
            frames = max(spectra["input_features"].shape[1:])
            yield {**spectra, name: torch.ones(BATCH, frames, dtype=torch.long)}


def mended(model: Any, of: Batch, error: Exception) -> Batch | None:
    """The batch that an error asks for: an argument that it names, as many places of images in the text, as many
    frames.
    """
    said = str(error)
    absent = inspect.signature(model.forward).parameters.keys() - of.keys()
    named = {n: make for n, make in ARGUMENTS.items() if n in absent and re.search(rf"\b{n}\b", said)}
    if named:
        return {**of, **{n: make(model.config) for n, make in named.items()}}
    if (found := re.search(r"tokens: (\d+), features:? (\d+)", said)) and "input_ids" in of:
        there, n = int(found[1]) // BATCH, int(found[2]) // BATCH
        if there < n and of["input_ids"].shape == (
            BATCH,
            SEQ,
        ):  # else places were added, and the model looks for others
            return _before(of, torch.full((BATCH, n - there), IMAGE_TOKEN))
        ids = of["input_ids"].clone()
        ids[(ids == IMAGE_TOKEN) & ((ids == IMAGE_TOKEN).cumsum(1) > n)] = 3
        return {**of, "input_ids": ids} if there > n else None
    if (found := re.search(r"to be of length (\d+), but found", said)) and "input_features" in of:
        return {**of, "input_features": random(BATCH, of["input_features"].shape[1], int(found[1]))}
    if "same number of <eos>" in said and "input_ids" in of:
        ids = of["input_ids"].clamp(min=EOS + 1)
        ids[:, -1] = EOS
        return {**of, "input_ids": ids}
    return None


def _before(of: Batch, places: Tensor) -> Batch:
    """The batch with tokens before its own, which have no label."""
    beside = {"input_ids": places, "attention_mask": torch.ones_like(places), "labels": torch.full_like(places, -100)}
    longer = {k: torch.cat([beside[k], v], 1) for k, v in of.items() if k in beside and v.shape == (BATCH, SEQ)}
    return {**of, **longer}


def batch(model: Any, known: Any) -> Batch:
    """All that a forward takes, as far as the rules go."""
    name, config, found = type(model).__name__, model.config, Batch()
    if "input_ids" in known:
        found["input_ids"] = tokens(VOCAB - 24)
    if "attention_mask" in known and "input_ids" in known and "CausalLM" not in name:
        found["attention_mask"] = padding()
    grid = {"image_grid_thw", "video_grid_thw"} & known.keys()  # places of images: such a model is given text alone
    if "pixel_values" in known and not grid and ("input_ids" not in known or hasattr(config, "vision_config")):
        frames = (getattr(config, "num_frames", None) or 4,) if "Video" in name or "Timesformer" in name else ()
        found["pixel_values"] = _images(config, *frames)
        if "input_ids" in known and (n := getattr(config, "image_seq_length", 0)):
            found["input_ids"][:, 1 : 1 + n] = IMAGE_TOKEN
    if "input_values" in known:
        found["input_values"] = random(BATCH, _samples(config))
    if "input_features" in known:
        frames_of = 2 * _first(config, ("max_source_positions",), 16)
        found["input_features"] = random(BATCH, _first(config, BINS, 80), frames_of)
    if config.is_encoder_decoder and "decoder_input_ids" in known and "labels" not in known:
        found["decoder_input_ids"] = tokens(VOCAB - 24, 3)
    if "return_loss" in known and name.endswith("Model"):
        found["return_loss"] = True  # type: ignore[assignment]
    needed = {n for n, p in known.items() if p.default is inspect.Parameter.empty} | {"lang_ids"}
    found |= {n: make(config) for n, make in ARGUMENTS.items() if n in needed & known.keys()}
    found |= _labels(name, known, config)
    if "MultipleChoice" in name:
        two = {k: torch.stack([v, v.roll(1, 1)], 1) for k, v in found.items() if k in ("input_ids", "attention_mask")}
        found |= two | {"labels": classes(2)}
    return found


BINS = ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
INNER = (
    "audio_config",
    "encoder_config",
    "speech_config",
    "vision_config",
    "audio_encoder",
    "encoder",
    "backbone_config",
)


def _first(config: Any, fields: tuple[str, ...], default: int) -> int:
    """The first of these fields that the config has, or a config within it."""
    for of in (config, *(getattr(config, name, None) for name in INNER)):
        for field in fields:
            if isinstance(value := getattr(of, field, None), int):
                return value
    return default


def _images(config: Any, *frames: int) -> Tensor:
    inner = getattr(config, "vision_config", config)
    size = getattr(inner, "image_size", None) or IMAGE
    shape = size if isinstance(size, (tuple, list)) else (size, size)
    return random(BATCH, *frames, getattr(inner, "num_channels", 3) or 3, *shape)


def _samples(config: Any) -> int:
    """So many samples that convolutions make 16 frames of them."""
    strides = getattr(config, "conv_stride", None)
    if not isinstance(strides, (tuple, list)):
        return 400
    return int(torch.tensor(strides).prod()) * SEQ + 90


def _clips(config: Any) -> Tensor:
    return _images(config, getattr(config, "frames_per_clip", None) or getattr(config, "num_frames", None) or 4)


#: Arguments that some forwards cannot do without.
ARGUMENTS: dict[str, Callable[[Any], Tensor]] = {
    "pixel_values": lambda config: _images(config),
    "visual_feats": lambda config: random(BATCH, 4, config.visual_feat_dim),
    "visual_pos": lambda config: random(BATCH, 4, config.visual_pos_dim),
    "visual_embeds": lambda config: random(BATCH, 4, config.visual_embedding_dim),
    "flattened_patches": lambda config: _flattened(getattr(config, "vision_config", config)),
    "lang_ids": lambda config: torch.zeros(BATCH, dtype=torch.long),
    "pixel_values_videos": _clips,
    "qformer_input_ids": lambda config: tokens(VOCAB - 24, 4),
    "past_values": lambda config: random(
        BATCH, getattr(config, "context_length", 16), getattr(config, "num_input_channels", 1)
    ),
    "task_inputs": lambda config: tokens(VOCAB - 24, 4),
    "bool_masked_pos": lambda config: (torch.arange(_patches(config)) % 2).bool().expand(BATCH, -1),
    "inputs_embeds": lambda config: _words(config),
    "query_embeds": lambda config: _words(config),
    "hidden_states": lambda config: _of_grid(config) if hasattr(config, "spatial_merge_size") else _words(config),
    "grid_thw": lambda config: torch.tensor([[1, 4, 4]] * BATCH),
}


def _words(config: Any) -> Tensor:
    return random(BATCH, SEQ, config.hidden_size)


def _of_grid(config: Any) -> Tensor:
    """Pixels of the patches of all images, 4 x 4 of each."""
    channels = getattr(config, "in_channels", None) or getattr(config, "in_chans", None) or 3
    return random(16 * BATCH, channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2)


def _flattened(config: Any) -> Tensor:
    """Pixels of patches behind their row and column."""
    place = torch.arange(SEQ)
    places = torch.stack([place // 4, place % 4], 1).double().expand(BATCH, -1, -1)
    return torch.cat([places, random(BATCH, SEQ, 3 * config.patch_size**2)], 2)


def _patches(config: Any) -> int:
    """Patches of a clip."""
    each = (config.image_size // config.patch_size) ** 2
    return int(each * config.num_frames // config.tubelet_size)


def _labels(name: str, known: Any, config: Any) -> Batch:
    if "start_positions" in known:
        return {"start_positions": classes(SEQ), "end_positions": classes(SEQ, 6)}
    if "labels" not in known:
        return {}
    if "SemanticSegmentation" in name:
        size = _images(config).shape[-2:]
        return {
            "labels": torch.randint(0, config.num_labels, (BATCH, *size), generator=torch.Generator().manual_seed(5))
        }
    if any(word in name for word in ("TokenClassification", "FrameClassification")):
        return {"labels": labels(config.num_labels)}
    if "Classification" in name or "XVector" in name:
        return {"labels": classes(config.num_labels)}
    if "NextSentence" in name:
        return {"labels": classes(2)}
    if "CTC" in name:  # fewer than there are frames
        return {"labels": labels(VOCAB - 24)[:, : SEQ // 3]}
    return {"labels": labels(VOCAB - 24)}
