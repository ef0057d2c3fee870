"""What placement on one axis compares: seconds of sending, of repeated work, of touching memory, on the machine that
passes assume (shardc.machine.assumed).

They are counted in bytes: one is the time in which a rank of the axis sends a byte of what it gathers. So equal ways
have equal prices, whatever links an axis has. Sums, exchanges and work are as much dearer or cheaper as they take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from shardc.ir.conversions import COLLECTIVES, between
from shardc.ir.metadata import Value
from shardc.ir.placement import Placement
from shardc.machine.assumed import byte_seconds, work_seconds
from shardc.rules.core.strategy import needs_sum_grad

# Touching memory weighs little, a twelfth of what it takes: it only breaks ties.
TOUCH = 0.08
# Bytes that a message counts for besides its own, where ways to run many ops are compared. A link sends 1.35 MB while
# one begins; so little, that small models are placed as large ones are.
MESSAGE = 2048.0
# A value that is gathered whole is held by every rank, and so is what is made of it there.
REPEATED = 2.0
# Gathering a weight that an annotation splits would undo the annotation.
UNDO = 1000.0


@dataclass(frozen=True)
class Prices:
    """Of one axis. each: by collective, of a byte of the whole tensor; byte: seconds of the unit."""

    each: Mapping[str, float]
    byte: float

    @staticmethod
    @lru_cache
    def among(ranks: tuple[int, ...]) -> Prices:
        n = len(ranks)
        byte = byte_seconds("all_gather", ranks) * n / (n - 1)
        each = {kind: byte_seconds(kind, ranks) / byte for kind in COLLECTIVES}
        return Prices(each | {"all_to_all": each["all_to_all"] / n}, byte)  # of its own part

    def transfer(self, v: Value, old: Placement, new: Placement, nbytes: float, packed: float = 1.0) -> float:
        """Of a conversion, forward and backward: the sum of its rows in the table. packed: see `Conversion.price`."""
        if old == new:
            return 0.0
        gradient = needs_sum_grad(v)
        rows = between(type(old), type(new))
        return nbytes * sum(row.price(self.each, gradient=gradient, packed=packed) for row in rows)

    def work(self, flops: float, touched: float) -> float:
        """Of an op's products, and of the bytes that it touches."""
        return (work_seconds(flops, 0.0) + TOUCH * work_seconds(0.0, touched)) / self.byte
