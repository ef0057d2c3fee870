"""Tensors without data (torch's FakeTensor): what models are traced on, and a step's memory is counted with."""

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
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import (
    _disable_current_modes,  # what sees every op; tensors of tensors, such as a DTensor
)

#: What tracing raises where Python asks for a tensor's value (`if x.sum() > 0`) or a shape hangs on one (`nonzero`).
DATA_DEPENDENT: tuple[type[Exception], ...] = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """of_gpu: its tensors stand for those of a GPU with torch's kernels, wherever they say they are. attributes: what
    Python keeps of one that has only just been made, by its device.
    """

    of_gpu = False
    attributes: dict[torch.device, dict[str, Any]]


def fake_mode(*, of_gpu: bool = False, symbols: bool = True) -> FakeTensorMode:
    """A mode whose tensors have shapes and dtypes but no storage. Real tensors that the model made for itself may mix
    in. of_gpu: they stand for those of a GPU. symbols: a size that hangs on data has a name; else it is an error.
    """
    mode = _FakeMode(shape_env=ShapeEnv() if symbols else None, allow_non_fake_inputs=True)
    mode.of_gpu, mode.attributes = of_gpu, {}
    return mode


def fake_mode_on() -> FakeTensorMode:
    """The mode whose tensors have no data that is on: also inside of another mode's dispatch."""
    found = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    assert isinstance(found, FakeTensorMode)
    return found


def stands_for_gpu(x: Tensor) -> bool:
    """Whether a tensor without data stands for one on a GPU."""
    return isinstance(x, FakeTensor) and getattr(x.fake_mode, "of_gpu", False)


def no_modes() -> AbstractContextManager[Any]:
    """Tensors that are made in here have data, whatever modes are on."""
    found: AbstractContextManager[Any] = _disable_current_modes()
    return found


def fake_tensor(mode: FakeTensorMode, like: Tensor) -> Tensor:
    """A contiguous fake tensor of the shape and dtype of `like`, or a fake parameter; on the CPU where `like` is on the
    meta device.

    The CPU, because models make constants without naming a device, which would not mix with meta tensors.
    """
    device = torch.device("cpu") if like.device.type == "meta" else like.device
    param = isinstance(like, torch.nn.Parameter)
    empty = torch.empty(tuple(like.shape), dtype=like.dtype, device="meta", requires_grad=param and like.requires_grad)
    fake = FakeTensor(mode, empty, device)  # `with mode: torch.empty(...)` and nn.Parameter take ten times as long
    if param:
        fake._is_param = True  # what nn.Parameter does to tensors of other classes
    return fake


def fake_device(x: Tensor) -> torch.device:
    """The device that a fake tensor says it is on. `x.device` says the same, but is dispatched like an op."""
    assert isinstance(x, FakeTensor)
    return x.fake_device


def fake_mode_of(x: Tensor) -> FakeTensorMode:
    """The mode that a fake tensor is of."""
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
    """A new fake tensor of a mode, made inside of a mode's dispatch. view: (the tensor that it is a view of, its place
    in that one's storage).

    As torch makes one, but what its class sets attribute by attribute is copied from the first of its kind: a dry run
    makes one for every op, and that took four times as long.
    """
    with torch._C._DisableTorchDispatch():
        made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        if view is not None:
            made.set_(view[0].untyped_storage(), view[1], shape, strides)
    known = mode.attributes.get(device) if isinstance(mode, _FakeMode) else None
    if known is None:
        first = FakeTensor(mode, made, device)
        if isinstance(mode, _FakeMode):
            mode.attributes[device] = {name: x for name, x in vars(first).items() if name != "fake_mode"}
        return first
    found = Tensor._make_subclass(FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(found)
    vars(found).update(known, fake_mode=mode)
    return found
