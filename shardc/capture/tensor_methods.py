"""Methods of Tensor that tracing cannot follow, replaced by some that it can: on traced tensors, during capture."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.runtime.state.quantized import consists
from shardc.torch_private import FakeTensor

_DATA = Tensor.data
_FORMAT: Any = Tensor.__format__
_RANDOM, _TO = Tensor.random_, Tensor.to


@contextmanager
def traceable() -> Iterator[None]:
    """While open: `x.data` in the model is `x.detach()`, which tracing sees; formatted
    tensors print as what they are.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "data", property(_data, _set_data)))
        stack.enter_context(mock.patch.object(Tensor, "__format__", _format))
        stack.enter_context(mock.patch.object(Tensor, "random_", _random))
        stack.enter_context(mock.patch.object(Tensor, "to", _to))
        yield


def _by_user(x: Tensor) -> bool:
    return isinstance(x, FakeTensor) and source.is_models(sys._getframe(2).f_code.co_filename)


def _data(self: Tensor) -> Tensor:
    return self.detach() if _by_user(self) else _DATA.__get__(self)  # type: ignore[attr-defined]


def _set_data(self: Tensor, value: Tensor) -> None:
    if _by_user(self):
        place = source.of_call()
        raise ShardcError(
            f"the forward pass replaces a tensor's .data ({place.shown})",
            where=place.line,
            fix="change a buffer in place (self.x.copy_(new)); change parameters outside of forward",
        )
    _DATA.__set__(self, value)  # type: ignore[attr-defined]


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch aborts the process if a traced tensor is moved to a device that this machine does not have."""
    target = next((a for a in (*args[:1], kwargs.get("device")) if isinstance(a, (str, int, torch.device))), None)
    if isinstance(self, FakeTensor) and target is not None and not isinstance(target, bool):
        device = torch.device(target)
        if device.type not in (self.device.type, "cpu", "meta") and not torch.get_device_module(device).is_available():
            raise RuntimeError(f"Invalid device {device}: not linked with support for it")  # as .cuda() does
    if consists(self):  # torch would hand this function to the tensor's own, which knows torch's
        own: Any = type(self)
        made: Tensor = own.__torch_function__(_TO, (type(self),), (self, *args), kwargs)
        return made
    return _TO(self, *args, **kwargs)


def _format(self: Tensor, spec: str) -> str:
    """A traced tensor has no number to show: f"{loss:.3f}" in a message."""
    text: str = repr(self) if isinstance(self, FakeTensor) else _FORMAT(self, spec)
    return text


def _random(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`random_(low, high)`: the overload that torch traces it to has a name that Python cannot write ("from")."""
    limits = (*args, *(kwargs[k] for k in ("from", "to") if k in kwargs))
    if isinstance(self, FakeTensor) and limits and set(kwargs) <= {"from", "to"}:
        low, high = limits if len(limits) == 2 else (0, limits[0])
        return self.copy_(torch.randint(low, high, self.shape, dtype=self.dtype, device=self.device))
    return _RANDOM(self, *args, **kwargs)
