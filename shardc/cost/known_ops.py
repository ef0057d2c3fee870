"""Remember results of ops on tensors without data, for later calls on operands of the same sizes.

A dry run calls an op of a layer once for each layer, microbatch and step. torch's fake mode computes shapes, or finds
them in its own table, in 0.1 ms; an entry here takes a fifth of that.

    mm(f32[8, 16], f32[16, 4])     first time: the fake mode runs it. Remembered: a new f32[8, 4]
    view(f32[8, 4], [32])          remembered: a view f32[32] of the first tensor
    add_(f32[8, 4], f32[8, 4])     remembered: its first tensor
    zeros([8, 4])                  remembered: a new f32[8, 4]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardc.torch_private import FakeTensor, FakeTensorMode, fake_mode_of, fake_mode_on, fake_result

#: Makes an output of a call from its tensors.
_Make = Callable[[Sequence[Tensor], FakeTensorMode], Tensor | None]
#: Tags of ops whose results depend on values, or that change the sizes of their operands.
_UNKNOWN = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view)
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, complex)


class Known(NamedTuple):
    """How a call's result is made. several: the type of several outputs; more: any other value that is stored with it.

    view: the op only makes views.
    """

    several: type | None
    makers: list[_Make]
    more: Any
    view: bool

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Make the result of a call from its tensors."""
        mode = fake_mode_of(tensors[0]) if tensors else fake_mode_on()
        results = [make(tensors, mode) for make in self.makers]
        return results[0] if self.several is None else self.several(results)


class KnownOps:
    """A table of results. key() of a call, then known.get(), which is None for an unknown call.

    remember() adds a result for the next call.
    """

    def __init__(self) -> None:
        self.known: dict[Any, Known] = {}
        self._cacheable: dict[int, bool] = {}  # by the number of an op

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[Tensor]] | None:
        """Return (a value that is equal for calls with equal results, the call's tensors); None for others."""
        number = id(func)  # an op's own hash is Python code
        if (cacheable := self._cacheable.get(number)) is None:
            cacheable = self._cacheable[number] = _cacheable(func)
        if not cacheable:
            return None
        parts: list[Any] = [number]
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

    def remember(self, func: Any, key: Any, tensors: Sequence[Tensor], result: Any, more: Any) -> None:
        """Store the result of a call, if calls on operands of the same sizes have the same result."""
        several = type(result) if isinstance(result, (tuple, list)) else None
        makers = [_maker(x, tensors) for x in ((result,) if several is None else result)]
        if several in (None, tuple, list) and all(makers):
            self.known[key] = Known(several, [m for m in makers if m is not None], more, func.is_view)


def _cacheable(func: Any) -> bool:
    builtin = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"
    return builtin and not any(tag in func.tags for tag in _UNKNOWN)


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


def _maker(x: Any, tensors: Sequence[Tensor]) -> _Make | None:
    """Return how an output is made from the tensors of a call; None if other calls may have another one."""
    if x is None:
        return lambda tensors, mode: None
    if not isinstance(x, FakeTensor) or x.constant is not None or x.layout is not torch.strided:
        return None
    for i, operand in enumerate(tensors):
        if x is operand:
            return lambda tensors, mode, i=i: tensors[i]  # type: ignore[misc]
    if x.is_conj() or x.is_neg():
        return None
    shape, strides, offset = tuple(map(int, x.shape)), tuple(map(int, x.stride())), int(x.storage_offset())
    dtype, device, storage = x.dtype, x.fake_device, x.untyped_storage()
    for i, operand in enumerate(tensors):
        if operand.untyped_storage()._cdata == storage._cdata:
            return lambda tensors, mode, i=i: fake_result(  # type: ignore[misc]
                shape, strides, dtype, device, mode, (tensors[i], offset)
            )
    fresh = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    if offset or fresh.untyped_storage().nbytes() != storage.nbytes():
        return None
    return lambda tensors, mode: fake_result(shape, strides, dtype, device, mode)
