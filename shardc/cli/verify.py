"""`shardc verify`: one step of all ranks in this process, compared with one device."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shardc.cli.common import (
    BatchOption,
    DebugOption,
    JsonOption,
    MeshOption,
    SeqOption,
    SetOption,
    Source,
    SpecFile,
    TrustOption,
    console,
    program_of,
    reporting,
)


def command(
    model: Source,
    spec: SpecFile = None,
    mesh: MeshOption = None,
    set_: SetOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    seed: Annotated[int, typer.Option(help="of the random weights and inputs")] = 0,
    trust: TrustOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run one step on all ranks in this process, in float64, and compare loss and every gradient with one device."""
    with reporting(debug, as_json) as show:
        program = program_of(model, spec, mesh, set_, batch, seq, trust=trust, quiet=as_json)
        with console.status(f"running {program.mesh.world} ranks in float64"):
            report = program.verify(seed=seed)
        if as_json:
            document = {
                "ok": report.ok,
                "checked": report.checked,
                "worst": report.worst,
                "seconds": report.seconds,
                "findings": [{"where": f.where, "what": f.what, "fix": f.fix} for f in report.findings],
            }
            show(json.dumps(document))
        else:
            show(str(report))
        raise typer.Exit(0 if report.ok else 1)
