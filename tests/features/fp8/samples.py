"""Sample calls: rounding to float8.

A power of two more in a scale shows in small numbers alone, those that are few steps of float8's least. So gradients
are multiplied by weights' scales that differ widely, and some numbers of every granule are small beside its largest."""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.features.fp8 import ops
from shardc.rules.core.user_ops import Arguments
from tests.rules.making import Tensors, call, sample
from tests.rules.samples.experts import GATED, STRIPED


def _wide(t: Tensors, *shape: int) -> Tensor:
    return torch.exp(8 * t.real(*shape))


def with_amax(t: Tensors, x: Tensor, granule: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """x, and a number for each of its granules that none in it is above: torch 2.11 makes nan of what is, later
    versions the largest of float8."""
    amax = ops.fp8_amax(x, granule)
    return x, t.constant(amax * torch.exp(4 * t.real(*amax.shape).abs()))


sample(
    ops.fp8_amax,
    lambda t: call(t.real(4, 6, 12), (1, 1, 0)),
    lambda t: call(t.real(12, 24), (0, 0)),
    lambda t: call(t.real(4, 24), (1, 2)),
    lambda t: call(t.real(24, 12), (2, 0)),
)
sample(
    ops.fp8_round,
    lambda t: call(*with_amax(t, t.real(4, 6, 12), (1, 1, 0)), "e4m3", (1, 1, 0)),
    lambda t: call(t.real(12, 24), t.constant(100 * t.positive(1, 1)), "e5m2", (0, 0)),
    lambda t: call(*with_amax(t, t.real(4, 24), (1, 2)), "e4m3", (1, 2)),
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
    lambda t: call(t.real(4, 6, 24), *with_amax(t, t.real(12, 24), (1, 0)), "fp8-rowwise"),
    lambda t: call(t.real(12, 24), *with_amax(t, t.real(24, 12), (0, 1)), "fp8-rowwise", True),
    lambda t: call(t.real(12, 24), *with_amax(t, t.real(12, 24), (0, 0)), "fp8-tensorwise"),
    lambda t: call(t.real(2, 128), *with_amax(t, t.real(128, 128), (32, 32)), "mxfp8"),
)


def _experts(
    t: Tensors, x: Tensor, index: Tensor, activation: str, transposed: bool, up: Tensor, down: Tensor
) -> Arguments:
    granule = (1, 0, 1) if transposed else (1, 1, 0)
    (up, up_amax), (down, down_amax) = with_amax(t, up, granule), with_amax(t, down, granule)
    router = t.real(*index.shape)
    return call(x, index, router, up, down, None, None, activation, transposed, up_amax, down_amax)


sample(
    ops.fp8_experts,
    lambda t: _experts(t, t.real(4, 3), t.index(6, 4, 2), GATED, False, t.real(6, 8, 3), t.real(6, 3, 4)),
    lambda t: _experts(t, t.real(6, 2), t.orders(4, 6, 3), STRIPED, True, t.real(4, 2, 12), t.real(4, 6, 2)),
)
