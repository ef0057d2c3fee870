"""Compute the largest element along split dims: the steps of one rank between two messages.

top = all_reduce_max(top(x))          ties = all_reduce(ties(x, top))          extremum(x, top, ties)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardc.runtime.ops.with_backward import with_backward


def top(x: Tensor, dims: list[int]) -> Tensor:
    """Return the largest element along `dims`, which are kept; detached."""
    return x.detach().amax(dims, keepdim=True)


def ties(x: Tensor, top: Tensor, dims: list[int]) -> Tensor:
    """Count this rank's elements equal to `top` along `dims`, which are kept, in float32 at least."""
    return (x.detach() == top).sum(dims, keepdim=True).to(torch.promote_types(x.dtype, torch.float32))


def extremum(x: Tensor, top: Tensor, ties: Tensor) -> Tensor:
    """Return `top`, of all ranks. Equal elements share its gradient equally, as in torch.amax.

    ties: how many there are on all ranks. Saves one bool for each element of x.
    """
    result: Tensor = with_backward(lambda x, top, ties: (top.clone(), (x == top, ties)), _to_largest, x, top, ties)
    return result


def _to_largest(needs: Any, g: Tensor, largest: Tensor, ties: Tensor) -> tuple[Tensor]:
    return ((g / ties).to(g.dtype) * largest,)
