"""What every process of `shardc generate` does: load the program, take the weights, generate."""

from __future__ import annotations

import time
from typing import Any

from shardc.cli.job import Job, collect_as_usual, joined, weights_of


def run(job: Job) -> dict[str, Any]:
    """Generate. Returns the summary: the new tokens of each prompt, and seconds. Collective over the world."""
    file, program, mesh, _ = joined(job)
    with mesh.together("taking the weights"):
        forward = program.forward(file.build, weights=weights_of(job, file, program), seed=job.settings.seed, mesh=mesh)
    if mesh.rank == 0 and not job.quiet:
        print("\n".join(forward.engine.weight_notes or [file.note] * bool(file.note)), flush=True)
    with mesh.together("generating"):
        collect_as_usual()
        start = time.perf_counter()
        tokens = forward.generate(job.prompts, **job.generate)
        seconds = time.perf_counter() - start
    return {
        "model": program.meta.get("model"),
        "mesh": dict(program.mesh.axes),
        "tokens": tokens,
        "seconds": round(seconds, 3),
    }
