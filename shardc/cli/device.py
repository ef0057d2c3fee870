"""`shardc device`: which devices there are, what one is like, what this machine is like."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardc.cost.device import MEASURED, Device, measured, names
from shardc.cost.device import device as described
from shardc.errors import ShardcError


def measured_here(which: str | None, output: Path | None, tell: Callable[[str], None]) -> Path:
    """Measure this machine's cpu or cuda; where it is written. Raises ShardcError for anything else, and for cuda where
    there is none.
    """
    import torch

    from shardc.cost.measure import measure as found

    if which not in (None, *MEASURED):
        raise ShardcError(
            f"only this machine can be measured, not {which!r}", where="--measure", fix="shardc device cpu --measure"
        )
    if which == "cuda" and not torch.cuda.is_available():
        raise ShardcError("torch finds no GPU here", where="--measure", fix="shardc device cpu --measure")
    text = (device := found("cuda" if which == "cuda" else "cpu" if which else None, tell)).to_yaml()
    path = output or measured(device.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def show(which: str | Path, as_json: bool) -> str:
    """One device: its file, with units and source."""
    device = described(which)
    return json.dumps(_row(device)) if as_json else device.to_yaml()


def listed(as_json: bool) -> str:
    """All that can be named: of this package, and those of this machine that have been measured."""
    known = [described(n) for n in (*names(), *(n for n in MEASURED if measured(n).is_file()))]
    if as_json:
        return json.dumps([_row(d) for d in known])
    rows = [
        ("device", "memory", "bf16 flop/s", "memory/s", "link/s in node", "link/s between", "node", "source"),
        *map(_cells, known),
    ]
    missing = [n for n in MEASURED if not measured(n).is_file()]
    notes = [f"{' and '.join(missing)}: not measured on this machine yet (shardc device --measure)"] if missing else []
    return "\n".join([*_columns(rows), *notes])


def _row(device: Device) -> dict[str, Any]:
    return device.model_dump()


def _cells(d: Device) -> tuple[str, ...]:
    flops = d.flops.get("bfloat16", min(d.flops.values()))
    numbers = (f"{n / 1e9:,.4g} G" for n in (d.memory, flops, d.bandwidth, d.within.bandwidth, d.between.bandwidth))
    return (d.name, *numbers, str(d.node), d.source)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]]) for row in rows]
