"""Make tensors without data (torch's FakeTensor), to trace models and to count a step's memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # turns off all modes
)

SIZE_DEPENDENT: type[Exception] = DynamicOutputShapeException


def data_dependent() -> tuple[type[Exception], ...]:
    """Return the errors of tracing when Python reads a tensor's value or a shape depends on one (`nonzero`)."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # here: it imports sympy

    return GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException


class NotCompiledMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which nothing is compiled: torch need not turn its compiler off in each call, which takes as long."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode of fake tensors. of_gpu: they represent a GPU's; attributes: those of a new one, by device."""

    of_gpu = False
    attributes: dict[torch.device, dict[str, Any]]


def fake_mode(*, of_gpu: bool = False, remembers: bool = True) -> FakeTensorMode:
    """Return a mode whose tensors have no storage. of_gpu: they represent tensors of a GPU.

    remembers: it keeps results of ops, which takes as long as to compute one. The model's own real tensors may mix in.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = _FakeMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    mode.of_gpu, mode.attributes = of_gpu, {}
    mode.cache_enabled = mode.cache_enabled and remembers
    return mode


def fake_mode_on() -> FakeTensorMode:
    """Return the active fake tensor mode, also within another mode's dispatch."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    assert isinstance(mode, FakeTensorMode)
    return mode


def stands_for_gpu(x: Tensor) -> bool:
    """Return whether a fake tensor represents a tensor of a GPU."""
    return isinstance(x, FakeTensor) and getattr(x.fake_mode, "of_gpu", False)


def no_modes() -> AbstractContextManager[Any]:
    """Return a context in which new tensors have data, in spite of active modes."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def fake_tensor(mode: FakeTensorMode, like: Tensor) -> Tensor:
    """Return a contiguous fake tensor, or fake parameter, with the shape and dtype of `like`.

    It is on the CPU if `like` is on the meta device: models make constants without a device, which would not mix with
    meta tensors.
    """
    device = torch.device("cpu") if like.device.type == "meta" else like.device
    param = isinstance(like, torch.nn.Parameter)
    empty = torch.empty(tuple(like.shape), dtype=like.dtype, device="meta", requires_grad=param and like.requires_grad)
    fake = FakeTensor(mode, empty, device)  # `with mode: torch.empty(...)` and nn.Parameter take ten times as long
    if param:
        fake._is_param = True  # as nn.Parameter does for tensors of other classes
    return fake


def fake_device(x: Tensor) -> torch.device:
    """Return the device of a fake tensor. `x.device` returns the same, but is dispatched like an op."""
    assert isinstance(x, FakeTensor)
    return x.fake_device


def fake_mode_of(x: Tensor) -> FakeTensorMode:
    """Return the mode of a fake tensor."""
    assert isinstance(x, FakeTensor)
    return x.fake_mode


def fake_result(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    mode: FakeTensorMode,
    view: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Return a new fake tensor, made within a mode's dispatch. view: (its base, its offset in storage).

    The attributes that torch's class sets one by one are copied from the first tensor of the same device: a dry run
    makes a tensor for every op, and that took four times as long.
    """
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        if view is not None:
            meta.set_(view[0].untyped_storage(), view[1], shape, strides)
    known = mode.attributes.get(device) if isinstance(mode, _FakeMode) else None
    if known is None:
        first = FakeTensor(mode, meta, device)
        if isinstance(mode, _FakeMode):
            mode.attributes[device] = {name: x for name, x in vars(first).items() if name != "fake_mode"}
        return first
    fake = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(known, fake_mode=mode)
    return fake
