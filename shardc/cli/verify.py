"""Define `shardc verify`: prove a program equal to one device, or compare one step of all ranks."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shardc.cli import common
from shardc.cli.options import Named, names_program


@names_program()
def command(
    named: Named,
    seed: Annotated[int, typer.Option(help="seed of the random weights and inputs")] = 0,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="also compare the compiled step with the same step run line by line")
    ] = False,
    static: Annotated[
        bool, typer.Option("--static", help="prove it without running: any number of ranks, no weights, no devices")
    ] = False,
) -> None:
    """Run a step of all ranks in this process, in float64; compare loss and gradients with one device.

    With --static nothing runs: each line of a rank's program is proven to compute its part of the model's work.
    """
    with common.reporting(named.debug, named.as_json) as show:
        program = common.program_of(named, as_compiled=True)
        if static:
            from shardc.verify.static.assumptions import ASSUMPTIONS

            with common.console.status(f"proving the program of {program.mesh.world} ranks"):
                proof = program.prove()
            gaps = [{"where": g.where, "what": g.what, "line": g.line, "model": g.source} for g in proof.gaps]
            summary = {"ok": proof.ok, "lines": proof.lines, "seconds": proof.seconds, "gaps": gaps}
            show(json.dumps({**summary, "assumed": [a.name for a in ASSUMPTIONS]}) if named.as_json else str(proof))
            raise typer.Exit(0 if proof.ok else 1)
        with common.console.status(f"running {program.mesh.world} ranks in float64"):
            report = program.verify(seed=seed, compiled=compiled)
        if named.as_json:
            document = {
                "ok": report.ok,
                "checked": report.checked,
                "worst": report.worst,
                "seconds": report.seconds,
                "compiled": report.compiled,
                "findings": [{"where": f.where, "what": f.what, "fix": f.fix} for f in report.findings],
            }
            show(json.dumps(document))
        else:
            show(str(report))
        raise typer.Exit(0 if report.ok else 1)
