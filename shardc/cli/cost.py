"""Define `shardc cost`: show the predicted seconds of a step by cause, and compare them with a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shardc.cli import common
from shardc.cli.options import LengthsOption, Named, names_program, option
from shardc.optional import needed

if TYPE_CHECKING:
    from shardc.api import Program
    from shardc.cost import Cost, Device


@names_program("forward", "score")
def command(
    named: Named,
    compare: Annotated[
        Path | None, option("folder of `shardc run --log RUN --breakdown 5`: compare with prediction", metavar="RUN")
    ] = None,
    device: Annotated[
        str | None,
        option(
            "a name that `shardc device` lists, or a YAML file (default: the spec's; with --compare this machine's, "
            "once measured)"
        ),
    ] = None,
    lengths: LengthsOption = None,
) -> None:
    """Show where the time of a step goes, line by line, and where a run differs from the prediction."""
    with common.reporting(named.debug, named.as_json) as show:
        from shardc.cost import waterfall
        from shardc.cost.measured import run_log
        from shardc.cost.measured.device_file import chosen
        from shardc.report import comparison

        run = run_log.read(compare) if compare is not None else None
        program = common.program_of(named, as_compiled=True)
        if device is None and run is not None and program.spec.device is None:
            device = run.timed[0].kind
        if lengths is not None:
            file = common.file_of(program)
            gain = needed("rows", "report", "gain")(program, lengths, file, chosen(device, program.spec))
            show(str(gain), gain.to_json)
            return
        cost = _cost(program, chosen(device, program.spec), compiled=common.is_artifact(named.model))
        if run is not None:
            rows = waterfall.compare(cost, run)
            show(comparison.comparison_table(rows), comparison.comparison_json(rows))
        else:
            ranks = [{"at": r.at, "lines": waterfall.predicted(cost, i)} for i, r in enumerate(cost.ranks)]
            step = {"device": cost.device.name, "step_seconds": cost.step_seconds, "ranks": ranks}
            show(comparison.waterfall_table(cost), step)


def _cost(program: Program, on: Device, *, compiled: bool) -> Cost:
    """Price a step as `shardc run` trains: with the optimizer, the gradient norm and the spec's clipping.

    The model file of a compiled folder is not imported: the optimizer is the spec's then, or AdamW.
    """
    from shardc.cost.step import cost
    from shardc.runtime.step.engine_optimizer import of_spec

    optimizer = None if compiled else common.file_of(program).optimizer
    clip, norm = program.spec.run.clip, not program.forward_only
    return cost(
        program, on, optimizer or of_spec(program), on=lambda rank, done, total: None, clip_norm=clip, norm=norm
    )
