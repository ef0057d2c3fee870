"""Capture a model that generates (shardc.features.generation.program), with a cache of transformers' type.

So the model itself decides what each layer keeps, and masks its attention accordingly.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardc.capture.batch import Leaves
from shardc.capture.loss import ValuesOf, tensors_in
from shardc.errors import ShardcError
from shardc.features.generation.cache import Now, checked_states, join_cache, new_cache, split_cache
from shardc.features.generation.program import AT, ENCODER, IDS, LOGITS, PLACE, Form, State
from shardc.ir.outputs import OtherForward, Output
from shardc.ir.placement import Layout
from shardc.ir.source import of_function
from shardc.spec import Batch, Spec
from shardc.spec.check import token_axes
from shardc.torch_private import traced_node


class Step(OtherForward):
    """A forward that generates: one of the three of shardc.features.generation.program."""

    def spec(self, spec: Spec) -> Spec:
        """Return the part of a spec that applies when tokens are generated one at a time.

        It splits no sequence, has no microbatches, and names no inputs, outputs or activations of another forward.
        """
        batch = Batch(axes=spec.batch.axes)
        sections = {name: section for name, section in spec.sections.items() if not token_axes({name: section})}
        return replace(spec, batch=batch, activations=(), outputs=(), sections=sections, strict=False, uneven="pad")

    def module(self, model: nn.Module, leaves: Leaves) -> GenerationOf:
        return GenerationOf(model, leaves, self)

    def outputs(self, outputs: Sequence[Output]) -> tuple[Output, ...]:
        """Return the outputs: logits are as split as the vocabulary; caches have the layouts of the next step."""
        layouts = self.layouts if isinstance(self, Prefill) else {}
        return tuple(replace(o, wanted=layouts.get(o.name), as_made=o.name == LOGITS) for o in outputs)


@dataclass(frozen=True)
class Whole(Step):
    """The forward of whole sequences, padded on the right, which a causal model does not see."""


@dataclass(frozen=True)
class Prefill(Step):
    """The forward of prompts. length: of the cache that it starts, in tokens.

    form: of the cache; tracing fills it in. moves: each new token moves all keys and values up by one; layouts: of the
    states in `Decode`, by output.
    """

    length: int
    form: Form
    moves: bool = False
    layouts: Mapping[str, Layout] = field(default_factory=dict)


@dataclass(frozen=True)
class Decode(Step):
    """The forward of one token per row. states: tensors that it reads and writes; form: of their cache."""

    states: tuple[State, ...]
    form: Form


class GenerationOf(ValuesOf):
    """A model whose batch and whose values are those of a step that generates.

    The cache of a decoding step is buffers of this module, which forward writes to.
    """

    def __init__(self, model: nn.Module, leaves: Leaves, step: Step) -> None:
        super().__init__(model, leaves, True)
        self.step = step
        for s in step.states if isinstance(step, Decode) else ():
            self.register_buffer(s.buffer, torch.empty(s.shape, dtype=s.dtype, device="meta"))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.leaves.nodes = list(map(traced_node, tensors))
        batch = dict(self.leaves.batch(tensors))
        if isinstance(self.step, Prefill):
            values = self._prefill(batch, self.step)
        elif isinstance(self.step, Decode):
            values = self._decode(batch, self.step)
        else:
            values = self._whole(batch)
        return tuple(self._flat(values, ""))

    def _prefill(self, batch: dict[str, Any], step: Prefill) -> dict[str, Tensor]:
        cache = new_cache(self.model, Now(step.length, batch["attention_mask"] == 0, moves=step.moves))
        output = self._output(batch, cache, batch.get(ENCODER, {}))
        states, form = split_cache(cache)
        step.form.cache, step.form.slots = form.cache, form.slots
        if ENCODER in batch:
            step.form.encoder = tuple(output.encoder_last_hidden_state.shape)
        values = {State(path, tuple(x.shape), x.dtype).output: x for path, x in states.items()}
        return {LOGITS: output.logits[:, -1], **values}

    def _decode(self, batch: dict[str, Any], step: Decode) -> dict[str, Tensor]:
        place, buffers = batch.pop(PLACE, None), {s.path: getattr(self, s.buffer) for s in step.states}
        cache = join_cache(step.form, buffers, Now(batch["attention_mask"].shape[1], place=place))
        decoders = getattr(cache, "self_attention_cache", cache)  # in 5.17 a pair of caches has no such property
        if all(decoders.is_linear):  # padding is in the past, and a recurrence takes a mask of the current tokens
            batch.pop("attention_mask")
        encoder = dict(batch.get(ENCODER, {}))
        if step.form.encoder is not None:  # only its cached keys and values are used: of this, only the shape
            dtype = next(x.dtype for x in self.model.parameters() if x.is_floating_point())
            of_encoder = torch.zeros(step.form.encoder, dtype=dtype, device=batch["input_ids"].device)
            encoder["encoder_outputs"] = _types("modeling_outputs").BaseModelOutput(of_encoder)
        output, after = self._output(batch, cache, encoder), checked_states(step.form, cache)
        for path, buffer in buffers.items():
            if after[path].shape != buffer.shape or after[path].dtype != buffer.dtype:
                sizes = f"from {list(buffer.shape)} to {list(after[path].shape)}"
                raise ShardcError(f"{path!r} of its cache grows with a token, {sizes}", where="generate")
            if after[path] is not buffer:
                buffer.copy_(after[path])
        return {LOGITS: output.logits[:, -1]}

    def _output(self, batch: dict[str, Any], cache: Any, encoder: dict[str, Any]) -> Any:
        """Run the model; return its output, with logits [rows, positions, vocabulary] or of the last position.

        With an encoder, ids are the decoder's, which are not padded.
        """
        parameters = inspect.signature(self.model.forward).parameters
        if encoder:
            names = {"input_ids": "decoder_input_ids", "position_ids": "decoder_position_ids"}
            batch = {new: batch[old] for old, new in names.items()}
        inputs = {name: x for name, x in batch.items() if name in parameters}
        inputs |= {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        return self.model(**inputs, **encoder, **{cache_argument(self.model): cache}, use_cache=True)

    def _whole(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        ids, at = batch[IDS], batch[AT]
        encoder = batch.get(ENCODER)
        output = self.model(ids) if encoder is None else self.model(**encoder, decoder_input_ids=ids).logits
        rows, length = ids.shape
        candidates = [x for x in tensors_in(output).values() if x.dim() == 3 and x.shape[:2] == (rows, length)]
        if not candidates:
            fault = f"for ids [{rows}, {length}] the model returns no logits [{rows}, {length}, vocabulary]"
            fix = 'return logits of every position, as a tensor, .logits or "logits"'
            raise ShardcError(fault, where=of_function(self.model.forward).line, fix=fix)
        logits = candidates[0]
        return {LOGITS: logits.gather(1, at[:, None, None].expand(rows, 1, logits.shape[-1]))[:, 0]}


def no_cache(model: nn.Module) -> str:
    """Return why a model takes no cache of this kind; "" if it may."""
    if getattr(model, "config", None) is None or not cache_argument(model):
        return f"{type(model).__name__} takes no cache of keys and values, as transformers' models do"
    return ""


def cache_argument(model: nn.Module) -> str:
    """Return forward's name for the cache, "" if it has none; transformers 5.24 renames all to `cache`."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in taken), "")


def _types(module: str) -> Any:
    """Import a module of transformers, which is needed only with a model of that library."""
    return importlib.import_module(f"transformers.{module}")
