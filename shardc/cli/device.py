"""Define `shardc device`: list the devices that programs are priced for, show or measure one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from shardc.cli.common import check_outputs, console, progress, reporting
from shardc.cli.options import DebugOption, JsonOption, option
from shardc.errors import ShardcError

if TYPE_CHECKING:
    from shardc.cost import Device


def command(
    which: Annotated[
        str | None,
        typer.Argument(help="a name or a YAML file; cpu, cuda: this machine's, once measured", show_default=False),
    ] = None,
    measure: Annotated[bool, option("measure this machine's cpu or cuda (default: cuda if it is there)")] = False,
    processes: Annotated[
        int | None, option("with --measure: number of processes on a CPU, each a device (default: 2)", min=2)
    ] = None,
    output: Annotated[
        Path | None, option("with --measure: write this file, not that of `--device cpu`", "-o", "--output")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List devices that programs are priced for; show one with its sources; measure this machine."""
    from shardc.cost import device, known_devices

    with reporting(debug, as_json) as show:
        name: str | Path | None = which
        if measure:
            check_outputs(folders={"--output": output.parent if output else None})
            with progress("measuring", quiet=as_json) as report:
                name = _measure(which, output, processes, lambda subject: report(f"measuring {subject}", 0, 0))
            console.print(f"written to {name}")
        elif output:
            raise ShardcError("-o names the file that --measure writes", where="-o", fix="add --measure")
        if name:
            shown = device(name)
            show(shown.to_yaml(), shown.model_dump())
        else:
            show(_table(known_devices()), [d.model_dump() for d in known_devices()])


def _table(devices: Iterable[Device]) -> str:
    """Return a line for each device."""
    from shardc.cost.measured.device_file import MEASURED
    from shardc.ir.units import si, size
    from shardc.report.aligned import aligned

    rows = [["device", "memory", "bf16", "memory rate", "link in node", "link between", "node", "source"]]
    for d in devices:
        flops = d.flops.get("bfloat16", min(d.flops.values()))
        rates = (f"{size(n)}/s" for n in (d.bandwidth, d.within.bandwidth, d.between.bandwidth))
        rows.append([d.name, size(d.memory), si(flops, "FLOP/s"), *rates, str(d.node), d.source.partition(". ")[0]])
    lines = aligned(rows, "<>>>>>><")
    if missing := [name for name in MEASURED if name not in {row[0] for row in rows}]:
        lines.append(f"{' and '.join(missing)}: not measured on this machine yet (shardc device --measure)")
    return "\n".join(lines)


def _measure(which: str | None, output: Path | None, processes: int | None, on: Callable[[str], None]) -> Path:
    """Measure this machine's cpu or cuda. Return the file with its numbers."""
    import torch

    from shardc.cost.measured.device_file import MEASURED, measured_file
    from shardc.cost.measured.measure import Kind, measure

    fix = "shardc device cpu --measure"
    if which not in (None, *MEASURED):
        raise ShardcError(f"only this machine can be measured, not {which!r}", where="--measure", fix=fix)
    if which == "cuda" and not torch.cuda.is_available():
        raise ShardcError("torch finds no GPU here", where="--measure", fix=fix)
    device = measure(cast(Kind | None, which), on, processes)
    path = output or measured_file(device.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(device.to_yaml())
    return path
