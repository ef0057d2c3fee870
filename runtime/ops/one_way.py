"""Run single directions of ops that communicate, at once or started, for backward graphs.

The ops are conversions between placements, and the exchanges of experts (shardc.passes.joint):

    sum = ops.transpose_start('sum_grad', g, mesh, ('tp',))        starts the backward of ops.sum_grad
    rows = ops.start('experts_send', x, order, counts, ...)        starts ops.experts_send
    dx = ops.wait(sum)                                             the result, when it is ready
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardc.runtime.ops import convert
from shardc.runtime.ops.convert import Started
from shardc.runtime.ops.experts.parallel import (
    experts_return_start,
    experts_return_transposed,
    experts_return_transposed_start,
    experts_send_start,
    experts_send_transposed,
    experts_send_transposed_start,
)

_STARTED: dict[str, Callable[..., Any]] = {
    **convert.FORWARD_STARTED,
    "experts_send": experts_send_start,
    "experts_return": experts_return_start,
}
_TRANSPOSED: dict[str, Callable[..., Any]] = {
    **convert.TRANSPOSED,
    "experts_send": experts_send_transposed,
    "experts_return": experts_return_transposed,
}
_TRANSPOSE_STARTED: dict[str, Callable[..., Any]] = {
    **convert.TRANSPOSE_STARTED,
    "experts_send": experts_send_transposed_start,
    "experts_return": experts_return_transposed_start,
}


def transpose(op: str, g: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run the backward of a linear op that communicates. g: its result's gradient; the rest as in forward."""
    result: Tensor = _TRANSPOSED[op](g, *args, **kwargs)
    return result


def transpose_start(op: str, g: Tensor, *args: Any, **kwargs: Any) -> Started:
    """Start the backward of an op whose backward communicates."""
    result: Started = _TRANSPOSE_STARTED[op](g, *args, **kwargs)
    return result


def start(op: str, x: Tensor, *args: Any, **kwargs: Any) -> Started:
    """Start an op that communicates. op: its name; the rest: its own arguments."""
    result: Started = _STARTED[op](x, *args, **kwargs)
    return result


def wait(started: Started) -> Tensor:
    """Wait for a started op, and return its result."""
    started.work.wait()
    return started.result()
