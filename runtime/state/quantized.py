"""Take quantised weights apart, which consist of tensors (torchao's int8, int4, NF4).

    q_proj.weight   Int8Tensor [128, 64]   ->   q_proj.weight:qdata  int8 [128, 64]
                                                q_proj.weight:scale  float32 [128, 1]

A copy of the model's modules has the inner tensors as parameters, which are not trained. Where forward reads the
weight, it is put together from them. So the tensor's code in a product becomes ordinary ops of the graph, and the
quantised data is stored, split, gathered and saved.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from shardc.errors import ShardcError

_copies: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
T = TypeVar("T")


def plain(model: T) -> T:
    """Return a model without tensors that consist of tensors: itself, or a copy that shares all others.

    The copy is the same one each time, as long as the model lives.
    Raises ShardcError if such a weight is trained, or consists of further ones.
    """
    if not isinstance(model, nn.Module) or not any(map(is_composite, _tensors(model))):
        return model
    with _lock:  # ranks may be threads
        if model not in _copies:
            _copies[model] = _with_inner_tensors(model)
        return _copies[model]  # type: ignore[return-value]


def plain_state(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state_dict to the names of the copy."""
    state: dict[str, Any] = {}
    for name, x in tensors.items():
        if isinstance(x, Tensor) and is_composite(x):
            state |= {f"{name}:{part}": value for part, value in _parts(name, x).items()}
        else:
            state[name] = x
    return state


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def is_composite(x: Tensor) -> bool:
    """Return whether a tensor is made of inner tensors, and is not a DTensor."""
    return hasattr(x, "__tensor_flatten__") and not type(x).__module__.startswith("torch.distributed")


def _with_inner_tensors(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model, {id(x): x for x in _tensors(model)})
    parts: dict[int, dict[str, nn.Parameter]] = {}  # by weight, which may be tied
    for path, module in [*copied.named_modules()]:
        tensors = {n: x for stored in (module._parameters, module._buffers) for n, x in stored.items() if x is not None}
        quantized = {n: x for n, x in tensors.items() if is_composite(x)}
        if not quantized:
            continue
        for name, x in quantized.items():
            fqn = f"{path}.{name}".lstrip(".")
            own_parts = parts.setdefault(id(x), _parts(fqn, x))
            module._parameters.pop(name, None)
            module._buffers.pop(name, None)
            for part, value in own_parts.items():
                module.register_parameter(f"{name}:{part}", value)
        kind = type(module)
        read = {name: property(_reading(name, x)) for name, x in quantized.items()}
        module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **read})
    return copied


def _parts(fqn: str, x: Any) -> dict[str, nn.Parameter]:
    kind = type(x).__name__
    if x.requires_grad:
        fix = "freeze it (requires_grad_(False)), and train adapters beside it"
        raise ShardcError(f"it is a {kind}, but it is trained: its numbers are quantised", where=fqn, fix=fix)
    tensors = dict(zip(x.__tensor_flatten__()[0], inner(x), strict=True))
    if any(map(is_composite, tensors.values())):
        raise ShardcError(f"it is a {kind} that consists of further such tensors", where=fqn, fix="quantise it once")
    return {part: nn.Parameter(value, requires_grad=False) for part, value in tensors.items()}


def inner(x: Any) -> list[Any]:
    """Return the inner tensors of a tensor, or the tensor alone."""
    if not isinstance(x, Tensor) or not is_composite(x):
        return [x]
    whole: Any = x
    return [getattr(x, part) for part in whole.__tensor_flatten__()[0]]


def from_inner_tensors(x: Any, parts: Sequence[Any]) -> Tensor:
    """Build a tensor like x from other inner tensors, in the order of x's own."""
    names, context = x.__tensor_flatten__()
    inner_tensors = dict(zip(names, parts, strict=True))
    result: Tensor = type(x).__tensor_unflatten__(inner_tensors, context, tuple(x.shape), x.stride())
    return result


def _reading(name: str, x: Any) -> Any:
    """Return the getter of a weight that is put together when it is read."""
    parts = [f"{name}:{part}" for part in x.__tensor_flatten__()[0]]

    def read(module: nn.Module) -> Tensor:
        return from_inner_tensors(x, [getattr(module, part) for part in parts])

    return read
