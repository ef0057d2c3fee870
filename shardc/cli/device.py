"""`shardc device`: list the devices that programs are priced for, show one, measure this machine, learn from runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, cast

import typer

from shardc.cli.common import DebugOption, JsonOption, check_outputs, console, progress, reporting
from shardc.errors import ShardcError


def command(
    which: Annotated[
        str | None,
        typer.Argument(help="a name or a YAML file; cpu, cuda: this machine's, once measured", show_default=False),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="measure this machine's cpu or cuda (default: cuda if it is there)")
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(min=2, help="with --measure: of a CPU, so many processes at once, each a device (default: 2)"),
    ] = None,
    fit: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN",
            help="numbers from a run's timed ops (`shardc run --log RUN --breakdown 5`), for those of WHICH; of several"
            " runs, if given several times",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="with --measure and --fit: write this file, not that of `--device cpu`"),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List devices that programs are priced for; show one and where its numbers are from; measure this machine; learn
    from its runs.
    """
    from shardc.cost import device, known_devices
    from shardc.report.device_table import device_table

    with reporting(debug, as_json) as show:
        name: str | Path | None = which
        if measure:
            check_outputs(folders={"--output": output.parent if output else None})
            with progress("measuring", quiet=as_json) as told:
                name = _measure(which, output, processes, lambda what: told(f"measuring {what}", 0, 0))
            console.print(f"written to {name}")
        elif fit:
            check_outputs(folders={"--output": output.parent if output else None})
            name, how_well = _fit(which, fit, output)
            console.print(how_well, markup=False)
            console.print(f"written to {name}")
        elif output:
            what = "-o names the file that --measure and --fit write"
            raise ShardcError(what, where="-o", fix="add --measure, or --fit RUN")
        if name:
            shown = device(name)
            show(json.dumps(shown.model_dump()) if as_json else shown.to_yaml())
        elif as_json:
            show(json.dumps([d.model_dump() for d in known_devices()]))
        else:
            show(device_table(known_devices()))


def _measure(which: str | None, output: Path | None, processes: int | None, on: Callable[[str], None]) -> Path:
    """Measure this machine's cpu or cuda. Returns the file that says what it can do."""
    import torch

    from shardc.compile import compile as compiled
    from shardc.cost.device_file import MEASURED, measured_file
    from shardc.cost.measure import Kind, measure

    if which not in (None, *MEASURED):
        raise ShardcError(
            f"only this machine can be measured, not {which!r}", where="--measure", fix="shardc device cpu --measure"
        )
    if which == "cuda" and not torch.cuda.is_available():
        raise ShardcError("torch finds no GPU here", where="--measure", fix="shardc device cpu --measure")
    device = measure(cast(Kind | None, which), on, processes, compiled)
    path = output or measured_file(device.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(device.to_yaml())
    return path


def _fit(which: str | None, runs: list[Path], output: Path | None) -> tuple[Path, str]:
    """A device's numbers from runs. Returns the file that has them, and how well they foretell what was held back."""
    from shardc.cost.device_file import MEASURED, device, measured_file
    from shardc.cost.run_log import fitted_to, read

    logs = [read(run) for run in runs]
    kinds = {step.kind for log in logs for step in log.timed}
    if len(kinds) > 1:
        what = f"some of these runs were on {' and some on '.join(sorted(kinds))}"
        raise ShardcError(what, where="--fit", fix="fit each kind of device by itself")
    base = device(which or kinds.pop())
    if which not in (None, *MEASURED) and output is None:
        raise ShardcError(f"nothing says where {which}'s new numbers go", where="--fit", fix="-o FILE")
    found = fitted_to(base, logs)
    path = output or measured_file(base.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(found.device.to_yaml())
    return path, str(found)
