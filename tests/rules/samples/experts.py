"""Sample calls: experts."""

from __future__ import annotations

from shardc.rules.core.user_ops import Arguments
from shardc.runtime import ops
from tests.rules.making import Tensors, call, sample

GATED = "a, b = halves(x); c = silu(a); mul(c, b)"
STRIPED = "a, b = stripes(x); c = sigmoid(a); d = add(b, 1); mul(c, d)"


def unequal(t: Tensors) -> Arguments:
    """Most tokens choose the first experts, one has no token, and some choices are dropped (-1)."""
    index = (t.index(6, 6, 2) * t.index(6, 6, 2)) // 6 - t.truth(6, 2).long() * t.truth(6, 2).long()
    return call(t.real(6, 3), index, t.real(6, 2), t.real(6, 2, 3), t.real(6, 3, 2), None, None, "relu(x)")


sample(ops.experts_keep, lambda t: call(t.index(6, 12, 2), 6, 3), lambda t: call(t.index(3, 12, 4, 2), 3, 2))
sample(
    ops.experts,
    lambda t: call(t.real(4, 3), t.index(6, 4, 2), t.real(4, 2), t.real(6, 8, 3), t.real(6, 3, 4), None, None, GATED),
    lambda t: call(
        t.real(6, 2),
        t.orders(4, 6, 3),
        t.real(6, 3),
        t.real(4, 2, 12),
        t.real(4, 6, 2),
        t.real(4, 12),
        t.real(4, 2),
        STRIPED,
        True,
    ),
    unequal,
)
