"""Answer questions beyond the best spec: the largest that fits, what would help, the best cluster.

`largest` follows the curve through the priced points, and confirms its answer by pricing it and the next number. Live
memory is a polynomial of low degree in rows and in sequence length (piecewise: the op at the peak may change), so two
or three points lead near the answer. Reserved memory grows in steps, so the curve is of little use close to the
answer: after a guess that does not halve the interval, the next guess is its middle.

Dry runs do not depend on the device: another device costs only arithmetic, another spec needs its own dry runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardc.cost.measured.device_file import device, names
from shardc.errors import ShardcError
from shardc.machine.device import Device
from shardc.plan.price import Priced, price
from shardc.plan.runs import Library
from shardc.spec import Spec

if TYPE_CHECKING:
    from shardc.plan.result import Plan


#: More than the largest number.
MOST = 1 << 30


def largest(needs: Callable[[int], float], limit: float, start: int = 1) -> tuple[int, dict[int, float]]:
    """Return the largest n with needs(n) <= limit, 0 if there is none; and what was priced, by n.

    needs is inf for impossible n.
    """
    low, high, n, priced = 0, MOST, max(start, 1), dict[int, float]()  # low fits, high does not
    while high - low > 1:
        left, priced[n] = high - low, needs(n)
        low, high = (n, high) if priced[n] <= limit else (low, n)
        slow = 2 * (high - low) > left and low > 0 and high < MOST
        guess = (low + high) // 2 if slow else _crossing(priced, limit, low, high)
        n = min(max(guess, low + 1), high - 1)
    return low, priced


def _crossing(priced: Mapping[int, float], limit: float, low: int, high: int) -> int:
    """Return where the curve through the priced points crosses the limit."""
    known = sorted(((n, p) for n, p in priced.items() if np.isfinite(p)), key=lambda x: (abs(x[1] - limit), x[0]))
    if len(known) < 2:
        return 2 * low if high == MOST else (low + high) // 2
    n, p = np.array(known[:3]).T
    complex_roots = [complex(r) for r in np.polynomial.Polynomial.fit(n, p - limit, len(n) - 1).roots()]
    roots = [r.real for r in complex_roots if abs(r.imag) < 1e-6 and low - 1 < r.real < high + 1]
    if not roots:
        return 4 * max(low, 1) if high == MOST else (low + high) // 2
    return int(np.floor(max(roots) + 1e-9))


# --- what would help

#: With a vocabulary of 50,257, rows of the head's products are not aligned, so a GPU cannot use its usual kernels.
ALIGNED = "sizes of products that are multiples of 8 (a padded vocabulary)"


def what_if(library: Library, spec: Spec, batch: int) -> list[dict[str, Any]]:
    """Return [{"what", "step_seconds", "ratio", "fits"}], best first; ratio: new to old step time."""
    now = price(library, spec, batch)

    def answer(what: str, priced: Priced) -> dict[str, Any]:
        seconds = priced.step_seconds
        return {"what": what, "step_seconds": seconds, "ratio": seconds / now.step_seconds, "fits": priced.fits}

    found = [answer(what, price(replace(library, device=d), spec, batch)) for what, d in _others(library.device)]
    for what, one in _specs(spec):
        with contextlib.suppress(ShardcError):  # compile may refuse a variant
            found.append(answer(what, price(library, one, batch)))
    found = [x for x in found if x["what"] != ALIGNED or x["ratio"] < 1]  # only if some sizes are not multiples
    return sorted(found, key=lambda x: x["ratio"])


def _specs(spec: Spec) -> Iterator[tuple[str, Spec]]:
    """Yield variants of the spec with less to compute or to move, each with a description."""
    now = spec.to_dict()
    if spec.checkpoint:
        yield "nothing computed again (no checkpoint:)", Spec.load({k: v for k, v in now.items() if k != "checkpoint"})
    if spec.execution.compile == "none":
        execution = {**spec.execution.model_dump(), "compile": "layers"}
        yield "element-wise work compiled (execution: {compile: layers})", Spec.load({**now, "execution": execution})


def _others(d: Device) -> Iterator[tuple[str, Device]]:
    """Yield devices that are twice as good in one respect, then the other known GPUs."""

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


# --- clusters


def check_prices(prices: Mapping[str, float], names: Sequence[str]) -> None:
    """Raise ShardcError for a price that is not above 0, or of a device that is not planned for."""
    for name, hourly in prices.items():
        if name not in names:
            raise ShardcError(f"a price of {name!r}, which is not planned for", where="--price", fix=f"one of {names}")
        if not hourly > 0:
            raise ShardcError(f"{hourly} is no price of an hour", where="--price", fix="a number above 0, such as 2.5")


def best_cluster(plans: Sequence[Plan], prices: Mapping[str, float]) -> Plan:
    """Return the plan of the best cluster; its answers list all. prices: of a device-hour, by device name."""
    found = []
    for plan in plans:
        a, c = plan.target, plan.candidates[0] if plan.candidates else None
        fits = c is not None and c.fits
        one: dict[str, Any] = {"device": a.device.name, "devices": a.devices, "fits": fits}
        if c is not None and fits:
            one |= {"step_seconds": c.step_seconds, "mfu": c.mfu, "rows_per_second": c.rows_per_second}
            if a.device.name in prices:
                hourly = a.devices * prices[a.device.name]
                one |= {"price_per_hour": hourly, "price_per_row": hourly / 3600 / c.rows_per_second}
                if a.sequence:
                    one["price_per_million_tokens"] = one["price_per_row"] / a.sequence * 1e6
        found.append((plan, one))
    every = all("price_per_row" in one for _, one in found if one["fits"])
    by, sign = ("price_per_row", 1) if every else ("rows_per_second", -1)
    found.sort(key=lambda x: (not x[1]["fits"], sign * x[1].get(by, 0.0)))
    plan, one = found[0]
    answer = {"what": "the cheapest" if every else "the fastest", "value": one["device"] if one["fits"] else None}
    return replace(plan, answers={**plan.answers, "clusters": {**answer, "clusters": [x for _, x in found]}})
