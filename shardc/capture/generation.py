"""A model as it generates (shardc.ir.generation): it is given a cache as transformers' models take one, so that it
decides itself what of each layer is kept, and masks its attention by it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from shardc.capture.batch_leaves import Leaves
from shardc.capture.loss import ValuesOf
from shardc.ir.generation import LOGITS, PLACE, Decode, Prefill, State
from shardc.torch_private import traced_node


class GenerationOf(ValuesOf):
    """A model whose batch and whose values are those of a `Prefill` or a `Decode`.

    The cache of a decoding step is buffers of this module, which forward writes to.
    """

    def __init__(self, model: nn.Module, leaves: Leaves, step: Prefill | Decode) -> None:
        super().__init__(model, leaves, True)
        self.step = step
        for s in step.states if isinstance(step, Decode) else ():
            self.register_buffer(s.buffer, torch.empty(s.shape, dtype=s.dtype, device="meta"))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.leaves.nodes = list(map(traced_node, tensors))
        batch = dict(self.leaves.batch(tensors))
        place = batch.pop(PLACE, None)
        cache = self._cache(place)
        output = self.model(**_accepted(self.model, batch), past_key_values=cache, use_cache=True)
        values = {LOGITS: output.logits[:, -1]}
        if isinstance(self.step, Prefill):
            for i, layer in enumerate(cache.layers):
                for kind in ("keys", "values"):
                    x = getattr(layer, kind)
                    state = State(i, kind, tuple(x.shape), x.dtype)
                    values[state.output] = pad(x, (0, 0, 0, self.step.length - x.shape[-2]))
        else:
            for state in self.step.states:
                getattr(self, state.buffer).copy_(getattr(cache.layers[state.layer], state.kind))
        return tuple(self._flat(values, ""))

    def _cache(self, place: Tensor | None) -> Any:
        if isinstance(self.step, Prefill):
            return _types().Cache(layer_class_to_replicate=_prompt_layer())
        held: dict[int, dict[str, Tensor]] = {}
        for s in self.step.states:
            held.setdefault(s.layer, {})[s.kind] = getattr(self, s.buffer)
        return _types().Cache(layers=[_step_layer()(**held[i], place=place) for i in sorted(held)])


def caches(module: nn.Module) -> dict[str, Tensor]:
    """The cache among the buffers of what is exported, by name; of other modules none."""
    return dict(module.named_buffers(recurse=False)) if isinstance(module, GenerationOf) else {}


def why_not(model: nn.Module) -> str:
    """Why a model takes no cache of this kind; "" if it may."""
    parameters, name = inspect.signature(model.forward).parameters, type(model).__name__
    config: Any = getattr(model, "config", None)
    if config is None or "past_key_values" not in parameters:
        return f"{name} takes no past_key_values, as transformers' models do"
    if getattr(config, "is_encoder_decoder", False):
        return f"{name} has an encoder and a decoder"
    return ""


def _accepted(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Of a batch the arguments that a model's forward has, and that only the last position is to have logits."""
    parameters = inspect.signature(model.forward).parameters
    given = {name: x for name, x in batch.items() if name in parameters}
    return given | ({"logits_to_keep": 1} if "logits_to_keep" in parameters else {})


def _types() -> Any:
    return importlib.import_module("transformers.cache_utils")


@functools.cache
def _prompt_layer() -> type:
    """A layer's cache before its first keys: they are all that its attention sees."""

    def update(self: Any, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values, self.is_initialized = keys, values, True
        return keys, values

    return _layer(
        update=update,
        get_mask_sizes=lambda self, queries: (queries, 0),
        get_seq_length=lambda self: 0,
        get_max_length=lambda self: -1,
    )


@functools.cache
def _step_layer() -> type:
    """A layer's cache of all places, of which one is written."""

    def init(self: Any, keys: Tensor, values: Tensor, place: Tensor) -> None:
        self.keys, self.values, self.place, self.is_initialized = keys, values, place, True

    def update(self: Any, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        at = self.place.reshape(1)
        self.keys, self.values = self.keys.index_copy(2, at, keys), self.values.index_copy(2, at, values)
        return self.keys, self.values

    def length(self: Any, *_: Any) -> int:
        n: int = self.keys.shape[-2]
        return n

    return _layer(
        __init__=init,
        update=update,
        get_mask_sizes=lambda self, queries: (length(self), 0),
        get_seq_length=lambda self: self.place,
        get_max_length=length,
    )


def _layer(**methods: Any) -> type:
    """A class of transformers' for one layer, which is imported only with a model of theirs."""
    shared = {"lazy_initialization": lambda *_: None, "is_compileable": True, "is_sliding": False}
    return type("Layer", (_types().CacheLayerMixin,), methods | shared)
