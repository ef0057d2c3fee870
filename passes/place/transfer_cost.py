"""Price what placement on one axis compares: communication, repeated work and memory traffic.

Prices are times on the machine that passes assume (shardc.machine.assumed). The unit is the time in which a rank of the
axis sends one byte in an all_gather: on slow links repeated work is cheaper. An all_gather of B bytes costs (n-1)/n B;
other collectives, and work, cost in proportion to their time.
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

# Factor on the time of memory traffic: it only breaks ties.
TOUCH = 0.08
# Added for each message, where ways to run many ops are compared (Axis.price). Its latency alone is worth about 1 MB
# inside a node; this is less, so that small models are placed like large ones.
MESSAGE = 2048.0
# Factor on gathering a shard to Replicate: every rank then holds the value, and its results, whole.
REPEATED = 2.0
# Factor on any conversion of a shard that an annotation or the microbatch axis made: it would undo the annotation.
UNDO = 1000.0


@dataclass(frozen=True)
class Prices:
    """Prices on one axis.

    per_byte: of each collective, per byte of the whole tensor. unit_seconds: how long a unit of price takes.
    """

    per_byte: Mapping[str, float]
    unit_seconds: float

    @staticmethod
    @lru_cache
    def among(ranks: tuple[int, ...]) -> Prices:
        """Return the prices of collectives among these ranks."""
        n = len(ranks)
        unit = byte_seconds("all_gather", ranks) * n / (n - 1)
        per_byte = {kind: byte_seconds(kind, ranks) / unit for kind in COLLECTIVES}
        return Prices(per_byte | {"all_to_all": per_byte["all_to_all"] / n}, unit)  # a rank exchanges its part, 1/n

    def transfer(self, v: Value, old: Placement, new: Placement, nbytes: float, packed: float = 1.0) -> float:
        """Return the price of a conversion, forward and backward. packed: see `Conversion.price`."""
        if old == new:
            return 0.0
        gradient = needs_sum_grad(v)
        rows = between(type(old), type(new))  # digits of one dim (rare): the price of an all_to_all, not of a gather
        return nbytes * sum(row.price(self.per_byte, gradient=gradient, packed=packed) for row in rows)

    def work(self, flops: float, touched: float) -> float:
        """Return the price of an op's products and of the bytes that it touches."""
        return (work_seconds(flops, 0.0) + TOUCH * work_seconds(0.0, touched)) / self.unit_seconds
