"""Make the program and the job of `shardc run`, `score` and `generate`, and start their processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardc.cli.common import Show, console, example_sizes, is_artifact, model_of, program_of, reporting
from shardc.cli.options import Named
from shardc.cli.ranks import lasting_output
from shardc.errors import Errors, ShardcError
from shardc.runtime import time_limits

if TYPE_CHECKING:
    from shardc.api import Program
    from shardc.cli.ranks.job import Job
    from shardc.spec import Run

_NAME, _LOCK = "shardc-run-", ".lock"
POLL = 0.1  # seconds between looks into the store


@contextmanager
def run_folder() -> Iterator[Path]:
    """Yield a new folder, after the removal of folders that killed runs left. It is removed at the end."""
    from shardc.runtime.launch import temporary_folder
    from shardc.runtime.storage.disk_calls import Lock

    around = temporary_folder()
    for left in Path(around).glob(f"{_NAME}*/{_LOCK}"):
        with suppress(OSError):  # it is in use, removed, or of another user
            lock = Lock(left)
            shutil.rmtree(left.parent, ignore_errors=True)
            lock.release()
    with tempfile.TemporaryDirectory(prefix=_NAME, dir=around) as folder:
        path = Path(folder) / ".new"
        lock = Lock(path)  # locked before it gets the name that others look for
        path.rename(Path(folder) / _LOCK)
        try:
            yield Path(folder)
        finally:
            lock.release()


@contextmanager
def ranks(named: Named, nproc: int | None, weights: Path | None, watch: float | None = None) -> Iterator[Ranks]:
    """Yield the ranks of a command; then exit with their status. Raises ShardcError for wrong `weights`.

    Under torchrun and Slurm the first process of a machine compiles and makes the job, and the others do it: eight
    processes that compile take eight times as much from the machine that is about to train. watch: seconds after which
    a rank that the others wait for is named (shardc.runtime.mesh.presence).
    """
    one_rank = any(name in os.environ for name in ("RANK", "SLURM_PROCID"))
    with suppress(ValueError):  # outside of the main thread
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request for a checkpoint, before there is anything to save
    lasting_output.install(report_loss=named.as_json or one_rank)  # else rank 0, which writes the lines, reports it
    with reporting(named.debug, named.as_json) as show:
        from shardc.runtime import launch
        from shardc.runtime.mesh import presence

        launch.join_slurm()
        joined = launch.in_world()
        if joined:
            presence.begin(time_limits.NAMED if watch is None else watch)
        if joined and (key := _shared()) and os.environ["LOCAL_RANK"] != "0":
            from shardc.cli.ranks import worker

            if (file := _job_of_first(key)) is not None:
                worker.main(file)
                worker.end_rank()
        with run_folder() as folder:
            all_ranks = Ranks(named, nproc, show, folder, joined)
            try:
                all_ranks.weights = _weights(weights)
                yield all_ranks
            except ShardcError as e:
                all_ranks.publish(e.to_json())
                raise
    if all_ranks.joined:
        from shardc.cli.ranks import worker

        worker.end_rank(all_ranks.status)
    raise typer.Exit(all_ranks.status)


def _shared() -> str:
    """Return the key of the store for the job that one process of this machine makes for all; "" if it is alone."""
    env = os.environ
    if int(env.get("LOCAL_WORLD_SIZE", "1")) == 1 or "LOCAL_RANK" not in env:
        return ""
    # the same for all processes that one launcher has started on one machine
    return f"job/{env.get('GROUP_RANK') or env.get('SLURM_NODEID') or socket.gethostname()}"


def _job_of_first(key: str) -> str | None:
    """Return the file with the job that the first process of this machine has made, or raise its ShardcError.

    None: this process makes a job, too: it cannot read the file (a container with a private temporary folder), or not
    trust it. key: of `_shared`.
    """
    from shardc.runtime.mesh.activity import waiting
    from shardc.runtime.mesh.presence import world_store

    store, _, _ = world_store()
    try:
        with waiting():
            while not store.check([key]):
                time.sleep(POLL)
        made = json.loads(store.get(key))
    except RuntimeError as e:  # the store went with the process that held it
        fault = "rank 0, where the ranks meet, ended while this rank waited for the compiled program"
        raise ShardcError(fault, where="compiling", fix="see the error of rank 0") from e
    if isinstance(made, list):
        errors = Errors()
        errors.found = [ShardcError(**error) for error in made]
        errors.raise_any()
    return made if _is_private(Path(made).parent) else None


def _is_private(folder: Path) -> bool:
    """Return whether only this user can write to the folder: a program is Python code, which is run."""
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077


@dataclass
class Ranks:
    """Starts one process for each rank on this machine, or is a rank of torchrun or Slurm: `joined`.

    show: prints the result. folder: the temporary folder of the run. weights: the path of --weights, or "". status:
    exit status of the last job.
    """

    named: Named
    nproc: int | None
    show: Show
    folder: Path
    joined: bool
    weights: str = ""
    status: int = 0

    def publish(self, made: Any) -> None:
        """Give the other processes of this machine the path of a job, or errors."""
        if self.joined and (key := _shared()) and os.environ["LOCAL_RANK"] == "0":
            from shardc.runtime.mesh.presence import world_store

            world_store()[0].set(key, json.dumps(made))

    def program(self, *, as_compiled: bool = True) -> Program:
        """Return the program for these ranks. as_compiled: as in `program_of`."""
        from shardc.runtime.launch import LEFT_OVER

        world = int(os.environ["WORLD_SIZE"]) if self.joined else self.nproc
        try:
            self._program = program = program_of(self.named, world=world, as_compiled=as_compiled)
        except ShardcError as e:
            if self.joined and "the world has" in e.what:
                raise ShardcError(e.what, where=e.where, fix=f"{e.fix}; or {LEFT_OVER}") from None
            raise
        named = self.named.model_file
        self._ref = named or (model_of(program.meta) if is_artifact(self.named.model) else program.meta["model_ref"])
        if world is not None and world != program.mesh.world:
            fault = f"the mesh {program.mesh} has {program.mesh.world} ranks, not {world}"
            raise ShardcError(fault, where="--nproc", fix="change --mesh, or leave --nproc out")
        if not self._ref:
            fault = "this artifact has no name of the model file it was compiled from"
            fix = "name it with --model, or compile it with `shardc compile -o DIR`"
            raise ShardcError(fault, where=self.named.model, fix=fix)
        return program

    def job(self, run: Run, writes: Mapping[str, str] | None = None, **work: Any) -> Job:
        """Make the job of the processes. writes: folders in the spec of a compiled folder. work: other fields."""
        from shardc.cli import model_file
        from shardc.cli.ranks.job import Job

        artifact = Path(self.named.model)
        if not is_artifact(self.named.model):
            artifact = self.folder / "program"
            self._program.save(artifact)
        elif not self.joined or os.environ.get("LOCAL_RANK", "0") == "0":
            if not self.named.model_file and (file := model_file.path_of(self._ref)):
                console.print(f"importing {file}, which {artifact} names; --model FILE imports another", markup=False)
            for subject, place in (writes or {}).items():
                console.print(f"{subject}: {place}, as the spec in {artifact} says", markup=False)
        return Job(
            program=str(artifact),
            model=self._ref,
            settings=run,
            example=example_sizes(self._program),
            weights=self.weights,
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
        file.write_text(job.model_dump_json())
        if self.joined:
            from shardc.cli.ranks import worker

            self.publish(str(file))
            worker.main(str(file))
        else:
            hidden_modules.check_folder(Path.cwd())
            self.status = launch.launch(
                [sys.executable, "-m", "shardc.cli.ranks.worker", str(file)],
                self._program.mesh,
                folder=self.folder,
                stdout=sys.stderr.fileno() if self.named.as_json else None,
                patience=time_limits.SAVING,
            )
            if (errors := self.folder / launch.ERRORS).exists():
                self.show(document={"errors": json.loads(errors.read_text())})
                errors.unlink()
        done = self.status == 0 and job.result.exists()
        return json.loads(job.result.read_text()) if done else None


def _weights(weights: Path | None) -> str:
    """Return the path of --weights, "" if not set. Raises ShardcError if it has no weights."""
    if weights is None:
        return ""
    from shardc.runtime.state.weight_files import has_weights, no_weights
    from shardc.runtime.storage import disk_calls

    if not has_weights(path := disk_calls.expanded(weights)):
        raise no_weights(path)
    return str(path.resolve())
