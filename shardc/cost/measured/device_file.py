"""Find the description of a device, by name or from a YAML file.

device("h100-80g")    of this package: shardc/machine/devices
device("mine.yaml")   a file
device("cpu")         as measured by `shardc device --measure`; also "cuda"
of_spec(spec)         the device of a spec's `device:`
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from shardc import text_file
from shardc.errors import Errors, ShardcError
from shardc.ir.similar_names import nearest
from shardc.machine.device import Device, Link, OpRates, Outside, Products, Reaches
from shardc.spec import Spec

#: The devices of this machine, whose files `shardc device --measure` writes.
MEASURED = ("cpu", "cuda")
#: The device that a program is priced on if none is named.
USUAL = "h100-80g"


def names() -> list[str]:
    """Return the names of the devices of this package."""
    files = resources.files("shardc.machine").joinpath("devices").iterdir()
    return sorted(p.name.removesuffix(".yaml") for p in files if p.name.endswith(".yaml"))


def known_devices() -> list[Device]:
    """Return the devices of this package, and those of this machine that have been measured."""
    return [device(n) for n in (*names(), *(n for n in MEASURED if measured_file(n).is_file()))]


def measured_file(name: str) -> Path:
    """Return the file in which `shardc device --measure` stores this machine's "cpu" or "cuda"."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardc" / "devices" / f"{name}.yaml"


def device(name: str | Path | Device) -> Device:
    """Return a device by name (`names()`, or "cpu" or "cuda" once they are measured), or from a file.

    Raises ShardcError for an unknown name, for a device that has not been measured, and for a file that is not valid.
    """
    if isinstance(name, Device):
        return name
    text, where = _text(name)
    example = "see shardc/machine/devices/h100-80g.yaml"
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
        for detail in e.errors():
            key = ".".join(map(str, detail["loc"]))
            close = nearest(str(detail["loc"][-1]), _keys(detail["loc"])) if detail["type"] == "extra_forbidden" else ""
            fix = f"did you mean {close!r}? {example}" if close else example
            errors.add(f"{key}: {detail['msg'][0].lower()}{detail['msg'][1:]}", where=where, fix=fix)
        errors.raise_any()
        raise AssertionError from e


def of_spec(spec: Spec | None) -> Device:
    """Return the device of a spec's `device:`, with its number of nodes; without one `USUAL`.

    A file is searched in the current folder, then beside the spec. Raises ShardcError as `device` does, at the spec's
    line; and if the mesh has more ranks than the nodes have devices.
    """
    if spec is None or spec.device is None:
        return device(USUAL)
    named, where = Path(spec.device.name), spec.where(("device",))
    beside = Path(spec.file).parent / named
    try:
        result = device(beside if beside.is_file() and not named.exists() else spec.device.name)
    except ShardcError as e:
        errors = Errors()
        for error in e.errors:
            errors.add(error.what, where=where if error.where == "device" else error.where, fix=error.fix)
        errors.raise_any()
        raise
    result = result.model_copy(update={"nodes": spec.device.nodes or result.nodes})
    result.check_room(spec.mesh.world, where)
    return result


def chosen(named: str | Path | Device | None, spec: Spec | None) -> Device:
    """Return the device that a command names, else the spec's. Raises ShardcError as `of_spec`."""
    if named is None:
        return of_spec(spec)
    result = device(named)
    if spec is not None:
        result.check_room(spec.mesh.world)
    return result


def _keys(place: tuple[int | str, ...]) -> list[str]:
    """Return the valid keys in the part of a device file that has this key."""
    sections: dict[str, type[BaseModel]] = {"within": Link, "between": Link, "beyond": Link, "ops": OpRates}
    sections |= {"reaches": Reaches, "products": Products, "outside": Outside}
    return list(sections.get(str(place[0]), Device).model_fields if len(place) > 1 else Device.model_fields)


def _text(name: str | Path) -> tuple[str, str]:
    """Return (the YAML text of a device, the file's name for errors)."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            fix = f"give the path of a YAML file, or name one of {', '.join(names())}"
            raise ShardcError(f"there is no file {path}", where="device", fix=fix)
        return text_file.read(path, "device"), str(path)
    if name in MEASURED:
        path = measured_file(str(name))
        if not path.is_file():
            fault = f"this machine's {name} has not been measured: there is no file {path}"
            raise ShardcError(fault, where="device", fix=f"measure it once: shardc device {name} --measure")
        return text_file.read(path, "device"), str(path)
    if str(name) not in names():
        close = next((n for n in names() if n.startswith(str(name).lower())), "") or nearest(str(name), names())
        fix = f"name one of {', '.join([*names(), *MEASURED])}, or a YAML file"
        fault, hint = f"there is no device {str(name)!r}", f"did you mean {close!r}? " if close else ""
        raise ShardcError(fault, where="device", fix=hint + fix)
    return resources.files("shardc.machine").joinpath("devices", f"{name}.yaml").read_text(), f"{name}.yaml"
