"""Give the user's optimizer stand-ins to group, then this rank's flat shards (ZeRO 1 to 3).

The user's function makes its optimizer from `stand_in`s: parameters of the whole local shapes with the memory of one
element. So it can group them by name or shape. Then the groups get this rank's flat shards of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.runtime.zero.flat_partition import FlatShard
from shardc.runtime.zero.optimizer_check import has_param_shape


def stand_in(shape: tuple[int, ...], like: Tensor) -> nn.Parameter:
    """Return a read-only parameter with the memory of one element. like: has its device and dtype."""
    return nn.Parameter(
        torch.zeros((), dtype=like.dtype, device=like.device).expand(shape), requires_grad=like.requires_grad
    )


def replace_stand_ins(
    optimizer: Optimizer,
    stand_ins: Mapping[str, nn.Parameter],
    owned: Mapping[str, nn.Parameter],
    shards: Mapping[str, FlatShard],
) -> None:
    """Replace `stand_ins` by this rank's flat shards, in the optimizer's groups and in existing state."""
    name_of = {id(stand_ins[n]): n for n in shards}
    for group in optimizer.param_groups:
        group["params"][:] = [
            owned[name_of[id(p)]] if id(p) in name_of else p for p in group["params"]
        ]  # in place: others may hold the list
    for p in [p for p in optimizer.state if id(p) in name_of]:
        name = name_of[id(p)]
        shard, state = shards[name], optimizer.state.pop(p)
        cut = {k: x.reshape(-1)[shard.start : shard.stop].clone() for k, x in state.items() if has_param_shape(k, x, p)}
        optimizer.state[owned[name]] = {**state, **cut}
