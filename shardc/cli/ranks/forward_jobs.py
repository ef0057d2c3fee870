"""Do the work of each process of `shardc score` and `generate`: load, take the weights, run forward."""

from __future__ import annotations

import itertools
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from shardc.api import Program
from shardc.cli.common import json_text
from shardc.cli.model_file import ModelFile
from shardc.cli.ranks import training_data
from shardc.cli.ranks.job import Job, joined, weights_of
from shardc.collector import collect_as_usual
from shardc.errors import ShardcError
from shardc.runtime.mesh import TorchMesh
from shardc.runtime.step.evaluation import NoBatchesError
from shardc.runtime.step.forward import Forward


def _open_job(job: Job) -> tuple[ModelFile, Program, TorchMesh, Forward]:
    """Return the model file, the program, this rank's mesh, and the program with weights. Collective."""
    file, program, mesh = joined(job)
    with mesh.together("taking the weights"):
        weights = weights_of(job, file, program)
        return file, program, mesh, program.forward(file.build, weights=weights, seed=job.settings.seed, mesh=mesh)


def generate(job: Job) -> dict[str, Any]:
    """Generate; return a summary with the new tokens of each prompt, and seconds. Collective."""
    file, program, mesh, forward = _open_job(job)
    if mesh.rank == 0 and not job.quiet:
        print("\n".join(forward.weight_notes or [file.note] * bool(file.note)), flush=True)
    with mesh.together("generating"):
        collect_as_usual()
        start = time.perf_counter()
        tokens = forward.generate(job.prompts, **job.generate)
        seconds = round(time.perf_counter() - start, 3)
    return {"model": program.meta.get("model"), "mesh": dict(program.mesh.axes), "tokens": tokens, "seconds": seconds}


def score(job: Job) -> dict[str, Any]:
    """Score data and write a line for each row; return tokens, log-probability, perplexity. Collective."""
    file, program, mesh, scorer = _open_job(job)
    with mesh.together("opening the data"):
        seed, fix = job.settings.seed, "name another --split; or return the data to score"
        data = training_data.needed(scorer, file, job.split, seed, whole=True, where=job.model, fix=fix)
    first = mesh.rank == 0
    notes = [*(scorer.weight_notes or [file.note] * bool(file.note)), f"data: {data.description}"]
    if first and not job.quiet:
        print("\n".join(notes), flush=True)
    collect_as_usual()
    with mesh.together("scoring"), Path(job.rows).open("w") if job.rows and first else nullcontext() as rows:
        numbers = itertools.count()

        def write(scores: Tensor) -> None:  # a line for each row; all ranks call it, and the first one has the file
            if rows is None:
                return
            for row in scores.double().flatten(1) if scores.ndim > 1 else scores.double().unsqueeze(1):
                line = {"row": next(numbers), "logprob": float(row.sum()), "scores": row.tolist()}
                rows.write(json_text(line) + "\n")

        try:
            scores = scorer.score_all(data.one_epoch(), local=data.local, each=write if job.rows else None)
        except NoBatchesError:
            fault, fix = f"data({job.split!r}) has no batch", "return the data to score"
            raise ShardcError(fault, where=job.model, fix=fix) from None
    about = {"model": program.meta.get("model"), "mesh": dict(program.mesh.axes)}
    return {**about, **scores, "rows": job.rows or None}
