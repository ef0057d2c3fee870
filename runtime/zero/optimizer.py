"""An optimizer that updates parts of parameters (ZeRO >= 1): any that treats every element by itself
(shardc.runtime.zero.optimizer_check).

The user's function makes its optimizer from stand-ins: parameters of the whole local shapes, whose memory is one
element, so that it can group them by name or shape as ever. Then the groups get what this rank owns of each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.runtime.zero.flat_partition import FlatShard
from shardc.runtime.zero.optimizer_check import has_param_shape


def stand_in(shape: tuple[int, ...], like: Tensor) -> nn.Parameter:
    """A parameter of a shape, with the device and dtype of `like`, that takes no memory. It may not be written to."""
    return nn.Parameter(
        torch.zeros((), dtype=like.dtype, device=like.device).expand(shape), requires_grad=like.requires_grad
    )


def replace_stand_ins(
    optimizer: Optimizer,
    stand_ins: Mapping[str, nn.Parameter],
    owned: Mapping[str, nn.Parameter],
    runs: Mapping[str, FlatShard],
) -> None:
    """Replace stand-ins by the stretches that this rank owns, in the optimizer's groups and in state that it has made
    already.
    """
    name_of = {id(stand_ins[n]): n for n in runs}
    for group in optimizer.param_groups:
        group["params"][:] = [
            owned[name_of[id(p)]] if id(p) in name_of else p for p in group["params"]
        ]  # the list itself: others may hold it
    for p in [p for p in optimizer.state if id(p) in name_of]:
        name = name_of[id(p)]
        run, state = runs[name], optimizer.state.pop(p)
        cut = {k: x.reshape(-1)[run.start : run.stop].clone() for k, x in state.items() if has_param_shape(k, x, p)}
        optimizer.state[owned[name]] = {**state, **cut}
