"""Make the program and the job of `shardc run`, `score` and `generate`, and start their processes."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardc.cli.common import Show, example_sizes, is_artifact, model_of, print_model_file, program_of, reporting
from shardc.cli.options import Named
from shardc.cli.ranks import lasting_output
from shardc.cli.ranks.compile_once import compiled_once
from shardc.errors import ShardcError

if TYPE_CHECKING:
    from shardc.api import Program
    from shardc.cli.ranks.job import Job
    from shardc.spec import Run

_NAME, _LOCK = "shardc-run-", ".lock"
SAVING = 120.0  # seconds that ranks have for a save when a signal stops the run


@contextmanager
def run_folder() -> Iterator[Path]:
    """Yield a new folder, after the removal of folders that killed runs left. It is removed at the end."""
    from shardc.runtime.state.disk_calls import Lock

    for left in Path(tempfile.gettempdir()).glob(f"{_NAME}*/{_LOCK}"):
        with suppress(OSError):  # it is in use, removed, or of another user
            lock = Lock(left)
            shutil.rmtree(left.parent, ignore_errors=True)
            lock.release()
    with tempfile.TemporaryDirectory(prefix=_NAME) as folder:
        path = Path(folder) / ".new"
        lock = Lock(path)  # locked before it gets the name that others look for
        path.rename(Path(folder) / _LOCK)
        try:
            yield Path(folder)
        finally:
            lock.release()


@contextmanager
def ranks(named: Named, nproc: int | None, weights: Path | None) -> Iterator[Ranks]:
    """Yield the ranks of a command; then exit with their status. Raises ShardcError for wrong `weights`."""
    one_rank = any(name in os.environ for name in ("RANK", "SLURM_PROCID"))
    lasting_output.install(report_loss=named.as_json or one_rank)  # else rank 0, which writes the lines, reports it
    with reporting(named.debug, named.as_json) as show, run_folder() as folder:
        all_ranks = Ranks(named, nproc, weights, show, folder)
        yield all_ranks
    if all_ranks.joined:
        from shardc.cli.ranks import worker

        worker.end_rank(all_ranks.status)
    raise typer.Exit(all_ranks.status)


class Ranks:
    """Starts one process for each rank on this machine, or is a rank of torchrun or Slurm: `joined`.

    show: prints the result. folder: the temporary folder of the run. status: exit status of the last job.
    """

    def __init__(self, named: Named, nproc: int | None, weights: Path | None, show: Show, folder: Path) -> None:
        from shardc.runtime import launch

        self.named, self.show, self.status = named, show, 0
        self.folder, self._nproc = folder, nproc
        launch.join_slurm()
        self.joined = launch.in_world()
        self._weights = _weights(weights)

    def program(self, *, watch: float | None = None, as_compiled: bool = True) -> Program:
        """Return the program for these ranks. Under torchrun and Slurm one process of a machine compiles it.

        watch: seconds after which a rank that the others wait for is named (shardc.runtime.mesh.presence). as_compiled:
        as in `program_of`.
        """
        from shardc.runtime.mesh import presence

        process = presence.begin(*(() if watch is None else (watch,))) if self.joined else None
        world = int(os.environ["WORLD_SIZE"]) if self.joined else self._nproc
        compiled = functools.partial(program_of, self.named, world=world, as_compiled=as_compiled)
        with process.activity.during("compiling") if process is not None else nullcontext():
            once = self.joined and not is_artifact(self.named.model)
            program = compiled_once(self.folder / "program", compiled, self._read) if once else compiled()
            self._program = program
        named = self.named.model_file
        self._ref = named or (model_of(program.meta) if is_artifact(self.named.model) else program.meta["model_ref"])
        if world is not None and world != program.mesh.world:
            fault = f"the mesh {program.mesh} has {program.mesh.world} ranks, not {world}"
            raise ShardcError(fault, where="--nproc", fix="change --mesh, or leave --nproc out")
        if not self._ref:
            raise ShardcError(
                "this artifact has no name of the model file it was compiled from",
                where=self.named.model,
                fix="name it with --model, or compile it with `shardc compile -o DIR`",
            )
        return program

    def _read(self, folder: Path) -> Program:
        """Load the program that another process of this machine has compiled."""
        from shardc.cli import model_file

        if not self.named.model.startswith("hf:"):
            model_file.imported(model_file.path_of(self.named.model))  # it may register ops
        return program_of(Named(str(folder)), as_compiled=True)

    def job(self, run: Run, writes: Mapping[str, str] | None = None, **work: Any) -> Job:
        """Make the job of the processes. writes: folders in the spec of a compiled folder. work: other fields."""
        from shardc.cli.ranks.job import Job

        artifact = Path(self.named.model)
        if not is_artifact(self.named.model):
            artifact = self.folder / "program"
            if not artifact.exists():
                self._program.save(artifact)
        elif os.environ.get("LOCAL_RANK", "0") == "0":
            print_model_file(self.named.model, "" if self.named.model_file else self._ref, writes or {})
        return Job(
            program=str(artifact),
            model=self._ref,
            run=run.model_dump(),
            example=example_sizes(self._program),
            weights=self._weights,
            quiet=self.named.as_json,
            folder=str(self.folder),
            trust=self.named.trust,
            joined=self.joined,
            debug=self.named.debug,
            **work,
        )

    def start(self, job: Job) -> dict[str, Any] | None:
        """Run the job, as this rank of a joined world or in one process for each rank.

        Returns its summary if it succeeded; in a joined world only the first rank has it.
        """
        from shardc.cli import hidden_modules
        from shardc.runtime import launch

        file = self.folder / "job.json"
        file.write_text(json.dumps(vars(job)))
        if self.joined:
            from shardc.cli.ranks import worker

            worker.main(str(file))
        else:
            hidden_modules.check_folder(Path.cwd())
            self.status = launch.launch(
                [sys.executable, "-m", "shardc.cli.ranks.worker", str(file)],
                self._program.mesh,
                folder=self.folder,
                failed_first=lambda errors: self.show(document={"errors": errors}),
                stdout=sys.stderr.fileno() if self.named.as_json else None,
                patience=SAVING,
            )
        done = self.status == 0 and job.result.exists()
        return json.loads(job.result.read_text()) if done else None


def _weights(weights: Path | None) -> str:
    """Return the path of --weights, "" if not set. Raises ShardcError if it has no weights."""
    if weights is None:
        return ""
    from shardc.runtime.state.weight_files import has_weights

    if not has_weights(path := weights.expanduser()):
        fix = "name a .safetensors or .bin file, a folder that has some (with their index), or what --save wrote"
        raise ShardcError(f"there are no weights in {path}", where="--weights", fix=fix)
    return str(path.resolve())
