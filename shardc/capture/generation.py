"""A model as it generates (shardc.ir.generation): it is given a cache as transformers' models take one, so that it
decides itself what of each layer is kept, and masks its attention by it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from shardc.capture.batch_leaves import Leaves
from shardc.capture.loss import ValuesOf, tensors_in
from shardc.errors import ShardcError
from shardc.ir.generation import AT, IDS, LOGITS, PLACE, Decode, Prefill, State, Step, Whole
from shardc.ir.source import of_function
from shardc.torch_private import traced_node


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
        if isinstance(self.step, Whole):
            values = self._whole(batch[IDS], batch[AT])
        elif isinstance(self.step, Prefill):
            values = self._prefill(batch, self.step.length)
        else:
            values = self._decode(batch, self.step.states)
        return tuple(self._flat(values, ""))

    def _prefill(self, batch: dict[str, Any], length: int) -> dict[str, Tensor]:
        cache = _types().Cache(
            layer_class_to_replicate=functools.partial(_prompt_layer(), batch["attention_mask"], length)
        )
        values = {LOGITS: self._logits(batch, cache)[:, -1]}
        for i, layer in enumerate(cache.layers):
            for kind in ("keys", "values"):
                x = getattr(layer, kind)
                values[State(i, kind, tuple(x.shape), x.dtype).output] = x
        return values

    def _decode(self, batch: dict[str, Any], states: tuple[State, ...]) -> dict[str, Tensor]:
        place, held = batch.pop(PLACE), dict[int, dict[str, Tensor]]()
        for s in states:
            held.setdefault(s.layer, {})[s.kind] = getattr(self, s.buffer)
        cache = _types().Cache(layers=[_step_layer()(**held[i], place=place) for i in sorted(held)])
        logits = self._logits(batch, cache)
        for s in states:
            getattr(self, s.buffer).copy_(getattr(cache.layers[s.layer], s.kind))
        return {LOGITS: logits[:, -1]}

    def _logits(self, batch: dict[str, Any], cache: Any) -> Tensor:
        """[rows, positions, vocabulary]. Only the last position needs them, if the model can leave out others."""
        parameters = inspect.signature(self.model.forward).parameters
        given = {name: x for name, x in batch.items() if name in parameters}
        given |= {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        logits: Tensor = self.model(**given, **{_cache_argument(self.model): cache}, use_cache=True).logits
        return logits

    def _whole(self, ids: Tensor, at: Tensor) -> dict[str, Tensor]:
        output, (rows, length) = self.model(ids), ids.shape
        found = [x for x in tensors_in(output).values() if x.dim() == 3 and x.shape[:2] == (rows, length)]
        if not found:
            what = f"of ids [{rows}, {length}] the model gives no logits [{rows}, {length}, vocabulary]"
            fix = 'return logits of every position, as a tensor, .logits or "logits"'
            raise ShardcError(what, where=of_function(self.model.forward).line, fix=fix)
        logits = found[0]
        return {LOGITS: logits.gather(1, at[:, None, None].expand(rows, 1, logits.shape[-1]))[:, 0]}


def caches(module: nn.Module) -> dict[str, Tensor]:
    """The cache among the buffers of what is exported, by name; of other modules none."""
    return dict(module.named_buffers(recurse=False)) if isinstance(module, GenerationOf) else {}


def no_cache(model: nn.Module) -> str:
    """Why a model takes no cache of this kind; "" if it may."""
    if getattr(model, "config", None) is None or not _cache_argument(model):
        return f"{type(model).__name__} takes no cache of keys and values, as transformers' models do"
    return ""


def _cache_argument(model: nn.Module) -> str:
    """What forward calls it: transformers renames it in 5.24, model by model; "" if it takes none."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in taken), "")


def _types() -> Any:
    return importlib.import_module("transformers.cache_utils")


@functools.cache
def _prompt_layer() -> type:
    """A layer's cache before its first keys, which are all that its attention sees; it keeps room for more.

    Those of padding become zeros. Where a row of attention sees nothing, some models make nan of it, and 0 times nan is
    nan in all rows that do not see it.
    """

    def init(self: Any, mask: Tensor, length: int) -> None:
        self.padding, self.length, self.is_initialized = (mask == 0)[:, None, :, None], length, False

    def update(self: Any, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        room = (0, 0, 0, self.length - keys.shape[-2])
        keys, values = keys.masked_fill(self.padding, 0), values.masked_fill(self.padding, 0)
        self.keys, self.values, self.is_initialized = pad(keys, room), pad(values, room), True
        return keys, values

    return _layer(
        __init__=init,
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
