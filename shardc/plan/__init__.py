"""Find the spec that trains a model fastest on a number of devices, without a device and without data.

planner       plans, prices given specs and answers questions; search: finds the best specs in two tiers
space         the choices: mesh, ZeRO, schedule, recomputation, ...
few_layers    the model with few of its layers, and the facts that a plan needs
runs          dry runs of few layers; stage: costs of the parts of a stage's step
estimate      tier one: estimates every choice by arithmetic on one block
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
from shardc.plan.planner import Planner
from shardc.plan.questions import best_cluster, check_prices
from shardc.plan.result import Candidate, Plan
from shardc.plan.runs import Runs
from shardc.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Candidate", "Plan", "plan"]

OneDevice = str | Path | Device | None
OneSpec = str | Path | Mapping[str, Any] | Spec | None


@checked("shardc.plan", elsewhere={})
def plan(
    model: nn.Module,
    batch: Any,
    *,
    devices: int | None = None,
    device: OneDevice | Sequence[OneDevice] = None,
    global_batch: int | None = None,
    precision: str = "bfloat16",
    headroom: float = 0.0,
    given: OneSpec | Sequence[OneSpec] = None,
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
    tokens: also return how long this many tokens take: positions of ids that an embedding looks up.
    on: called with the progress of pricing: (subject, done, total).
    Raises ShardcError for invalid input; if nothing fits, `.best` of the result raises it.
    """
    started = time.perf_counter()
    subject = Subject(model, batch, loss)
    runs = {cpu: Runs(subject, cpu) for cpu in (False, True)}  # of all devices
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    specs = [Spec.load(one, world=devices) for one in several if one is not None]
    _check_numbers(global_batch, largest, tokens)

    def on_one(one: OneDevice) -> Plan:
        machine = chosen(one, specs[0] if specs else None)
        number = _number(devices, machine, specs)
        planner = Planner(runs[machine.kind == "cpu"], machine, precision, headroom, name or type(model).__name__, on)
        result = planner.given(specs, global_batch) if specs else planner.search(number, global_batch)
        if largest is not None:
            result = planner.largest(result, largest, given=bool(specs))
        result = planner.fewest(result) if fewest else result
        result = planner.what_if(result) if what_if else result
        return planner.duration(result, tokens) if tokens is not None else result

    if isinstance(device, Sequence) and not isinstance(device, str):
        check_prices(prices or {}, [chosen(one, None).name for one in device])
        result = best_cluster([on_one(one) for one in device], prices or {})
    else:
        result = on_one(device)
    return replace(result, seconds=time.perf_counter() - started)


def _number(devices: int | None, machine: Device, specs: Sequence[Spec]) -> int:
    """Return the number of devices: the named one, that of the last given spec, or all of the machine."""
    for one in specs:
        machine.check_room(one.mesh.world)
    if devices is None and specs:
        return specs[-1].mesh.world
    if devices is None and machine.nodes is not None:
        devices = machine.nodes * machine.node
    if devices is None:
        fix = "add e.g. --devices 64, or price a spec with --given spec.yaml; in Python devices=64, given=..."
        raise ShardcError("the number of devices is missing", where="--devices", fix=fix)
    if isinstance(devices, bool) or not isinstance(devices, int):
        raise ShardcError(f"{devices!r} is no number of devices", where="--devices", fix="a whole number, such as 8")
    if devices < 1:
        raise ShardcError(f"{devices} devices are too few", where="--devices", fix="name at least 1")
    machine.check_room(devices)
    return devices


def _check_numbers(global_batch: int | None, largest: str | None, tokens: float | None) -> None:
    if global_batch is not None and global_batch < 1:
        fix = "name at least 1"
        raise ShardcError(f"a global batch of {global_batch} rows is too small", where="--global-batch", fix=fix)
    if largest not in (None, "batch", "sequence", "model"):
        fix = "name batch, sequence or model"
        raise ShardcError(f"cannot search for the largest {largest!r}", where="--largest", fix=fix)
    if tokens is not None and not tokens > 0:
        raise ShardcError(f"{tokens} tokens are too few", where="--tokens", fix="name a number, such as 1e12")
