"""Define the job that processes of `shardc run`, `score` and `generate` read, and how they begin it."""

from __future__ import annotations

import dataclasses
import functools
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shardc.api import Program, load
from shardc.cli import model_file
from shardc.cli.model_file import ModelFile
from shardc.optional import registered
from shardc.recompile import Resizer
from shardc.runtime.mesh import TorchMesh
from shardc.runtime.mesh.link_check import check_links
from shardc.runtime.stage.communicators import runtime_mesh
from shardc.runtime.state.checkpoint_folder import checkpoints_in
from shardc.runtime.storage.disk_calls import expanded
from shardc.spec.run_section import Run
from shardc.torch_private import flight_record


class Job(BaseModel, frozen=True):
    """The work of a run's processes, as `shardc run`, `score` or `generate` writes it to a file.

    program: artifact folder. model: model reference. settings: the spec's section `run:`, updated with command-line
    options. example: sizes of an hf: model's example batch, and its data. weights: file or folder to begin from, or "":
    those of the model file. quiet: print no lines (--json). folder: the temporary folder of the run. trust: run an
    edited artifact. joined: torchrun or Slurm started the processes. debug: tracebacks show all frames, not only those
    of the user's code. overwrite: replace the log. lr: the learning rate in place of the spec's.

    resume: folder, or "". load: the other arguments of Engine.load. split: split of the data to score
    (shardc.cli.ranks.forward_jobs); "": train. rows: file for the scores of each row, or "". prompts: token ids of each
    prompt to continue; generate: the arguments of Engine.generate.
    """

    program: str
    model: str
    settings: Run = Run()
    example: dict[str, int | str] = {}
    weights: str = ""
    quiet: bool = False
    folder: str = ""
    trust: bool = False
    joined: bool = False
    debug: bool = False
    overwrite: bool = False
    lr: float | None = None
    resume: str = ""
    load: dict[str, bool] = {}
    split: str = ""
    rows: str = ""
    prompts: list[list[int]] = []
    generate: dict[str, Any] = {}

    @property
    def result(self) -> Path:
        """The file to which rank 0 writes the summary."""
        return Path(self.folder) / "result.json"


def joined(job: Job) -> tuple[ModelFile, Program, TorchMesh]:
    """Return the model file, the program, and this rank's mesh. Collective."""
    settings = job.settings
    example: dict[str, Any] = job.example
    file = model_file.load(job.model, **example, seed=settings.seed)
    program = load(job.program, trust=job.trust, as_compiled=True)
    forward = "score" if program.scores else program.forward_only and (file.outputs or True)
    program = dataclasses.replace(program, resize=Resizer(file.on_meta, file.loss, {}, _compiled, forward, file.batch))
    timeout = timedelta(seconds=settings.timeout) if settings.timeout else None
    mesh = runtime_mesh(program, watch=settings.watch, timeout=timeout)
    if settings.check_links:
        for line in check_links(mesh):
            mesh.note(line)
    if settings.log:
        mesh.watch.record = functools.partial(_record, Path(settings.log) / f"flight-rank{mesh.rank}.json")
    return file, program, mesh


def weights_of(job: Job, file: ModelFile, program: Program) -> Any:
    """Return the `weights` for program.engine. Files may have added weights alone: the others are the model file's."""
    if not job.weights:
        return file.weights
    named = expanded(job.weights)
    partial = any(registered("runtime", "weights_of", program.features)) and not checkpoints_in(named)
    return (file.weights, named) if partial else named


def _record(file: Path) -> None:
    """Write this rank's last collectives to a file; called when a rank waits too long for another."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(flight_record())


def _compiled(*args: Any, **options: Any) -> Program:
    """Call shardc.compile.compile, imported late: that takes a second, and few runs need it."""
    from shardc.compile import compile

    return compile(*args, **options)
