"""Remember results of ops on tensors without data, for later calls on operands of the same sizes.

A dry run calls an op of a layer once for each layer, microbatch and step. torch's fake mode computes shapes, or finds
them in its own table, in 0.1 ms; an entry here takes a fifth of that.

    mm(f32[8, 16], f32[16, 4])     first time: the fake mode runs it. Remembered: a new f32[8, 4]
    view(f32[8, 4], [32])          remembered: a view f32[32] of the first tensor
    add_(f32[8, 4], f32[8, 4])     remembered: its first tensor
    zeros([8, 4])                  remembered: a new f32[8, 4]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.torch_private import FakeTensor, FakeTensorMode, fake_mode_of, fake_mode_on, fake_result

#: An output: ("new" | "view", index of the viewed tensor, shape, strides, dtype, storage offset, device), ("same",
#: index of the tensor that it is), or ("none",).
_Output = tuple[Any, ...]
#: Tags of ops whose results depend on values, or that change the sizes of their operands.
_UNKNOWN = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view)
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, complex)


class KnownOps:
    """A table of results. key() of a call, then result(), which is None for an unknown call.

    remember() adds a result for the next call. `more` is any other value to store with a call.
    """

    def __init__(self) -> None:
        self._of: dict[Any, tuple[type | None, tuple[_Output, ...], Any]] = {}
        self._fit: dict[Any, bool] = {}

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[Tensor]] | None:
        """Return (a value that is equal for calls with equal results, the call's tensors); None for others."""
        fit = self._fit.get(func)
        if fit is None:
            builtin = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"
            fit = self._fit[func] = builtin and not any(tag in func.tags for tag in _UNKNOWN)
        if not fit:
            return None
        parts: list[Any] = [func]
        tensors: list[Tensor] = []
        if not _collect(args, parts, tensors):
            return None
        for name, value in kwargs.items():
            parts.append(name)
            if not _collect((value,), parts, tensors):
                return None
        if not tensors:  # a factory op without a dtype uses the default one
            parts.append(torch.get_default_dtype())
        return tuple(parts), tensors

    def result(self, key: Any, tensors: Sequence[Tensor]) -> tuple[Any, Any] | None:
        """Return (the result, `more`) of a known call; None for an unknown one."""
        if (known := self._of.get(key)) is None:
            return None
        several, outputs, more = known
        mode = fake_mode_of(tensors[0]) if tensors else fake_mode_on()
        results = [_made(output, tensors, mode) for output in outputs]
        return (results[0] if several is None else several(results)), more

    def remember(self, key: Any, tensors: Sequence[Tensor], result: Any, more: Any) -> None:
        """Store the result of a call, if calls on operands of the same sizes have the same result."""
        several = type(result) if isinstance(result, (tuple, list)) else None
        outputs = [_recipe(x, tensors) for x in ((result,) if several is None else result)]
        if None not in outputs and several in (None, tuple, list):
            self._of[key] = several, tuple(outputs), more  # type: ignore[arg-type]  # none of them is None


def _collect(values: Sequence[Any], parts: list[Any], tensors: list[Tensor]) -> bool:
    """Add to `parts` everything that decides a result; return False if a value cannot be described."""
    for x in values:
        if isinstance(x, FakeTensor):
            if x.constant is not None or x.layout is not torch.strided:
                return False
            tensors.append(x)
            parts += (x.shape, x.stride(), x.dtype, x.storage_offset(), x.fake_device)
            if not x.is_contiguous():  # its traffic depends on its bytes in memory
                parts.append(x.untyped_storage().nbytes())
        elif isinstance(x, (list, tuple)):
            parts.append(len(x))
            if not _collect(x, parts, tensors):
                return False
        elif isinstance(x, _PLAIN):
            parts += (type(x), x)
        else:
            return False
    return True


def _recipe(x: Any, tensors: Sequence[Tensor]) -> _Output | None:
    if x is None:
        return ("none",)
    if not isinstance(x, FakeTensor) or x.constant is not None or x.layout is not torch.strided:
        return None
    for i, operand in enumerate(tensors):
        if x is operand:
            return ("same", i)
    if x.is_conj() or x.is_neg():
        return None
    storage = x.untyped_storage()
    meta = tuple(map(int, x.shape)), tuple(map(int, x.stride())), x.dtype, int(x.storage_offset()), x.fake_device
    for i, operand in enumerate(tensors):
        if operand.untyped_storage()._cdata == storage._cdata:
            return ("view", i, *meta)
    fresh = torch.empty_strided(meta[0], meta[1], dtype=x.dtype, device="meta")
    if meta[3] or fresh.untyped_storage().nbytes() != storage.nbytes():
        return None
    return ("new", -1, *meta)


def _made(output: _Output, tensors: Sequence[Tensor], mode: FakeTensorMode) -> Tensor | None:
    if output[0] == "none":
        return None
    if output[0] == "same":
        return tensors[output[1]]
    _, operand, shape, strides, dtype, place, device = output
    return fake_result(shape, strides, dtype, device, mode, (tensors[operand], place) if operand >= 0 else None)
