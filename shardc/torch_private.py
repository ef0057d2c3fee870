"""The one place that imports torch's private parts. tests/test_capture.py says what breaks when they move.

Everything else in shardc uses torch's public API. Add a name here with the reason why nothing public will do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload  # types of export's wrappers around regions of code, and of ops
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

__all__ = ["DATA_DEPENDENT", "FakeTensor", "HigherOrderOperator", "OpOverload", "fake_mode", "fake_tensor", "traced_node"]

#: What tracing raises where Python asks for a tensor's value (`if x.sum() > 0`) or a shape hangs on one (`nonzero`).
DATA_DEPENDENT: tuple[type[Exception], ...] = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)


def fake_mode() -> FakeTensorMode:
    """A mode whose tensors have shapes and dtypes but no storage. Real tensors that the model made for itself may mix in."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def fake_tensor(mode: FakeTensorMode, like: Tensor) -> Tensor:
    """A contiguous fake tensor of the shape and dtype of `like`; on the CPU where `like` is on the meta device.

    The CPU, because models make constants without naming a device, which would not mix with meta tensors.
    """
    device = torch.device("cpu") if like.device.type == "meta" else like.device
    with mode:
        return torch.empty(tuple(like.shape), dtype=like.dtype, device=device)


def traced_node(x: Tensor) -> fx.Node | None:
    """While a model is traced: the graph node that made `x`, if it is known."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot: Any = get_proxy_slot(x, mode.tracer, None)
    return slot.proxy.node if slot is not None else None
