"""ZeRO 2: parameters are whole on every rank; of the summed gradients and of the optimizer's state it has a part."""

from __future__ import annotations

from shardc.runtime.zero.scattered_bucket import ScatteredBucket
from shardc.runtime.zero.whole_params import WholeParams


class ShardedGradBucket(WholeParams, ScatteredBucket):
    """Whole parameters; gradients are scattered in every backward."""
