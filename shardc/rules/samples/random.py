"""Sample calls: random ops and batch statistics."""

from __future__ import annotations

from shardc.rules.samples.make import RNG, call, sample
from shardc.runtime import ops

sample(
    ops.dropout,
    lambda t: call(t.real(4, 12), 0.5, RNG, 0),
    lambda t: call(t.real(2, 6, 12), 0.3, RNG, 3),
)
sample(ops.batch_stat, lambda t: call(t.real(12), t.real(12), RNG))
