"""The groups that an optimizer has on one device, where the user's function makes them by the shapes of parameters: a
learning rate of 1 / p.shape[-1], decay for what is larger than so much. A rank's part of a parameter that is split has
another shape, and every rank the same other one: nothing else would notice.

    on one device      up f32[32, 16]  lr 1/16     down f32[8, 32]  lr 1/32
    on a rank, tp 2    up f32[16, 16]  lr 1/16     down f32[8, 16]  lr 1/16

So the function is asked a second time, with parameters of the whole shapes that have no memory, and what it makes of
these is how the rank's are grouped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardc.ir.program import Program
from shardc.runtime.zero.named_parameters import NamedParameters
from shardc.runtime.zero.optimizer import stand_in
from shardc.runtime.zero.optimizer_list import OptimizerList, as_one, members_of

#: Of an optimizer, or of each of several: its groups, with names in the place of parameters.
Groups = list[list[dict[str, Any]]]


def groups_of_whole(make: Callable[[NamedParameters], Any], given: NamedParameters, program: Program) -> Groups | None:
    """What the user's function makes of the whole shapes. given: what it gets on this rank. None where these are the
    whole shapes, and where the function does not take parameters without data.
    """
    shapes = {p.fqn: p.shape for p in program.params}
    if all(tuple(p.shape) == tuple(shapes[n]) for n, p in given):
        return None
    for meta in (True, False):  # some optimizers ask for the device that they will run on
        like = [(n, torch.empty((), dtype=p.dtype, device="meta") if meta else p) for n, p in given]
        whole = [(n, stand_in(shapes[n], x)) for (n, x), (_, p) in zip(like, given, strict=True)]
        for (_, x), (_, p) in zip(whole, given, strict=True):
            x.requires_grad_(p.requires_grad)
        with contextlib.suppress(Exception):  # whatever is wrong with it is told of the rank's own parameters
            return _named(as_one(make(NamedParameters(whole, given.known, given.inner))), dict(whole))
    return None


def _named(optimizer: Optimizer, whole: dict[str, nn.Parameter]) -> Groups | None:
    names = {id(p): n for n, p in whole.items()}
    found = [
        [{**g, "params": [names.get(id(p)) for p in g["params"]]} for g in m.param_groups]
        for m in members_of(optimizer)
    ]
    return found if all(n is not None for groups in found for g in groups for n in g["params"]) else None


def regroup(optimizer: Optimizer, groups: Groups, given: NamedParameters) -> None:
    """Give an optimizer the groups of the whole shapes, with this rank's parameters in them."""
    own, members = dict(given), list(members_of(optimizer))
    if len(members) != len(groups):
        return
    for m, wanted in zip(members, groups, strict=True):
        for group, like in zip(m.param_groups, wanted, strict=False):  # the groups themselves: others may hold them
            group.clear()
            group.update({**like, "params": [own[n] for n in like["params"]]})
        m.param_groups[len(wanted) :] = []
        m.param_groups += [{**w, "params": [own[n] for n in w["params"]]} for w in wanted[len(m.param_groups) :]]
    if isinstance(optimizer, OptimizerList):
        optimizer.read_groups()
