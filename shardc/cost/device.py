"""What a device does in a second, and how fast it reaches others, from a YAML file.

device("h100-80g")    of this package: shardc/cost/devices
device("mine.yaml")   a file
device("cpu")         as measured by `shardc device --measure`; also "cuda"
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardc import text_file
from shardc.errors import Errors, ShardcError
from shardc.ir.patterns import nearest

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


#: The devices of this machine, whose files are made by measuring.
MEASURED = ("cpu", "cuda")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Link(_Section):
    """bandwidth: bytes per second that one device sends, while it receives as many; latency: seconds."""

    bandwidth: Positive
    latency: Annotated[float, Field(ge=0)]


class Reaches(_Section):
    """The shares of a device's peaks that large ops reach."""

    flops: Share = 1.0
    bandwidth: Share = 1.0
    link: Share = 1.0


class Device(_Section):
    """source: where the numbers are from. kind: a CPU makes masks in blocks, a GPU as a whole. memory: bytes.

    flops: per second of a matrix product, by dtype. bandwidth: bytes of memory read or written per second. launch: the
    least seconds that an op takes. reaches: shares of these peaks. node: devices in a node; within, between: links
    inside of a node and between nodes.
    """

    name: str
    source: str = ""
    kind: Literal["gpu", "cpu"] = "gpu"
    memory: Positive
    flops: Mapping[str, Positive]
    bandwidth: Positive
    launch: Annotated[float, Field(ge=0)] = 0.0
    reaches: Reaches = Reaches()
    node: Annotated[int, Field(ge=1)] = 1
    within: Link
    between: Link

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """The peak of products in a dtype; of a dtype that is not listed, that of the slowest."""
        name = str(dtype).removeprefix("torch.")
        return self.flops.get(name, min(self.flops.values()))

    def op_seconds(self, flops: float, traffic: float, dtype: torch.dtype) -> float:
        """Of one op: its flops or its memory traffic in bytes, whichever takes longer."""
        compute = flops / (self.flops_per_second(dtype) * self.reaches.flops)
        return max(compute, traffic / (self.bandwidth * self.reaches.bandwidth), self.launch)

    def to_yaml(self) -> str:
        """The device as a file, with units in comments."""
        flops = ", ".join(f"{k}: {n:.3e}" for k, n in self.flops.items())
        reaches = ", ".join(f"{k}: {n}" for k, n in self.reaches)
        links = [
            f"{{bandwidth: {link.bandwidth:.3e}, latency: {link.latency:.2e}}}" for link in (self.within, self.between)
        ]
        return (
            f"name: {self.name}\nsource: {json.dumps(self.source)}\nkind: {self.kind}\n"
            f"memory: {self.memory:.4e}   # bytes\n"
            f"flops: {{{flops}}}   # per second, of products of matrices\n"
            f"bandwidth: {self.bandwidth:.3e}   # bytes of memory per second, read and written\n"
            f"launch: {self.launch:.2e}   # the least seconds of an op\n"
            f"reaches: {{{reaches}}}   # shares of these peaks that large ops reach\n"
            f"node: {self.node}   # devices in a node\n"
            f"within: {links[0]}   # bytes per second and direction of one device; seconds\n"
            f"between: {links[1]}\n"
        )


def names() -> list[str]:
    """The devices of this package."""
    return sorted(
        p.name.removesuffix(".yaml")
        for p in resources.files("shardc.cost").joinpath("devices").iterdir()
        if p.name.endswith(".yaml")
    )


def known_devices() -> list[Device]:
    """The devices of this package, and those of this machine that have been measured."""
    return [device(n) for n in (*names(), *(n for n in MEASURED if measured_file(n).is_file()))]


def measured_file(name: str) -> Path:
    """The file in which `shardc device --measure` keeps the numbers of this machine's "cpu" or "cuda"."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardc" / "devices" / f"{name}.yaml"


def device(name: str | Path | Device) -> Device:
    """A device by name (`names()`, or "cpu" or "cuda" once they are measured), or from a file.

    Raises ShardcError for an unknown name, for a device that has not been measured, and for a file that is not valid.
    """
    if isinstance(name, Device):
        return name
    text, where = _text(name)
    example = "see shardc/cost/devices/h100-80g.yaml"
    try:
        value: Any = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ShardcError(f"this is not YAML: {e}", where=where, fix=example) from None
    if not isinstance(value, dict):
        raise ShardcError("a device is a mapping", where=where, fix=example)
    try:
        return Device.model_validate(value)
    except ValidationError as e:
        errors = Errors()
        for each in e.errors():
            key = ".".join(map(str, each["loc"]))
            errors.add(f"{key}: {each['msg'][0].lower()}{each['msg'][1:]}", where=where, fix=example)
        errors.raise_any()
        raise AssertionError from e


def _did_you_mean(name: str) -> str:
    """A name that goes on as this one does ("h100"), or else the nearest."""
    close = next((n for n in names() if n.startswith(name.lower())), "") or nearest(name, names())
    return f"did you mean {close!r}? " if close else ""


def _text(name: str | Path) -> tuple[str, str]:
    """(the YAML text of a device, the file's name for errors)."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ShardcError(
                f"there is no file {path}",
                where="device",
                fix=f"give the path of a YAML file, or name one of {', '.join(names())}",
            )
        return text_file.read(path, "device"), str(path)
    if name in MEASURED:
        path = measured_file(str(name))
        if not path.is_file():
            what = f"this machine's {name} has not been measured: there is no file {path}"
            raise ShardcError(what, where="device", fix=f"measure it once: shardc device {name} --measure")
        return text_file.read(path, "device"), str(path)
    if str(name) not in names():
        raise ShardcError(
            f"there is no device {str(name)!r}",
            where="device",
            fix=_did_you_mean(str(name)) + f"name one of {', '.join([*names(), *MEASURED])}, or a YAML file",
        )
    return resources.files("shardc.cost").joinpath("devices", f"{name}.yaml").read_text(), f"{name}.yaml"
