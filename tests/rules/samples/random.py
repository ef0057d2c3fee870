"""Sample calls: random ops and batch statistics."""

from __future__ import annotations

import torch

from shardc.runtime import ops
from tests.rules.making import RNG, call, sample

sample(
    ops.dropout,
    lambda t: call(t.real(4, 12), 0.5, RNG, 0),
    lambda t: call(t.real(2, 6, 12), 0.3, RNG, 3),
)
sample(
    ops.random,
    lambda t: call("normal", (0.5, 2.0), [4, 12], torch.float64, RNG, 1),
    lambda t: call("uniform", (-1.0, 1.0), [2, 6, 12], torch.float32, RNG, 2),
    lambda t: call("integers", (-3, 9), [12, 4], torch.int64, RNG, 3),
    lambda t: call("exponential", (2.0,), [24], torch.float64, RNG, 4),
    lambda t: call("permutation", (), [12], torch.int64, RNG, 5),
)
sample(ops.batch_stat, lambda t: call(t.real(12), t.real(12), RNG))
