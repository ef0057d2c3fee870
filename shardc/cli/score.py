"""Define `shardc score`: log-probabilities and perplexity of data, with one process for each rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from shardc.cli.common import check_outputs, is_artifact
from shardc.cli.options import Named, NprocOption, names_program, option
from shardc.cli.ranks.make_job import ranks
from shardc.errors import ShardcError


@names_program("forward", "score")
def command(
    named: Named,
    weights: Annotated[
        Path | None, option("weights: a folder or file of safetensors, a torch file, or what --save wrote")
    ] = None,
    split: Annotated[
        Literal["valid", "train"], option("split that is passed to data(split) of the model file")
    ] = "valid",
    rows: Annotated[Path | None, option("file for the scores of each row, one JSON document a line")] = None,
    nproc: NprocOption = None,
    seed: Annotated[int, option("seed of weights that no file has, and of data()", min=0)] = 0,
) -> None:
    """Score: compute the log-probability of each target of the loss, and the perplexity, of all data."""
    from shardc.spec import Run

    rows = rows.expanduser() if rows else None
    with ranks(dataclasses.replace(named, score=not is_artifact(named.model)), nproc, weights) as all_ranks:
        check_outputs(files={"--rows": rows})
        if not all_ranks.program(as_compiled=True).scores:
            fault, fix = ("this program has no scores", "compile it for them: shardc compile --score -o DIR")
            raise ShardcError(fault, where=named.model, fix=fix)
        job = all_ranks.job(Run(seed=seed), split=split, rows=str(rows.resolve() if rows else ""))
        if (scores := all_ranks.start(job)) is not None:
            at = f"; scores of each row in {rows}" if rows else ""
            text = f"{scores['tokens']:,.0f} targets: log-probability {scores['logprob']:.4f}, perplexity"
            all_ranks.show(f"{text} {scores['perplexity']:.4f}{at}", scores)
