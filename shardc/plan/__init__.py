"""`shardc plan`: which spec trains a model fastest on so many devices, and whether it fits. By the cost model alone: no
device, no data.

space      what there is to choose                 subject    the model with few of its layers, at any number of rows
parts      parts of a step as vectors              library    what one microbatch is on one stage, rehearsed
estimate   a first price of every choice           price      an exact one
search     from the first to the second            solve      largest batch, longest sequence, fewest devices
result     Plan, Candidate                         table, write, command    as people read it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shardc.cost.device import Device
from shardc.cost.device import device as described
from shardc.errors import ShardcError
from shardc.plan.model import Subject
from shardc.plan.planner import Planner
from shardc.plan.result import Candidate, Plan
from shardc.spec import Spec

__all__ = ["Candidate", "Plan", "plan"]


def plan(
    model: nn.Module,
    batch: Any,
    *,
    devices: int | None = None,
    device: str | Path | Device = "h100-80g",
    global_batch: int | None = None,
    precision: str = "bfloat16",
    headroom: float = 0.05,
    given: str | Path | Mapping[str, Any] | Spec | None = None,
    largest: Literal["batch", "sequence"] | None = None,
    fewest: bool = False,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    name: str = "",
    on: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> Plan:
    """Search for the spec that trains a model fastest on so many devices.

    model, batch, loss: as in `shardc.compile`; the model may lie on the meta device. device: a name, a YAML file, or a
    shardc.cost.Device. global_batch: rows of a step; default: those of `batch`, or as many times so many as devices
    need to have a row each. precision: bfloat16 and float16 (with master weights in float32), float32, pure-bfloat16,
    or model (as it is). headroom: share of a device's memory that is left to the allocator, NCCL and kernels'
    workspaces. given: price this spec and no other; devices is then what its mesh says. largest: also answer how many
    rows, or how long a sequence, the best spec (or the given one) takes. fewest: also answer on how few devices
    anything fits. on: told what is being priced: (what, done, of). Raises ShardcError for what is wrong with the input;
    that nothing fits is told by `.best`.
    """
    started = time.perf_counter()
    if not 0 <= headroom < 1:
        raise ShardcError(
            f"headroom {headroom} is not a share", where="--headroom", fix="a number from 0 to 1, such as 0.05"
        )
    if given is None and devices is None:
        raise ShardcError(
            "the number of devices is missing",
            where="--devices",
            fix="add e.g. --devices 64, or price a spec with --given spec.yaml",
        )
    if devices is not None and devices < 1:
        raise ShardcError(f"{devices} devices are too few", where="--devices", fix="name at least 1")
    if global_batch is not None and global_batch < 1:
        raise ShardcError(
            f"a global batch of {global_batch} rows is too small", where="--global-batch", fix="name at least 1"
        )
    if largest not in (None, "batch", "sequence"):
        raise ShardcError(f"cannot search for the largest {largest!r}", where="--largest", fix="name batch or sequence")
    on("capturing", 0, 0)
    planner = Planner(
        Subject.of(model, batch, loss), described(device), precision, headroom, name or type(model).__name__, on
    )
    if given is not None:
        found = planner.given(given, devices, global_batch)
    else:
        assert devices is not None
        found = planner.search(devices, global_batch)
    if largest is not None:
        found = planner.largest(found, largest)
    if fewest:
        found = planner.fewest(found)
    return replace(found, seconds=time.perf_counter() - started)
