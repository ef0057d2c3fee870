"""What every process of `shardc score` does: load the program, take the weights, score the data, write a line a row."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shardc.cli.job import Job, collect_as_usual, joined, weights_of
from shardc.errors import ShardcError
from shardc.runtime.step.engine_forward import NoBatchesError

if TYPE_CHECKING:
    from torch import Tensor


def run(job: Job) -> dict[str, Any]:
    """Score. Returns the summary: tokens, mean log-probability, perplexity. Collective over the world."""
    from shardc.cli import training_data

    file, program, mesh, _ = joined(job)
    with mesh.together("taking the weights"):
        scorer = program.forward(file.build, weights=weights_of(job, file, program), seed=job.settings.seed, mesh=mesh)
    with mesh.together("opening the data"):
        seed = job.settings.seed
        if file.data is None:
            data = training_data.example(file, seed, often="")
        elif (found := training_data.batches(scorer.engine, file, job.split, seed, whole=True)) is not None:
            data = found
        else:
            what, fix = f"data({job.split!r}) returns None", "name the other one, --split; or return what is scored"
            raise ShardcError(what, where=job.model, fix=fix)
    first = mesh.rank == 0
    notes = [*(scorer.engine.weight_notes or [file.note] * bool(file.note)), f"data: {data.description}"]
    if first and not job.quiet:
        print("\n".join(notes), flush=True)
    collect_as_usual()
    with mesh.together("scoring"), Path(job.rows).open("w") if job.rows and first else nullcontext() as rows:
        try:
            scores = scorer.score_all(data.one_epoch(), local=data.local, each=Rows(rows) if job.rows else None)
        except NoBatchesError:
            what, fix = f"data({job.split!r}) has no batch", "return what is to be scored"
            raise ShardcError(what, where=job.model, fix=fix) from None
    return {
        "model": program.meta.get("model"),
        "mesh": dict(program.mesh.axes),
        **scores,
        "rows": job.rows or None,
    }


class Rows:
    """Writes a line for each row of scores: {"row": number, "logprob": sum, "scores": [of each target]}. Called on all
    ranks; the first one has the file.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file, self._count = file, 0

    def __call__(self, scores: Tensor) -> None:
        if self._file is None:
            return
        for row in scores.double().flatten(1) if scores.ndim > 1 else scores.double().unsqueeze(1):
            line = {"row": self._count, "logprob": float(row.sum()), "scores": row.tolist()}
            self._file.write(json.dumps(line) + "\n")
            self._count += 1
