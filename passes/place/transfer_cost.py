"""What conversions between placements cost, in bytes that one rank sends."""

from __future__ import annotations

from shardc.ir.placement import Partial, PartialGrad, Placement, Shard
from shardc.ir.program import Value
from shardc.rules.registry import needs_sum_grad

# Touching memory weighs little: it only breaks ties.
TOUCH = 0.01
# Gathering a weight that an annotation splits would undo the annotation.
UNDO = 1000.0


def transfer(v: Value, old: Placement, new: Placement, n: int, nbytes: float) -> float:
    """Bytes that one rank sends for a conversion, forward and backward."""
    grad = needs_sum_grad(v)
    part = nbytes * (n - 1) / n
    if old == new:
        return 0.0
    match old, new:
        case Partial(), Shard():
            return part + part * grad
        case Partial(), PartialGrad():
            return 2 * part + 2 * part * grad
        case Partial(), _:
            return 2 * part
        case Shard(), Shard():
            return (part + part * grad) / n
        case Shard(), PartialGrad():
            return part + part * grad
        case Shard(), Partial():  # moves nothing, but takes its whole size from here on and has to be summed later
            return 3 * part
        case Shard(), _:
            return part
        case _, PartialGrad():
            return 2 * part * grad
        case PartialGrad(), _:
            return 0.0
        case _, Shard():
            return part * grad
        case _:
            return 0.0
