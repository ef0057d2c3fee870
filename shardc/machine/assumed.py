"""Assume one machine wherever a pass weighs work against communication: the H100 of devices/h100-80g.yaml.

A compiled program must not depend on the device that it will run on, so passes know one machine, whatever a spec's
`device:` says. They use the formulas of shardc.machine with it, the same that shardc.cost uses with any device.

    ASSUMED    its seconds, in which a line of a graph runs beside a collective (shardc.passes.joint)
    LARGE      the same without what comes once an op or a message: launches and latencies. It weighs ways to split, to
               keep and to cut (shardc.passes.place, recompute, pipeline), which small models get as large ones do. Its
               seconds are proportional to bytes and flops. And without sums in switches: an all_reduce takes what its
               halves do, so that placement does not give up a split between them, which takes less memory.
"""

from __future__ import annotations

from importlib import resources

import yaml

from shardc.machine.collectives import collective_seconds
from shardc.machine.device import Device, Link
from shardc.machine.work import Op


def _h100() -> Device:
    """A graph's lines are known before it runs, so the host is ahead of the device."""
    text = resources.files("shardc.machine").joinpath("devices", "h100-80g.yaml").read_text()
    return Device.model_validate(yaml.safe_load(text)).model_copy(update={"host": 0.0})


def _large(device: Device) -> Device:
    def link(x: Link) -> Link:
        return x.model_copy(update={"latency": 0.0, "start": 0.0, "adds": 0.0})

    links = {"within": link(device.within), "between": link(device.between)}
    return device.model_copy(update={"launch": 0.0, **links})


ASSUMED = _h100()
LARGE = _large(ASSUMED)


def work_seconds(flops: float, traffic: float) -> float:
    """Seconds of a large op: of its products, which are taken to be in 16 bits whatever the program's dtype is, or of
    the bytes that it reads and writes.
    """
    return LARGE.op_seconds(Op(int(flops), int(traffic), "bfloat16"))


def byte_seconds(kind: str, ranks: tuple[int, ...]) -> float:
    """Seconds that a large collective among these ranks takes for each of its bytes (`collective_seconds`)."""
    return collective_seconds(LARGE, kind, 1.0, ranks)


#: Neighbouring stages of a pipeline are taken to be on two nodes.
STAGES = (0, LARGE.node)
