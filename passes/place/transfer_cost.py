"""What conversions between placements cost, in bytes that one rank sends.

Bytes, not seconds: placement compares ways to run one op on one axis, before it is known which device runs the program.
What a collective takes on a device, with its latency and links: shardc.cost.collective_seconds."""

from __future__ import annotations

from shardc.ir.conversions import between
from shardc.ir.metadata import Value
from shardc.ir.placement import Placement
from shardc.rules.strategy import needs_sum_grad

# Touching memory weighs little: it only breaks ties.
TOUCH = 0.01
# Bytes that a message counts for besides its own, where ways to run many ops are compared. The assumed machine's link
# sends 1.35 MB while one begins (shardc.ir.assumed_machine); so little, that small models are placed as large ones are.
MESSAGE = 2048.0
# A value that is gathered whole is held by every rank, and so is what is made of it there.
REPEATED = 2.0
# Gathering a weight that an annotation splits would undo the annotation.
UNDO = 1000.0


def transfer(v: Value, old: Placement, new: Placement, n: int, nbytes: float, packed: float = 1.0) -> float:
    """Bytes that one rank sends for a conversion, forward and backward: the sum of its rows in the table. packed: see
    `Conversion.price`.
    """
    if old == new:
        return 0.0
    gradient = needs_sum_grad(v)
    return sum(row.price(nbytes, n, gradient=gradient, packed=packed) for row in between(type(old), type(new)))
