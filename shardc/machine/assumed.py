"""Assume one machine (the H100 of devices/h100-80g.yaml) where passes weigh work and communication.

A compiled program must not depend on the device that it will run on. So passes always assume this machine, not a spec's
`device:`. They use the formulas of shardc.machine with it, the same that shardc.cost uses with any device.

    ASSUMED    the real seconds, for lines of a graph beside a collective (shardc.passes.joint)
    LARGE      without costs per op or message: launches and latencies. It weighs ways to split, keep and cut
               (shardc.passes.place, recompute, pipeline), so that small models get the same choices as large ones. Its
               seconds are proportional to bytes and flops. It has no sums in switches: an all_reduce takes as long as
               its two halves, so that placement keeps a split between them, which takes less memory.
"""

from __future__ import annotations

from importlib import resources

import yaml

from shardc.machine.collectives import collective_seconds
from shardc.machine.device import Device
from shardc.machine.work import Op

_H100 = yaml.safe_load(resources.files("shardc.machine").joinpath("devices", "h100-80g.yaml").read_text())
#: Without the host's time: a graph's lines are known ahead, so the host runs ahead.
ASSUMED = Device.model_validate({**_H100, "host": 0.0})
_NO_MESSAGE = {"latency": 0.0, "start": 0.0, "adds": 0.0}
_LINKS = {name: {**_H100[name], **_NO_MESSAGE} for name in ("within", "between")}
LARGE = Device.model_validate({**_H100, "host": 0.0, "launch": 0.0, **_LINKS})


def work_seconds(flops: float, traffic: float) -> float:
    """Return the seconds of a large op: of its products, assumed to be in 16 bits, or of its traffic."""
    return LARGE.op_seconds(Op(int(flops), int(traffic), "bfloat16"))


def byte_seconds(kind: str, ranks: tuple[int, ...]) -> float:
    """Return the seconds per byte of a large collective among these ranks (`collective_seconds`)."""
    return collective_seconds(LARGE, kind, 1.0, ranks)


#: Neighbouring stages of a pipeline are assumed to be on two nodes.
STAGES = (0, LARGE.node)
