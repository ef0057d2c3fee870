"""Define `shardc plan`: search the fastest spec; print a table and answers, write the best spec."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardc.cli.common import check_outputs, is_artifact, print_error, progress, reporting
from shardc.cli.options import BatchOption, DebugOption, JsonOption, LengthsOption, SeqOption, option
from shardc.errors import ShardcError
from shardc.optional import needed

if TYPE_CHECKING:
    from shardc.plan import Plan

#: Columns of a table that is written to a file.
WIDE = 200
#: Names of the work that is done before pricing.
PREPARING = ("loading the model", "capturing", "balancing rows")


def command(
    model: Annotated[str, typer.Argument(help="model.py, model.py:builder, or hf:config.json", show_default=False)],
    devices: Annotated[
        int | None, option("number of devices (default: of --given, or `nodes` of a device file)")
    ] = None,
    device: Annotated[
        list[str] | None,
        option(
            "a name that `shardc device` lists, or a YAML file (default: of --given, else h100-80g); repeat to find "
            "the best of several"
        ),
    ] = None,
    price: Annotated[
        list[str] | None, option("price of one device for an hour, e.g. h100-80g=2.5: the cheapest --device is best")
    ] = None,
    output: Annotated[Path | None, option("write the best spec, annotated with why", "-o", "--output")] = None,
    html: Annotated[
        Path | None, option("write a page: the best spec, the plot, every priced spec, why, what would help")
    ] = None,
    given: Annotated[
        list[Path] | None, option("price only this spec, without a search; repeat to compare several")
    ] = None,
    global_batch: Annotated[int | None, option("rows of a step (default: those that batch() gives)")] = None,
    precision: Annotated[str, option("bfloat16 | float16 | float32 | pure-bfloat16 | model")] = "bfloat16",
    largest: Annotated[str | None, option("batch | sequence | model: also report how large it may be")] = None,
    fewest: Annotated[bool, option("also report the fewest devices that fit")] = False,
    what_if: Annotated[bool, option("also price it on other devices, without recomputation, and compiled")] = False,
    tokens: Annotated[float | None, option("also answer how long so many tokens take, e.g. 15e12")] = None,
    headroom: Annotated[
        float, option("share of a device's memory to leave (default: none), beside what libraries take")
    ] = 0.0,
    lengths: LengthsOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the spec that trains a model fastest on so many devices, by the cost model alone.

    Searches meshes, ZeRO, recomputation and schedules.
    """
    with reporting(debug, as_json) as show:
        check_outputs({"--output": output, "--html": html})
        if is_artifact(model):
            fix = "name a model file; `shardc inspect DIR --memory` prices a compiled one"
            raise ShardcError("a compiled DIR already has its spec", where=model, fix=fix)
        with progress(PREPARING[0], quiet=as_json) as report:

            def on(subject: str, done: int, total: int) -> None:
                report(subject if subject in PREPARING else f"pricing {subject}", done, total)

            import shardc
            from shardc.cli import model_file

            on("loading the model", 0, 0)
            file = model_file.load(model, batch=batch, seq=seq)
            on("capturing", 0, 0)
            plan = shardc.plan(
                file.on_meta(),
                file.batch,
                loss=file.loss,
                name=model,
                devices=devices,
                device=device[0] if device is not None and len(device) == 1 else device or None,
                prices=_prices(price or []),
                global_batch=global_batch,
                precision=precision,
                headroom=headroom,
                given=given or None,
                largest=largest,  # type: ignore[arg-type]  # plan checks it
                fewest=fewest,
                what_if=what_if,
                tokens=tokens,
                on=on,
            )
            gain = None
            if lengths is not None:
                on("balancing rows", 0, 0)
                gain = needed("rows", "report", "gain_of_plan")(plan, lengths, file)
        fits = bool(plan.candidates) and plan.candidates[0].fits
        failure = plan.lacking() if not fits and not given else None
        if output and fits:
            plan.save(output)
        if html:
            html.write_text(plan.html(), encoding="utf-8")
        errors = {"errors": failure.to_json()} if failure else {}
        written = [str(file) for file in (output if fits else None, html) if file]
        if not as_json:
            _print(plan, given=len(given or ()) == 1)
        shown = [*([str(gain)] if gain is not None else []), *(f"written to {file}" for file in written)]
        balance = {"lengths": gain.to_json()} if gain is not None else {}
        show(
            "\n".join(shown),
            lambda: {**plan.to_json(), **balance, "output": str(output) if output and fits else None, **errors},
        )
        if failure:
            for text in failure.texts():
                print_error(f"error {text}")
    raise typer.Exit(0 if fits else 1)


def _prices(said: list[str]) -> dict[str, float]:
    """Parse the --price options: h100-80g=2.5 becomes {"h100-80g": 2.5}."""
    prices = {}
    for text in said:
        name, _, number = text.partition("=")
        try:
            prices[name] = float(number)
        except ValueError:
            fault = f"must be NAME=PRICE, not {text!r}"
            raise ShardcError(fault, where="--price", fix="--price h100-80g=2.5") from None
    return prices


def _print(plan: Plan, *, given: bool) -> None:
    """Print the table of candidates, or the parts of the one given, and the answers, on stdout."""
    from shardc.plan.table import answer as in_words
    from shardc.plan.table import breakdown, heading, helpful, of_clusters, table, waterfall

    out = Console(highlight=False)
    plain = not out.is_terminal
    if plain:
        out.width = WIDE
    if given:
        out.print(heading(plan))
        out.print(breakdown(plan.candidates[0], plain=plain))
        out.print(waterfall(plan.candidates[0], plain=plain))
    else:
        out.print(table(plan, plain=plain))
    if plan.what_if:
        out.print(helpful(plan))
    for name, answer in plan.answers.items():
        out.print(of_clusters(answer) if name == "clusters" else ": ".join(in_words(name, answer)))
