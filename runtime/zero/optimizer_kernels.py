"""Choose which of torch's implementations of an optimizer runs, if the user does not.

The user leaves it open by `foreach=None, fused=None`.

    on a CPU    torch's own choice: one parameter after the other
    on a GPU    fused, where torch has it: a kernel that reads and writes every element once. Torch's own choice
                there is foreach, which makes temporaries as large as all parameters

Fused kernels round the last digits differently. A checkpoint does not record which implementation ran.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from shardc.runtime.zero.optimizer_list import members_of

#: Settings that name an implementation.
IMPLEMENTATIONS = ("foreach", "fused")
#: The classes that are fused on GPUs. Not their subclasses, which may override `step`.
_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


def prefer_fused(optimizer: Optimizer) -> None:
    """Set `fused` in groups that leave the implementation open and have no state yet."""
    for member in members_of(optimizer):
        for group in member.param_groups:
            if type(member) in _FUSED and _open(group) and not any(p in member.state for p in group["params"]):
                group["fused"] = True


def _open(group: dict[str, object]) -> bool:
    """Return whether the user left the implementation open, and the fused one supports the group."""
    params = group["params"]
    assert isinstance(params, list)
    return (
        all(group.get(name, False) is None for name in IMPLEMENTATIONS)
        and not group.get("differentiable")
        and not group.get("capturable")
        and isinstance(group.get("lr"), float)
        and all(p.is_floating_point() for p in params)
    )
