"""Sample calls: what writes into a view."""

from __future__ import annotations

import torch

from tests.rules.making import call, sample

aten = torch.ops.aten

sample(
    aten.slice_scatter.default,
    lambda t: call(t.real(4, 12), t.real(4, 6), 1, 0, 12, 2),
    lambda t: call(t.real(12, 4), t.real(5, 4), 0, 1, 11, 2),
    lambda t: call(t.real(24, 4), t.real(12, 4), 0, 1, None, 2),
    lambda t: call(t.real(24, 4), t.real(12, 4), 0, 12, 24),
)
sample(
    aten.diagonal_scatter.default,
    lambda t: call(t.real(6, 12, 4), t.real(12, 4), 0, 0, 2),
    lambda t: call(t.real(6, 4), t.real(3), 1),
)
