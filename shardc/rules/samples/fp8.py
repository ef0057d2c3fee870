"""Sample calls: rounding to float8.

A power of two more in a scale shows in small numbers alone, those that are few steps of float8's least. So gradients
are multiplied by weights' scales that differ widely, and some numbers of every granule are small beside its largest."""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.rules.samples.make import Tensors, call, sample
from shardc.runtime import ops


def _wide(t: Tensors, *shape: int) -> Tensor:
    return torch.exp(8 * t.real(*shape))


sample(
    ops.fp8_amax,
    lambda t: call(t.real(4, 6, 12), (1, 1, 0)),
    lambda t: call(t.real(12, 24), (0, 0)),
    lambda t: call(t.real(4, 24), (1, 2)),
    lambda t: call(t.real(24, 12), (2, 0)),
)
sample(
    ops.fp8_round,
    lambda t: call(t.real(4, 6, 12), t.constant(_wide(t, 4, 6, 1).clamp(1)), "e4m3", (1, 1, 0)),
    lambda t: call(t.real(12, 24), t.constant(100 * t.positive(1, 1)), "e5m2", (0, 0)),
    lambda t: call(t.real(4, 24), t.constant(_wide(t, 4, 12).clamp(1)), "e4m3", (1, 2)),
)
sample(
    ops.fp8_grad,
    lambda t: call(t.real(4, 6, 12), t.constant(_wide(t, 12, 1)), "e4m3", (1, 1, 0)),
    lambda t: call(t.real(12, 24), t.constant(_wide(t, 1, 24)), "e5m2", (0, 0)),
    lambda t: call(t.real(12, 24), None, "e5m2", (1, 0)),
    lambda t: call(t.real(4, 24), t.constant(_wide(t, 24, 1)), "e4m3", (1, 4)),
)
sample(
    ops.fp8_linear,
    lambda t: call(t.real(4, 6, 24), t.real(12, 24), t.constant(_wide(t, 12, 1)), "fp8-rowwise"),
    lambda t: call(t.real(12, 24), t.real(24, 12), t.constant(_wide(t, 1, 12)), "fp8-rowwise", True),
    lambda t: call(t.real(12, 24), t.real(12, 24), t.constant(_wide(t, 1, 1)), "fp8-tensorwise"),
    lambda t: call(t.real(2, 128), t.real(128, 128), t.constant(_wide(t, 4, 4)), "mxfp8"),
)
