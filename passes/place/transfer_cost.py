"""Price what placement on one axis compares: communication, repeated work and memory traffic.

Prices are for the machine that passes assume (shardc.machine.assumed). The unit is a byte: the time in which a rank of
the axis sends a byte of a gather. So equal choices have equal prices, no matter what links an axis has. Sums, exchanges
and work cost more or less according to their time.
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

# Memory traffic counts for a twelfth of its time: it only breaks ties.
TOUCH = 0.08
# Extra bytes per message, for comparing ways to run many ops. A link sends 1.35 MB during
# one start-up; the value is small, so that small models are placed like large ones.
MESSAGE = 2048.0
# Every rank holds a value that is gathered whole, and the results that it computes from it.
REPEATED = 2.0
# Gathering a weight that an annotation splits would undo the annotation.
UNDO = 1000.0


@dataclass(frozen=True)
class Prices:
    """Prices on one axis. each: by collective, of one byte of the whole tensor. byte: seconds of the unit."""

    each: Mapping[str, float]
    byte: float

    @staticmethod
    @lru_cache
    def among(ranks: tuple[int, ...]) -> Prices:
        n = len(ranks)
        byte = byte_seconds("all_gather", ranks) * n / (n - 1)
        by_kind = {kind: byte_seconds(kind, ranks) / byte for kind in COLLECTIVES}
        return Prices(by_kind | {"all_to_all": by_kind["all_to_all"] / n}, byte)  # of a rank's own part

    def transfer(self, v: Value, old: Placement, new: Placement, nbytes: float, packed: float = 1.0) -> float:
        """Return the price of a conversion, forward and backward. packed: see `Conversion.price`."""
        if old == new:
            return 0.0
        gradient = needs_sum_grad(v)
        rows = between(type(old), type(new))
        return nbytes * sum(row.price(self.each, gradient=gradient, packed=packed) for row in rows)

    def work(self, flops: float, touched: float) -> float:
        """Return the price of an op's products and of the bytes that it touches."""
        return (work_seconds(flops, 0.0) + TOUCH * work_seconds(0.0, touched)) / self.byte
