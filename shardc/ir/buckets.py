"""Define buckets: flat buffers of parameters, in which their gradients are reduced together.

    bucket 0: all_reduce over dp          [ down.weight | down.bias | up.weight | up.bias ]   as backward finishes them
    the same at ZeRO, shard="dp", 2 ranks [ rank 0's part          | rank 1's part        ]   cut across parameters

shardc.passes.gradient_buckets makes them; shardc.runtime.zero holds the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rounded:
    """How a parameter is rounded: format and granule as in `fp8_round`.

    axes: over which granules are split, besides the bucket's axis.
    """

    format: str
    granule: tuple[int, ...]
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bucket:
    """Parameters in one flat buffer, whose gradients are reduced together.

    axes: over which gradients are summed; () = no sum is needed, or there are no gradients. dtype: of the sums.
    params: names in the order in which backward finishes them; local parts of one dtype.
    shard: the data axis over which the flat buffer is cut into one part per rank; "" = it is not cut.
    zero: what each rank keeps only its part of: 1 the optimizer's state, 2 gradients too, 3 parameters too (Rajbhandari
    et al. 2020, "ZeRO"); 0 = nothing.
    compute: dtype in which the whole parameters are held or gathered, if all ops use another one than the stored one;
    None = the stored one.
    prefetch: at zero 3, how many buckets backward gathers ahead of their use. (Forward's gathers are in the graph.)
    keep: at zero 3, gathered parameters are kept, and gradients are not summed, until the last backward of a step.
    rounded: at zero 3, of each parameter, if all ops use only its `fp8_round`: it is rounded before the gather, which
    sends 8 bits. () = gathered as `compute` says.
    stages: of a pipeline: those that use its parameters. late: stages of other ranks use them too; the sum starts after
    all backwards, as ranks finish theirs at different times.
    """

    axes: tuple[str, ...]
    dtype: torch.dtype
    params: tuple[str, ...]
    shard: str = ""
    zero: int = 0
    compute: torch.dtype | None = None
    prefetch: int = 1
    stages: tuple[int, ...] = (0,)
    late: bool = False
    keep: bool = False
    rounded: tuple[Rounded, ...] = ()

    @property
    def each(self) -> bool:
        """Whether gradients are summed in every backward, so that none are kept whole; otherwise once a step."""
        return self.zero == 2 or (self.zero == 3 and not self.keep)
