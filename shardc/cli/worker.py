"""What every process of `shardc run` does: load the program, make its part of the weights, train, save, evaluate.

Started by shardc.runtime.launch, torchrun or Slurm as `python -m shardc.cli.worker JOB.json`.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from shardc.cli.told_once import for_this_rank
from shardc.errors import ShardcError
from shardc.runtime.state.generations import KEEP, generations
from shardc.runtime.step.failures import OutOfMemoryError, no_memory, out_of_memory

if TYPE_CHECKING:
    from shardc.cli.step_lines import StepLines
    from shardc.cli.training_data import Batches

FIRST_WORD = 3.0  # seconds in which a rank whose data() failed speaks before the others do


@dataclasses.dataclass(frozen=True)
class Job:
    """One run. program: artifact folder. model: model reference. save, resume, log: folders, or "". quiet: no lines
    (--json). weights: file or folder to begin from, or "": what the model file says.

    steps: the step at which the run ends, whatever step it begins at. save_every, eval_every: in steps; 0: at the end.
    keep: checkpoints that stay. last_good: if the last one is damaged, resume from the last that is not.
    nonfinite: what to do where a loss is not finite: "stop", "skip" the update, or "ignore". clip: norm of gradients.
    overwrite: the log begins anew. progress: folder in which rank r keeps `rank<r>` (shardc.runtime.launch.Progress).
    result: file into which rank 0 writes the summary. trust: run an edited artifact. routing: say how tokens are spread
    over experts. watch: seconds after which the rank that the others wait for is named; timeout: seconds that they
    wait; 0: torch's. joined: the processes were started by torchrun or Slurm.
    """

    program: str
    model: str
    batch: int | None = None
    seq: int | None = None
    steps: int = 100
    seed: int = 0
    save: str = ""
    save_every: int = 0
    keep: int = KEEP
    eval_every: int = 0
    clip: float | None = None
    nonfinite: str = "stop"
    overwrite: bool = False
    resume: str = ""
    last_good: bool = False
    weights: str = ""
    log: str = ""
    quiet: bool = False
    result: str = ""
    progress: str = ""
    trust: bool = False
    routing: bool = False
    watch: float = 0
    timeout: float = 0
    joined: bool = False


class Interrupted(Exception):
    """The run was told to stop by a signal, and has saved what there is."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(what)
        self.number = number


def run(job: Job) -> dict[str, Any]:
    """Train. Returns the summary: steps, losses, held-out loss, seconds. Collective over the world.

    Nothing that was trained is lost: a signal, an error in data() and a loss that is not finite all end in a
    checkpoint, after the last whole step, before they are reported.
    """
    from shardc.artifact import load
    from shardc.cli import model_file, training_data
    from shardc.cli.step_lines import StepLines, header
    from shardc.compile import compile
    from shardc.recompile import Resizer
    from shardc.runtime.launch import Progress, Told
    from shardc.runtime.step.engine import adamw, runtime_mesh

    signals = _Signals()
    file = model_file.load(job.model, batch=job.batch, seq=job.seq, seed=job.seed)
    program = load(job.program, trust=job.trust)
    program.resize = Resizer(file.on_meta, file.loss, {}, compile)
    timeout = timedelta(seconds=job.timeout) if job.timeout else None
    mesh = runtime_mesh(program, watch=job.watch, timeout=timeout)
    if job.progress:
        mesh.activity.written = Progress(Path(job.progress) / f"rank{mesh.rank}").note
        if mesh.watch is not None:
            mesh.watch.tell = Told(Path(job.progress)).say
    weights = Path(job.weights) if job.weights else file.weights
    engine = program.engine(
        file.build,
        weights=weights if not job.resume else None,  # a checkpoint has them all
        optimizer=file.optimizer or adamw,
        scheduler=file.scheduler,
        seed=job.seed,
        norm=True,
        clip_norm=job.clip,
        routing=job.routing,
        nonfinite=job.nonfinite,
        mesh=mesh,
    )
    if job.resume:
        engine.load(checkpoints(Path(job.resume)), last_good=job.last_good)
    if engine.step_count > job.steps:
        what = f"the checkpoint is of step {engine.step_count}, after the last step of this run, {job.steps}"
        raise ShardcError(what, where="--steps", fix="--steps counts from the first step of all: name a later one")
    if file.data is None:
        train = training_data.example(file, job.seed)
    else:
        split = training_data.batches(engine, file, "train", job.seed)
        if split is None:
            what, fix = "data('train') returns None", "return an iterable of global batches, or a torch Dataset"
            raise ShardcError(what, where=job.model, fix=fix)
        train = split
    valid = training_data.batches(engine, file, "valid", job.seed)

    first = engine.mesh.rank == 0
    out = sys.stdout if first and not job.quiet else None
    lines = StepLines(job.steps, out, Path(job.log) if first and job.log else None, append=not job.overwrite)
    begin_from = (
        [f"weights: those of {job.resume}"] if job.resume else engine.weight_notes or [file.note] * bool(file.note)
    )
    held_out_data = valid.description if valid is not None else ""
    lines.say(header(program, engine, train.description, held_out_data, job.steps, begin_from))
    training = _Training(job, engine, train, valid, lines, signals)
    begun, begin = engine.step_count, time.perf_counter()
    try:
        losses = training.run()
    finally:
        lines.close()
    seconds = time.perf_counter() - begin
    if job.save:
        training.save()
        training.export()
    steps = engine.step_count - begun
    held_out = training.held_out()
    summary = {
        "model": program.meta.get("model"),
        "mesh": dict(program.mesh.axes),
        "steps": steps,
        "step": engine.step_count,
        "seconds": round(seconds, 3),
        "losses": losses,
        "held_out": held_out.pop("loss", None),
        "held_out_outputs": held_out,
        **training.speed(steps / seconds),
        "peak_memory_mb": round(_memory(engine.mesh.device) / 2**20, 1),
        "saved": job.save or None,
    }
    if job.log and first:
        (Path(job.log) / "summary.json").write_text(json.dumps(summary, indent=1))
    return summary


@dataclasses.dataclass
class _Training:
    """The steps of a run, and what happens between them."""

    job: Job
    engine: Any
    train: Batches
    valid: Batches | None
    lines: StepLines
    signals: _Signals
    saved: int | None = None  # the last step that was saved, or is being saved
    writing: int | None = None  # the step that is being saved in the background

    def speed(self, steps: float) -> dict[str, float]:
        """At so many steps a second: samples, and tokens if the model has any."""
        samples, tokens = self.sizes
        return {"samples_per_second": round(samples * steps, 1)} | (
            {"tokens_per_second": round(tokens * steps, 1)} if tokens is not None else {}
        )

    @functools.cached_property
    def sizes(self) -> tuple[int, int | None]:
        """Samples and tokens of a step."""
        from shardc.cli.step_lines import tokens_of

        program = self.engine.program
        return max((x.shape[0] for x in program.inputs if x.shape), default=1), tokens_of(program)

    def run(self) -> list[float]:
        """Train up to the last step. Returns the losses. Raises Interrupted, or what the user's code raised."""
        losses: list[float] = []
        stream = iter(self.train)
        for _ in range(0 if self.train.local else self.engine.step_count):
            next(stream)  # seen before the checkpoint that was resumed; a loader knows by itself where it stands
        while self.engine.step_count < self.job.steps:
            batch = self._next(stream)
            start, lr = time.perf_counter(), self.engine.lr
            result = self._step(batch)
            loss, beside = result if self.engine.program.outputs else (result, {})
            losses.append(float(loss))
            numbers = {name: x.item() for name, x in beside.items() if x.numel() == 1}
            self._report(losses[-1], numbers, lr, time.perf_counter() - start)
            if self.job.save and self.job.save_every and self.engine.step_count % self.job.save_every == 0:
                self._save_in_background()
        return losses

    def _step(self, batch: Any) -> Any:
        """One step. A save in the background that failed is told, and training goes on: the next one may succeed."""
        from shardc.runtime.state import SavingError
        from shardc.runtime.step.finite import NotFiniteError

        number = self.engine.step_count + 1
        try:
            with self._rescuing(f"step {number}"):
                try:
                    result = self.engine.step(batch, local=self.train.local)
                except SavingError as e:  # raised before the step began
                    self._not_saved(e)
                    result = self.engine.step(batch, local=self.train.local)
        except NotFiniteError as e:
            saved = self._saved_beside(f"step-{number}-not-finite")
            raise ShardcError(e.what, where=e.where, fix=f"{e.fix}; {saved}") from e
        self._tell_saved()
        return result

    @contextmanager
    def _rescuing(self, doing: str) -> Iterator[None]:
        """What all ranks do together: where it fails, the state is saved as far as all ranks still have that of one
        step, and the first failure is raised.
        """
        from shardc.runtime.mesh.replicas import ReplicasDifferError
        from shardc.runtime.step.finite import NotFiniteError

        try:
            with self.engine.mesh.together(doing):
                yield
        except (NotFiniteError, ReplicasDifferError):
            raise  # on all ranks alike; and where replicas differ the last checkpoint is better than the state
        except Exception:
            print(f"{doing} failed: {self._rescued()}", file=sys.stderr, flush=True)
            raise

    def _rescued(self) -> str:
        """Save after an error in a step, if no rank has updated anything in it, and say so."""
        engine = self.engine
        if not self.job.save:
            return self._saved()
        try:
            engine.mesh.reconnect()
            n, world = engine.step_count, engine.mesh.layout.world
            whole, total, squares = engine.mesh.sum_on_host([int(engine.whole), n, n * n])
            if whole < world or world * squares != total * total:
                self._finish_save()  # of a step before
                return f"some ranks had updated already, so nothing was saved; {self._last()}"
            return f"after step {n}: {self._saved()}"
        except Exception as e:  # another process is gone, or the disk: what failed first matters more
            return f"what there was could not be saved ({type(e).__name__}: {e}); {self._last()}"

    def _last(self) -> str:
        """Where the last checkpoint is."""
        there = generations(Path(self.job.save) / "checkpoint")
        return f"the last checkpoint is in {self.job.save}" if there else "there is no checkpoint (see --save-every)"

    def _tell_saved(self) -> None:
        if self.writing is not None and self.engine.saving is None:
            self.lines.say(f"saved step {self.writing}")
            self.writing = None

    def _save_in_background(self) -> None:
        from shardc.runtime.state import SavingError

        try:
            self.engine.finish_save()  # the one before it
            self._tell_saved()
            self.engine.save(checkpoints(Path(self.job.save), new=True), wait=False, keep=self.job.keep)
            self.saved = self.writing = self.engine.step_count
        except SavingError as e:
            self._not_saved(e)

    def _not_saved(self, error: ShardcError) -> None:
        self.saved = self.writing = None
        if self.engine.mesh.rank == 0:
            print(f"{error.what}; training goes on", file=sys.stderr, flush=True)

    def _next(self, stream: Iterator[Any]) -> Any:
        """The next batch. All ranks agree whether to go on: if one stopped alone, the others would wait for it."""
        batch, problem = None, None
        try:
            batch = next(stream)
        except Exception as e:  # whatever the user's data() raises; it is raised again when all is saved
            problem = e
        world, rank = self.engine.mesh.layout.world, self.engine.mesh.rank
        states = [0] * (world + 1)
        states[rank], states[world] = int(problem is not None), self.signals.seen
        with self._rescuing(f"the meeting before step {self.engine.step_count + 1}"):
            *failed, signalled = self.engine.mesh.sum_on_host(states)
        if signalled:
            number = self.signals.seen or signal.SIGTERM
            after = f"stopped by {signal.Signals(number).name} after step {self.engine.step_count}"
            raise Interrupted(number, f"{after}: {self._saved()}")
        if any(failed):
            saved = self._saved()
            if problem is not None:
                print(f"data() failed after step {self.engine.step_count}: {saved}", file=sys.stderr, flush=True)
                raise problem
            time.sleep(FIRST_WORD)
            ranks = ", ".join(str(r) for r, n in enumerate(failed) if n)
            raise ShardcError(f"data() failed on rank {ranks}; {saved}", where="data", fix="see the error of that rank")
        return batch

    def _report(self, loss: float, beside: dict[str, float], lr: float | None, seconds: float) -> None:
        """beside: the single numbers that the loss function names beside the loss."""
        engine = self.engine
        line = {
            "step": engine.step_count,
            "loss": loss,
            "grad_norm": float(engine.grad_norm) if engine.grad_norm is not None else 0.0,
            "lr": lr,
            **self.speed(1 / seconds),
            "memory_mb": round(_memory(engine.mesh.device) / 2**20, 1),
        }
        if beside:
            line["outputs"] = beside
        if engine.loads:
            line["experts"] = [dataclasses.asdict(x) for x in engine.loads]
        if engine.scaler is not None:
            line |= {"loss_scale": engine.scaler.factor, "skipped": engine.scaler.skipped}
        evaluate = self.job.eval_every and engine.step_count % self.job.eval_every == 0
        if evaluate and (held_out := self.held_out()):
            line["held_out"] = held_out.pop("loss")
            line |= {"held_out_outputs": held_out} if held_out else {}
        self.lines.add(line, always="held_out" in line)

    def held_out(self) -> dict[str, float]:
        """{"loss": ..., name: ...} over all held-out batches, as Engine.evaluate_all adds them up; {} without any."""
        if self.valid is None:
            return {}
        with self._rescuing(f"the evaluation after step {self.engine.step_count}"):
            values: dict[str, float] = self.engine.evaluate_all(self.valid.one_epoch(), local=self.valid.local)
        return values

    def save(self) -> None:
        """Save now, unless this step is saved already, and wait until all is on the disk."""
        self._finish_save()
        if self.saved != self.engine.step_count:
            self.engine.save(checkpoints(Path(self.job.save), new=True), keep=self.job.keep)
            self.saved = self.engine.step_count

    def _finish_save(self) -> None:
        """Wait until the save in the background is on the disk, and say so, or why it is not."""
        from shardc.runtime.state import SavingError

        try:
            self.engine.finish_save()
        except SavingError as e:
            self._not_saved(e)
        self._tell_saved()

    def export(self) -> None:
        self.engine.export(self.job.save)

    def _saved(self) -> str:
        """Save, if the user named a folder, and say so."""
        if not self.job.save:
            return "nothing was saved (no --save)"
        self.save()
        return f"saved to {self.job.save}; go on with --resume {self.job.save}"

    def _saved_beside(self, name: str) -> str:
        """Save in a folder of its own, so that no good checkpoint is replaced."""
        if not self.job.save:
            return "nothing was saved (no --save)"
        folder = Path(self.job.save) / name
        self.engine.save(folder / "checkpoint")
        return f"the state before that step is in {folder}"


class _Signals:
    """SIGINT and SIGTERM are noted, and heeded between two steps: the ranks then save together. seen: the number."""

    def __init__(self) -> None:
        self.seen = 0
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._note)

    def _note(self, number: int, _: object) -> None:
        if self.seen:  # the second one does not wait
            os._exit(128 + number)
        self.seen = number


def checkpoints(folder: Path, *, new: bool = False) -> Path:
    """Where the checkpoints of --save, or --resume, are: there also a folder of checkpoints, or one of them."""
    inside = folder / "checkpoint"
    return inside if new or inside.is_dir() else folder


def _memory(device: torch.device) -> float:
    """Peak bytes: of the device's allocator, or of the process on the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) * (1 if sys.platform == "darwin" else 1024)


def main(file: str) -> None:
    """Run a job, and leave at once if it fails: a rank that waits in a destructor for its
    peers would hide the cause.
    """
    from shardc.runtime.launch import GAVE_UP
    from shardc.runtime.mesh.failure import RankFailedError
    from shardc.runtime.mesh.replicas import ReplicasDifferError

    job = Job(**json.loads(Path(file).read_text()))
    try:
        summary = run(job)
    except ShardcError as e:
        if isinstance(e, RankFailedError):
            time.sleep(FIRST_WORD)
        # 2: the input was wrong. A machine that failed is another matter: that run may go on
        _refuse(job, e, GAVE_UP if isinstance(e, RankFailedError) else 1 if isinstance(e, ReplicasDifferError) else 2)
    except Interrupted as e:
        print(e, file=sys.stderr, flush=True)
        _report_errors(job, [{"where": "signal", "what": str(e), "fix": ""}])
        leave(128 + e.number)
    except BaseException as e:
        if no_memory(e):
            _refuse(job, out_of_memory(e, "weights, gradients and the optimizer's state, before or after a step"))
        traceback.print_exc()
        sys.stderr.flush()
        _report_errors(
            job, [{"where": f"rank {os.environ.get('RANK', '0')}", "what": f"{type(e).__name__}: {e}", "fix": ""}]
        )
        os._exit(1)
    if job.result and int(os.environ.get("RANK", "0")) == 0:
        Path(job.result).write_text(json.dumps(summary))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _refuse(job: Job, error: ShardcError, status: int = 2) -> NoReturn:
    """Say what is wrong, unless another rank says the same, and end."""
    if isinstance(error, OutOfMemoryError):
        error = ShardcError(f"{error.what}; {_expected(job)}", where=error.where, fix=error.fix)
    print(for_this_rank(str(error)) if job.joined else error, file=sys.stderr, flush=True)
    _report_errors(job, error.to_json())
    os._exit(status)


def _expected(job: Job) -> str:
    """What a step needs by calculation, where memory did not suffice."""
    from shardc.artifact import load
    from shardc.cost import device
    from shardc.cost.device import measured_file
    from shardc.ir.units import size
    from shardc.report.cost import op_place, part_name

    here = "cuda" if torch.cuda.is_available() else "cpu"
    known = here if measured_file(here).is_file() else "h100-80g"
    try:
        cost = load(job.program, trust=job.trust).cost(device(known))
    except ShardcError as e:
        return f"what a step needs cannot be calculated: {e.what}"
    memory = cost.memory
    at = f" at {op_place(cost, memory.op)}" if memory.op else ""
    part = part_name(memory.part, cost)
    return f"by calculation a step holds {size(memory.peak)} on a rank at its peak, in {part}{at}"


def _report_errors(job: Job, errors: list[dict[str, str]]) -> None:
    """For --json: to the launcher, which prints those of the rank that failed first; under torchrun or Slurm, the first
    rank prints its own.
    """
    rank = os.environ.get("RANK", "0")
    if job.progress:
        (Path(job.progress) / f"errors{rank}.json").write_text(json.dumps(errors))
    if job.joined and job.quiet and rank == "0" and sys.__stdout__ is not None:
        print(json.dumps({"errors": errors}), file=sys.__stdout__, flush=True)


def leave(status: int = 0) -> NoReturn:
    """End a process of a world that has done its work, without taking the interpreter down first.

    gloo's threads may still hold a tensor then, and letting go of it without an interpreter aborts the process
    (https://github.com/pytorch/pytorch/pull/179291). What was registered with atexit runs.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
    leave()
