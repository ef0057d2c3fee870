"""`shardc score`: log-probabilities and perplexity of data, with one process a rank as `shardc run` has them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardc.cli import compile_once, lasting_output
from shardc.cli import run as training
from shardc.cli.common import (
    BatchOption,
    DebugOption,
    JsonOption,
    MeshOption,
    ModelOption,
    SeqOption,
    SetOption,
    Source,
    SpecFile,
    TrustOption,
    check_outputs,
    is_artifact,
    model_of,
    program_of,
    reporting,
    say_whose,
)
from shardc.cli.run_folder import run_folder
from shardc.errors import ShardcError

if TYPE_CHECKING:
    from shardc.api import Program


class Split(str, Enum):
    """What data(split) is asked for."""

    valid = "valid"
    train = "train"


def command(
    model: Source,
    spec: SpecFile = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="score with these: a folder or file of safetensors, a torch file, or what --save wrote"),
    ] = None,
    split: Annotated[Split, typer.Option(help="what data(split) of the model file is asked for")] = Split.valid,
    rows: Annotated[Path | None, typer.Option(help="file for the scores of each row, one JSON document a line")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="processes on this machine; default: what the mesh needs")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of weights that no file has, and of data()")] = 0,
    mesh: MeshOption = None,
    set_: SetOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    trust: TrustOption = False,
    model_: ModelOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Score: the log-probability of each target of the loss, and the perplexity, over all of data('valid')."""
    from shardc.cli import worker
    from shardc.cli.job import Job
    from shardc.runtime import launch
    from shardc.spec import Run

    weights, rows = (x.expanduser() if x else None for x in (weights, rows))
    joined = False
    with reporting(debug, as_json) as show, ExitStack() as stack:
        folder = stack.enter_context(run_folder())
        launch.join_slurm()
        joined = launch.in_world()
        lasting_output.install(tell=as_json or joined)
        check_outputs(files={"--rows": rows})
        training.check_weights(weights)

        def compiled(world: int | None) -> Program:
            return program_of(
                model,
                spec,
                mesh,
                set_,
                batch,
                seq,
                trust=trust,
                quiet=as_json,
                world=world,
                model=model_,
                as_compiled=True,
                score=not is_artifact(model),
            )

        program, world = stack.enter_context(compile_once.in_world(model, nproc, compiled))
        if not program.scores:
            fault, fix = "this folder's program gives no scores", "compile it for them: shardc compile --score -o DIR"
            raise ShardcError(fault, where=model, fix=fix)
        ref = model_ or (model_of(program.meta) if is_artifact(model) else program.meta["model_ref"])
        training.check_ranks(program, ref, model, world)
        if is_artifact(model):
            artifact = Path(model)
            say_whose(model, "" if model_ else ref, {})
        else:
            artifact = folder / "program"
            program.save(artifact)
        example = program.meta.get("example", {})
        job = Job(
            program=str(artifact),
            model=ref,
            batch=example.get("batch"),
            seq=example.get("seq"),
            run=Run(seed=seed).model_dump(),
            weights=str(weights.resolve() if weights else ""),
            quiet=as_json,
            result=str(folder / "result.json"),
            trust=trust,
            progress="" if joined else str(folder),
            joined=joined,
            debug=debug,
            split=split.value,
            rows=str(rows.resolve() if rows else ""),
        )
        status = training.start(job, folder, program, show)
        result = Path(job.result)
        if status == 0 and result.exists():
            found = json.loads(result.read_text())
            at = f"; scores of each row in {rows}" if rows else ""
            text = f"{found['tokens']:,.0f} targets: log-probability {found['logprob']:.4f}, perplexity"
            show(json.dumps(found) if as_json else f"{text} {found['perplexity']:.4f}{at}")
    if joined:
        worker.leave(status)
    raise typer.Exit(status)
