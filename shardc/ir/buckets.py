"""Buckets: flat buffers in which parameters lie, and in which their gradients are reduced together.

    bucket 0: all_reduce over dp          [ down.weight | down.bias | up.weight | up.bias ]   as backward finishes them
    the same at ZeRO, shard="dp", 2 ranks [ rank 0's part          | rank 1's part        ]   cut across parameters

shardc.passes.gradient_buckets makes them; shardc.runtime.zero holds the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rounded:
    """How a parameter is rounded: format and granule, as `fp8_round` takes them; axes: over which granules are split,
    beside that of the bucket.
    """

    format: str
    granule: tuple[int, ...]
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bucket:
    """Parameters that lie in one flat buffer, and whose gradients are reduced together.

    axes: over which gradients are summed; () = they need no sum, or there are none. dtype: of the sums.
    params: names in the order in which backward finishes them; local parts of one dtype.
    shard: the data axis over which the flat buffer is cut into one part a rank; "" = nothing is cut.
    zero: what is kept cut: 1 the optimizer's state, 2 gradients too, 3 parameters too (Rajbhandari et al. 2020,
    "ZeRO"); 0 = nothing.
    compute: dtype in which the whole parameters are held or gathered, where all ops want another one than is stored;
    None = as stored.
    prefetch: at zero 3, how many buckets are gathered ahead of their use in backward. (Forward's gathers stand in the
    graph.)
    keep: at zero 3, what is gathered is kept, and gradients are not summed, until the last backward of a step.
    rounded: at zero 3, of each parameter, if all that ops want of it is what `fp8_round` gives: it is rounded before it
        is gathered, in 8 bits. () = they are gathered as `compute` says.
    stages: of a pipeline: those that use its parameters. late: other ranks' stages do too, and the sum is begun after
        all backwards: the ranks do not get there at the same time.
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
        """Are gradients summed in every backward, so that none are kept whole? Otherwise once a step."""
        return self.zero == 2 or (self.zero == 3 and not self.keep)
