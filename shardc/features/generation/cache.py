"""Give a model's own cache a fixed size: the object that transformers generates with.

Its keys and values have a fixed number of places, as do any other tensors in it. The parts of a cache that change from
token to token are found by inspection: all tensors in it are states; the rest (which layers have begun, sizes) is its
form, which must not change.

    prompts   cache = new_cache(model, ...); model(..., cache)       states, form = split_cache(cache)
    a token   cache = join_cache(form, states); model(..., cache)  states = checked_states(form, cache)
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from shardc.errors import ShardcError
from shardc.features.generation.program import Form

#: The attribute of caches and their layers with the current position: no state.
_NOW = "now"
_PLAIN = (int, float, bool, str, type(None))


@dataclass
class Now:
    """The current position of a cache's layers.

    length: places of a layer that keeps everything; padding: for prompts, bool [rows, places], True for padding; place:
    of a token, i64[]; None if kept entries move up by one for each token, which is written to the last place.
    """

    length: int
    padding: Tensor | None = None
    place: Tensor | None = None
    moves: bool = False


class _Slot:
    """A placeholder for one tensor in the form of a cache."""


def new_cache(model: nn.Module, now: Now) -> Any:
    """Make the cache that the model begins to generate with."""
    types = importlib.import_module("transformers.cache_utils")
    config: Any = model.config
    cache = types.DynamicCache(config=config.get_text_config(decoder=True))
    for layer in cache.layers:
        if isinstance(layer, types.CacheLayerMixin):
            window = layer.sliding_window if layer.is_sliding else now.length
            kind: Any = type(layer)
            layer.now, layer.room, layer.__class__ = now, min(window, now.length), _fixed(kind)
            for name in [n for n, x in vars(layer).items() if isinstance(x, Tensor)]:
                delattr(layer, name)  # copies of its window, for methods that are replaced: no state
    if config.is_encoder_decoder:
        once = [_encoder_layer()() for _ in cache.layers]
        cache = types.EncoderDecoderCache(cache, types.Cache(layers=once))
    cache.now = now
    return cache


@functools.cache
def _encoder_layer() -> type:
    """Make the class of a layer with an encoder's keys and values, which are written only once."""

    def update(self: Any, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values, self.is_initialized = keys, values, True
        return keys, values

    kind = importlib.import_module("transformers.cache_utils").DynamicLayer
    return type("EncoderLayer", (kind,), {"update": update})


def split_cache(cache: Any) -> tuple[dict[str, Tensor], Form]:
    """Split a cache into its states, by path, and its form."""
    states = {path: x for path, x in _leaves(cache) if isinstance(x, Tensor)}
    slots: dict[str, object] = {path: _Slot() for path in (*states, _NOW)}
    memo = {id(x): slots[path] for path, x in (*states.items(), (_NOW, cache.now))}
    return states, Form(copy.deepcopy(cache, memo), slots)  # deepcopy uses these as copies that already exist


def join_cache(form: Form, states: Mapping[str, Tensor], now: Now) -> Any:
    """Build a cache of this form with these states."""
    values = {**states, _NOW: now}
    return copy.deepcopy(form.cache, {id(slot): values[path] for path, slot in form.slots.items()})


def checked_states(form: Form, cache: Any) -> dict[str, Tensor]:
    """Return the states in a cache after a token. Raises ShardcError if it changed anything else."""
    before, after = dict(_leaves(form.cache)), dict(_leaves(cache))
    states = {path: x for path, x in after.items() if isinstance(x, Tensor)}
    for path in {**before, **after}:
        one, other = before.get(path), after.get(path)
        if path not in form.slots and (one != other or type(one) is not type(other)):
            shown = f"a tensor {list(other.shape)}" if isinstance(other, Tensor) else repr(other)
            fault = f"a token changes what {path!r} of its cache is, from {one!r} to {shown}"
            raise ShardcError(fault, where="generate")
    return states


def _leaves(x: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield tensors, their slots and plain values in a cache, by path; each object once."""
    yield from _walk(x, path, set())


def _walk(x: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(x, (Tensor, _Slot)):
        if id(x) not in seen:
            seen.add(id(x))
            yield path, x
        return
    if isinstance(x, _PLAIN):
        yield path, x
        return
    if isinstance(x, Mapping):
        items = list(x.items())
    elif isinstance(x, (list, tuple)):
        items = list(enumerate(x))
    elif _is_cache(x) and id(x) not in seen:
        seen.add(id(x))
        items = [(name, inner) for name, inner in vars(x).items() if name != _NOW]
    else:
        return
    for name, inner in items:
        yield from _walk(inner, path if name == "layers" else f"{path}.{name}".lstrip("."), seen)


def _is_cache(x: Any) -> bool:
    """Return whether it is a cache or a cache layer: other objects, such as configs, have no states."""
    return any(c.__module__ == "transformers.cache_utils" for c in type(x).__mro__)


@functools.cache
def _fixed(kind: type) -> type:
    """Make a subclass of a transformers cache layer whose keys and values have `room` places.

    Attention does not depend on their order: with fewer places than tokens, a token replaces the one that leaves its
    window. Before tokens come the prompts, and their attention sees only them. Keys and values of padding become zeros:
    if a row of attention sees nothing, some models make nan of it, and 0 times nan is nan in all rows that do not see
    it.
    """

    def update(self: Any, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        now: Now = self.now
        if now.padding is None:
            self.keys, self.values = (_written(self, *x) for x in ((self.keys, keys), (self.values, values)))
            return self.keys, self.values
        keys, values = (x.masked_fill(now.padding[:, None, :, None], 0) for x in (keys, values))
        self.keys, self.values = (_write_entries(x, self.room, now.moves) for x in (keys, values))
        self.is_initialized = True
        return keys, values

    def sizes(self: Any, queries: int) -> tuple[int, Any]:
        """Return the number of keys, and each key's position minus its index."""
        now: Now = self.now
        if now.padding is not None:
            return queries, 0
        if now.place is None:
            return self.room, now.length - self.room
        return self.room, _offsets(now.place, self.room) if self.room < now.length else 0

    def seen(self: Any) -> Any:
        now: Now = self.now
        before = now.length - 1 if now.place is None else now.place
        return before if now.padding is None else 0

    methods = {
        "update": update,
        "lazy_initialization": functools.partialmethod(_lazily, kind),
        "get_mask_sizes": sizes,
        "get_seq_length": seen,
        "get_max_length": lambda self: self.room if self.now.padding is None else -1,
        "is_compileable": True,
    }
    return type(kind.__name__, (kind,), methods)


def _lazily(self: Any, kind: type, *args: Any, **kwargs: Any) -> None:
    """Make states other than keys and values, before a layer's first use."""
    if kwargs:
        kind.lazy_initialization(self, **kwargs)  # type: ignore[attr-defined]


def _written(layer: Any, kept: Tensor, new: Tensor) -> Tensor:
    """Add a token to the kept entries: [rows, heads, room, size]."""
    place = layer.now.place
    if place is None:
        return torch.cat([kept[:, :, 1:], new], 2)
    at = place.reshape(1)
    return kept.index_copy(2, at % layer.room if layer.room < layer.now.length else at, new)


def _write_entries(x: Tensor, room: int, moves: bool) -> Tensor:
    """Write the last entries of prompts, [rows, heads, places, size], to a layer's `room` places."""
    length = x.shape[2]
    if length <= room:
        return pad(x, (0, 0, room - length, 0) if moves else (0, 0, 0, room - length))
    last, turn = x[:, :, length - room :], 0 if moves else length % room
    return torch.cat([last[:, :, room - turn :], last[:, :, : room - turn]], 2) if turn else last


def _offsets(place: Tensor, room: int) -> Tensor:
    """Return i64[room]: position minus index of each place's entry, after a token is written at `place`.

    An empty place has a position that is still to come, which a token does not see.
    """
    at = torch.arange(room, device=place.device)
    return torch.where(at > place, 0, place - at - (place - at) % room)
