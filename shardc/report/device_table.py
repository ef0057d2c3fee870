"""Format the table of `shardc device`: one line for each device."""

from __future__ import annotations

from collections.abc import Iterable

from shardc.cost.measured.device_file import MEASURED
from shardc.ir.units import si, size
from shardc.machine.device import Device
from shardc.report.aligned import aligned

HEAD = ("device", "memory", "bf16", "memory rate", "link in node", "link between", "node", "source")


def device_table(devices: Iterable[Device]) -> str:
    rows = [HEAD, *map(_cells, devices)]
    lines = aligned(rows, "<>>>>>><")
    missing = [name for name in MEASURED if name not in {row[0] for row in rows}]
    if missing:
        lines.append(f"{' and '.join(missing)}: not measured on this machine yet (shardc device --measure)")
    return "\n".join(lines)


def _cells(d: Device) -> tuple[str, ...]:
    flops = d.flops.get("bfloat16", min(d.flops.values()))
    rates = (f"{size(n)}/s" for n in (d.bandwidth, d.within.bandwidth, d.between.bandwidth))
    return (d.name, size(d.memory), si(flops, "FLOP/s"), *rates, str(d.node), d.source.partition(". ")[0])
