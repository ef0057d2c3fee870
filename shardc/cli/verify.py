"""Define `shardc verify`: prove a program equal to one device, or compare one step of all ranks."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from shardc.cli import common
from shardc.cli.options import Named, names_program, option


@names_program()
def command(
    named: Named,
    seed: Annotated[int, option("seed of the random weights and inputs")] = 0,
    compiled: Annotated[bool, option("also compare the compiled step with the same step run line by line")] = False,
    static: Annotated[bool, option("prove it without running: any number of ranks, no weights, no devices")] = False,
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
            document = {"ok": proof.ok, "lines": proof.lines, "seconds": proof.seconds, "gaps": gaps}
            show(str(proof), {**document, "assumed": [a.name for a in ASSUMPTIONS]})
            raise typer.Exit(0 if proof.ok else 1)
        with common.console.status(f"running {program.mesh.world} ranks in float64"):
            report = program.verify(seed=seed, compiled=compiled)
        show(str(report), {"ok": report.ok, **dataclasses.asdict(report)})
        raise typer.Exit(0 if report.ok else 1)
