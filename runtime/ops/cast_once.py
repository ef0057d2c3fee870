"""Cast a weight to the dtype of products once a step: the microbatches in flight share one copy.

    microbatch 0    w_bf16 = cast_once(w, ...)     casts, and keeps the copy until the stage's last forward
    microbatch 1    w_bf16 = cast_once(w, ...)     the same memory
    ...             after the last forward, what autograd saved of it for later backwards holds it

Each microbatch has a separate place in autograd's graph. Its gradient is cast to the weight's dtype there, so that
microbatches add up in that dtype, as if each had cast the weight itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardc.runtime.ops.with_backward import with_backward


def cast_once(x: Tensor, mesh: Any, dtype: torch.dtype, tag: str = "") -> Tensor:
    """Cast x to another dtype, when training in microbatches as one copy a step (StepContext).

    x must not change until the step's last forward, and nothing may write to the result. Elsewhere it is an ordinary
    cast.
    """
    copies = mesh.step.weight_copies
    if copies is None:
        return x.to(dtype)
    if tag not in copies:
        copies[tag] = x.detach().to(dtype)
    # a separate tensor for this microbatch, in the copy's memory
    result: Tensor = with_backward(lambda x, copy: (copy.detach(), (x.dtype,)), _wide, x, copies[tag])
    return result


def _wide(needs: Any, g: Tensor, dtype: torch.dtype) -> tuple[Tensor]:
    return (g.to(dtype),)
