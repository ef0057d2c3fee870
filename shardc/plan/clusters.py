"""Which of several clusters is best for a model: the cheapest, where all have a price, else the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardc.errors import ShardcError
from shardc.plan.result import Plan


def priced(prices: Mapping[str, float], names: Sequence[str]) -> None:
    """Raises ShardcError for prices that are none, or of devices that nobody asked for."""
    for name, price in prices.items():
        if name not in names:
            raise ShardcError(f"a price of {name!r}, which is not planned for", where="--price", fix=f"one of {names}")
        if not price > 0:
            raise ShardcError(f"{price} is no price of an hour", where="--price", fix="a number above 0, such as 2.5")


def best(plans: Sequence[Plan], prices: Mapping[str, float]) -> Plan:
    """The plan of the best cluster, with all of them among its answers: `clusters`, the best first. prices: of an hour
    of one device, by the device's name.
    """
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

    def rank(x: tuple[Plan, dict[str, Any]]) -> tuple[bool, float]:
        one = x[1]
        return not one["fits"], 0.0 if not one["fits"] else one["price_per_row"] if every else -one["rows_per_second"]

    found.sort(key=rank)
    plan, one = found[0]
    answer = {"what": "the cheapest" if every else "the fastest", "value": one["device"] if one["fits"] else None}
    return replace(plan, answers={**plan.answers, "clusters": {**answer, "clusters": [x for _, x in found]}})
