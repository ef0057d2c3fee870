"""What would help most: the step of one spec on devices that are better in one respect, and on other devices; without
recomputation, and with fused regions.

Dry runs do not depend on the device, so a question about devices costs arithmetic only. One about the spec costs dry
runs of that spec.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from shardc.cost.device_file import device, names
from shardc.errors import ShardcError
from shardc.machine.device import Device
from shardc.plan.dry_runs import Library
from shardc.plan.exact_price import Priced, price
from shardc.spec import Spec

#: A vocabulary of 50,257 makes rows of the head's products begin anywhere, which keeps them from a GPU's usual kernels.
ALIGNED = "sizes of products that are multiples of 8 (a padded vocabulary)"


def what_if(library: Library, spec: Spec, batch: int, usable: float) -> list[dict[str, Any]]:
    """[{"what", "step_seconds", "ratio", "fits"}], the most helpful first; ratio: of a step's time to that on this
    device. usable: bytes of the device's memory that a step may use; of another device, the same share.
    """
    now = price(library, spec, batch)
    share = usable / library.device.memory

    def answer(what: str, other: Device, priced: Priced) -> dict[str, Any]:
        fits = priced.needs <= share * other.memory
        return {"what": what, "step_seconds": priced.seconds, "ratio": priced.seconds / now.seconds, "fits": fits}

    found = [answer(what, other, price(library.on(other), spec, batch)) for what, other in _others(library.device)]
    for what, one in _specs(spec):
        with contextlib.suppress(ShardcError):  # what compile refuses would not help
            found.append(answer(what, library.device, price(library, one, batch)))
    found = [x for x in found if x["what"] != ALIGNED or x["ratio"] < 1]  # of interest where some are not
    return sorted(found, key=lambda x: x["ratio"])


def _specs(spec: Spec) -> Iterator[tuple[str, Spec]]:
    """The spec with less to compute or to move."""
    now = spec.to_dict()
    if spec.checkpoint:
        yield "nothing computed again (no checkpoint:)", Spec.load({k: v for k, v in now.items() if k != "checkpoint"})
    if spec.execution.compile == "none":
        execution = {**spec.execution.model_dump(), "compile": "layers"}
        yield "element-wise work compiled (execution: {compile: layers})", Spec.load({**now, "execution": execution})


def _others(d: Device) -> Iterator[tuple[str, Device]]:
    """Devices that are twice as good as this one in one respect; and those that there are."""

    def but(**changes: Any) -> Device:
        return d.model_copy(update=changes)

    yield "products twice as fast", but(flops={k: 2 * n for k, n in d.flops.items()})
    yield "memory twice as fast", but(bandwidth=2 * d.bandwidth)
    yield "links in a node twice as fast", but(within=_twice(d.within))
    yield "links between nodes twice as fast", but(between=_twice(d.between), beyond=d.beyond and _twice(d.beyond))
    if d.host or d.launch:
        yield "no time to start ops (fused, or captured)", but(host=0.0, launch=0.0)
    if d.products and d.products.unaligned:
        yield ALIGNED, but(products=d.products.model_copy(update={"unaligned": {}}))
    for name in names():
        if d.kind == "gpu" and name != d.name:
            yield f"on {name}", device(name)


def _twice(link: Any) -> Any:
    return link.model_copy(update={"bandwidth": 2 * link.bandwidth, "peer": link.peer and 2 * link.peer})
