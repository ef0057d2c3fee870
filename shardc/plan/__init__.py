"""Find the spec that trains a model fastest on a number of devices, without a device and without data.

planner       plans, prices given specs and answers questions; search: finds the best specs in two tiers
space         the choices: mesh, ZeRO, schedule, recomputation, ...
few_layers    the model with few of its layers, and the facts that a plan needs
runs          dry runs of few layers; stage: costs of the parts of a stage's step
rank          tier one: estimates every choice by arithmetic on one block
price         tier two: prices a spec by its own dry runs
result        Plan, Candidate
questions     the largest that fits, what would help most, the best of several clusters
table         the plan as a table; annotated_yaml: the best spec, with reasons as comments
page          the plan as an HTML page
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardc.call_arguments import checked
from shardc.cost.measured.device_file import chosen
from shardc.errors import ShardcError
from shardc.machine.device import Device
from shardc.plan.few_layers import Subject
from shardc.plan.planner import HEADROOM, Planner, usable
from shardc.plan.questions import best_cluster, check_prices
from shardc.plan.result import Candidate, Plan
from shardc.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Candidate", "Plan", "plan"]

Devices = str | Path | Device | Sequence[str | Path | Device] | None
Given = str | Path | Mapping[str, Any] | Spec | Sequence[str | Path | Mapping[str, Any] | Spec] | None


@checked("shardc.plan", elsewhere={})
def plan(
    model: nn.Module,
    batch: Any,
    *,
    devices: int | None = None,
    device: Devices = None,
    global_batch: int | None = None,
    precision: str = "bfloat16",
    headroom: float = HEADROOM,
    given: Given = None,
    largest: Literal["batch", "sequence", "model"] | None = None,
    fewest: bool = False,
    what_if: bool = False,
    tokens: float | None = None,
    prices: Mapping[str, float] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    name: str = "",
    on: Callable[[str, int, int], None] = lambda subject, done, total: None,
) -> Plan:
    """Search for the spec that trains a model fastest on a number of devices.

    model, batch, loss: as in `shardc.compile`; the model may be on the meta device.
    devices: their number; default: that of the given spec's mesh, or all devices of the device file (`nodes`).
    device: a name, a YAML file, or a shardc.cost.Device; default: the given spec's, else h100-80g. With several, the
        result is the plan of the cheapest by `prices`, {device's name: price of a device-hour}, or else the fastest.
    global_batch: rows of a step; default: those of `batch`, or a multiple with a row for every device.
    precision: bfloat16 or float16 (with master weights in float32), float32, pure-bfloat16, or model (as it is).
    headroom: share of a device's memory to leave free, besides what the allocator and libraries take.
    given: price only this spec, or these, side by side.
    largest: also find how many rows, tokens of a row or layers the best spec (or the best given one) can take.
    fewest: also find the smallest number of devices on which anything fits.
    what_if: also price the best spec (or the given one) on better devices, on other devices, without recomputation,
        and with compiled element-wise work.
    tokens: also return how long this many tokens take. The model's rows must be sequences.
    on: called with the progress of pricing: (subject, done, total).
    Raises ShardcError for invalid input; if nothing fits, `.best` of the result raises it.
    """
    return planned(
        Subject.of(model, batch, loss),
        name or type(model).__name__,
        devices=devices,
        device=device,
        global_batch=global_batch,
        precision=precision,
        headroom=headroom,
        given=given,
        largest=largest,
        fewest=fewest,
        what_if=what_if,
        tokens=tokens,
        prices=prices,
        on=on,
    )


def planned(
    subject: Subject,
    name: str,
    *,
    devices: int | None,
    device: Devices,
    global_batch: int | None,
    precision: str,
    headroom: float,
    given: Given,
    largest: str | None,
    fewest: bool,
    what_if: bool,
    tokens: float | None,
    prices: Mapping[str, float] | None,
    on: Callable[[str, int, int], None],
) -> Plan:
    """Plan for a subject, which is a model with its batch. See `plan`."""
    started = time.perf_counter()
    if isinstance(device, Sequence) and not isinstance(device, str):
        each = [chosen(one, None) for one in device]
        check_prices(prices or {}, [one.name for one in each])
        same: dict[str, Any] = {"devices": devices, "global_batch": global_batch, "precision": precision}
        same |= {"headroom": headroom, "given": given, "largest": largest, "fewest": fewest, "what_if": what_if}
        same |= {"tokens": tokens, "prices": prices, "on": on}
        found = best_cluster([planned(subject, name, device=one, **same) for one in each], prices or {})
        return replace(found, seconds=time.perf_counter() - started)
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    specs = [Spec.load(one, world=devices) for one in several if one is not None]
    usable(on_device := chosen(device, specs[0] if specs else None), headroom)
    for one in specs:
        on_device.check_room(one.mesh.world)
    if devices is None and on_device.nodes is not None:
        devices = on_device.nodes * on_device.node
    if not specs and devices is None:
        raise ShardcError(
            "the number of devices is missing",
            where="--devices",
            fix="add e.g. --devices 64, or price a spec with --given spec.yaml; in Python devices=64, given=...",
        )
    if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int)):
        raise ShardcError(f"{devices!r} is no number of devices", where="--devices", fix="a whole number, such as 8")
    if devices is not None and devices < 1:
        raise ShardcError(f"{devices} devices are too few", where="--devices", fix="name at least 1")
    if devices is not None:
        on_device.check_room(devices)
    if global_batch is not None and global_batch < 1:
        raise ShardcError(
            f"a global batch of {global_batch} rows is too small", where="--global-batch", fix="name at least 1"
        )
    if largest not in (None, "batch", "sequence", "model"):
        fix = "name batch, sequence or model"
        raise ShardcError(f"cannot search for the largest {largest!r}", where="--largest", fix=fix)
    if tokens is not None and not tokens > 0:
        raise ShardcError(f"{tokens} tokens are too few", where="--tokens", fix="name a number, such as 1e12")
    planner = Planner(subject, on_device, precision, headroom, name, on)
    if specs:
        result = planner.given(specs, global_batch)
    else:
        assert devices is not None
        result = planner.search(devices, global_batch)
    if largest is not None:
        result = planner.largest(result, largest, given=bool(specs))
    if fewest:
        result = planner.fewest(result)
    if what_if:
        result = planner.what_if(result)
    if tokens is not None:
        result = planner.duration(result, tokens)
    return replace(result, seconds=time.perf_counter() - started)
