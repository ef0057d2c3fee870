"""Do the work of each process of `shardc run`: load, make its weights, train, save, evaluate.

Started by shardc.runtime.launch, torchrun or Slurm as `python -m shardc.cli.ranks.worker JOB.json`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from shardc.api import Program, load
from shardc.cli.common import json_text, once
from shardc.cli.model_file import ModelFile
from shardc.cli.ranks import forward_jobs, lasting_output, save_lock, training_data
from shardc.cli.ranks.job import Job, joined, weights_of
from shardc.cli.ranks.step_lines import StepLines, header, optimizer_text
from shardc.cli.ranks.training_data import Batches, HeldOut
from shardc.cli.ranks.training_loop import Interrupted, Signals, Training, peak_memory
from shardc.cli.ranks.user_frames import one_line, place, users_traceback
from shardc.collector import collect_as_usual
from shardc.cost.measured.device_file import measured_file
from shardc.errors import ShardcError
from shardc.ir.units import size
from shardc.optional import needed, registered
from shardc.runtime.checks.engine_options import check_trains
from shardc.runtime.launch import GAVE_UP, record_errors
from shardc.runtime.mesh import own_cores
from shardc.runtime.mesh.replicas import ReplicasDifferError
from shardc.runtime.mesh.watch import RankFailedError, cut_off
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.stage.op_errors import OutOfMemoryError, no_memory, out_of_memory
from shardc.runtime.stage.profiler_ranges import with_ranges
from shardc.runtime.step import engine_optimizer, schedulers
from shardc.runtime.step.engine import Engine
from shardc.runtime.storage.urls import Url, expanded
from shardc.runtime.time_limits import FIRST_WORD


def run(job: Job) -> dict[str, Any]:
    """Train; return a summary with steps, losses, held-out loss, seconds. Collective over the world.

    No training is lost: after a signal, an error in data() or a loss that is not finite, the state of the last complete
    step is saved before the failure is reported.
    """
    signals = Signals()
    settings = job.settings
    file, program, mesh = joined(job)
    if settings.memory_snapshot and mesh.device.type != "cuda":
        fault, fix = f"CUDA's allocator holds nothing: the run is on {mesh.device.type}", "leave it out"
        raise ShardcError(fault, where="--memory-snapshot", fix=fix)
    with mesh.together("taking the folders of --save and --log"):
        if mesh.rank == 0:
            save_lock.lock_all({"--log": settings.log, "--save": settings.save})
    with mesh.together("finding the folder of --save"):
        save_lock.check_shared(settings.save)
    weights, steps = weights_of(job, file, program), list[int]()  # the number of steps, once it is known
    trackers = needed("trackers", "runtime", "make")(settings.trackers) if settings.trackers else []
    with mesh.together("making the engine"):
        engine = Engine(
            program,
            file.build,
            weights=weights if not job.resume else None,  # a checkpoint has them all
            optimizer=file.optimizer or engine_optimizer.of_spec(program, job.lr),
            scheduler=file.scheduler or schedulers.of_spec(program, lambda: next(iter(steps), None)),
            seed=settings.seed,
            norm=True,
            clip_norm=settings.clip,
            routing=settings.routing,
            nonfinite=settings.nonfinite,
            callbacks=[*trackers, *(file.callbacks() if file.callbacks is not None else ())],
            mesh=mesh,
            interpreter=functools.partial(Interpreter, make=with_ranges) if settings.trace else Interpreter,
        )
    if job.resume:
        engine.load(job.resume, **job.load)
    with mesh.together("opening the data"):
        train, valid = _data(job, file, engine)
        training = Training(settings, engine, train, valid, StepLines(0, None, None, append=False), signals)
        steps.append(training.steps)
        training.best.check(held_out=valid is not None)
        training.open_choices()
    if engine.step_count > training.steps:
        fault = f"the checkpoint is of step {engine.step_count}, after the last step of this run, {training.steps}"
        raise ShardcError(fault, where="--steps", fix="--steps counts from the first step of all: name a later one")
    if training.steps > engine.step_count:
        check_trains(program)
        evaluates = settings.eval_every > 0 and valid is not None
        engine.check_schedule(training.steps - engine.step_count, evaluates=evaluates)

    first = engine.mesh.rank == 0
    out = sys.stdout if first and not job.quiet else None
    log = Path(settings.log) if first and settings.log else None
    append, begun = not job.overwrite, engine.step_count
    lines = training.lines = StepLines(training.steps, out, log, append=append, begun=begun)
    begin_from = engine.weight_notes or [file.note] * bool(file.note)
    if job.resume:
        begin_from = [f"weights: those of {job.resume}"]
        begin_from += ["learning rates: the model file's, at its step"] * job.load["new_schedule"]
        begin_from += ["data: from its beginning"] * job.load["new_data"]
    held_out_data = training_data.described(valid)
    lines.say(header(program, engine, train.description, held_out_data, training.steps, begin_from))
    section = program.spec.optimizer
    if file.optimizer is not None and (section.chosen or job.lr is not None):
        given = "--lr" if job.lr is not None else "the spec's optimizer"
        lines.say(f"note: {given} is not used: optimizer(params) of the model file makes the optimizer")
    if file.scheduler is not None and section.schedule is not None:
        lines.say("note: the spec's schedule is not used: scheduler(optimizer) of the model file makes it")
    collect_as_usual()
    begin = time.perf_counter()
    try:
        with contextlib.closing(lines):
            training.call("run_begins", _facts(job, program, training))
            losses = training.run()
            seconds = time.perf_counter() - begin
            held_out = training.last_held_out() if training.best.on else {}  # which a checkpoint keeps
            if settings.save:
                training.save()
                if not isinstance(training.folder, Url):  # `shardc run` has checked that they replace nobody's weights
                    engine.export(settings.save, overwrite=True)
                    if first and Path(settings.save).is_dir() and (words := train.tokenizer) is not None:
                        words.save_pretrained(settings.save)
            held_out = held_out or training.last_held_out()
    except BaseException as e:
        training.failing = True
        state = "interrupted" if isinstance(e, Interrupted) else "failed"
        training.call("run_ends", {"state": state, "step": engine.step_count, "error": one_line(e)})
        raise
    done = engine.step_count - begun
    summary = {
        "model": program.meta.get("model"),
        "mesh": dict(program.mesh.axes),
        "state": "stopped early" if training.best.stopped and engine.step_count < training.steps else "finished",
        "steps": done,
        "step": engine.step_count,
        "seconds": round(seconds, 3),
        "losses": losses,
        "skipped": training.skipped,
        "held_out": held_out.pop("loss", None),
        "held_out_outputs": held_out,
        "best": training.best.summary(training.folder),
        **training.meter.speed(done / seconds),
        "peak_memory_mb": round(peak_memory(engine.mesh.device) / 2**20, 1),
        "saved": settings.save or None,
    }
    if first and settings.save and not isinstance(training.folder, Url):
        last, base = losses[-1] if losses else None, engine.weight_folder
        facts = {"data": train.description, "mesh": str(program.mesh), "steps": engine.step_count, "loss": last}
        for write in registered("card", "write"):
            write(Path(settings.save), base, facts | {"held-out loss": summary["held_out"]}, program.spec.text)
    if log is not None:
        (log / "summary.json").write_text(json_text(summary, indent=1))
    with mesh.together("ending the run"):
        training.call("run_ends", summary)
        mesh.sum_on_host([0])  # a callback that fails on one rank ends the others
    return summary


def _facts(job: Job, program: Program, training: Training) -> dict[str, Any]:
    """Return the facts of a run for callbacks. goes_on: it goes on with its own checkpoint, as the same run."""
    settings, engine = job.settings, training.engine
    within = not settings.save or expanded(settings.save).resolve() in (x := expanded(job.resume).resolve(), *x.parents)
    return {
        "model": program.meta.get("model"),
        "mesh": dict(program.mesh.axes),
        "steps": training.steps,
        "begun": engine.step_count,
        "goes_on": bool(job.resume) and within,
        "log": settings.log,
        "optimizer": optimizer_text(engine.optimizer),
        "settings": settings.model_dump(mode="json", exclude_defaults=True),
        "spec": str(program.spec),
    }


def _data(job: Job, file: ModelFile, engine: Engine) -> tuple[Batches, HeldOut]:
    """Return the training data and the held-out data. A resumed run uses the seed of its checkpoint."""
    seed, fix = engine.rng.seed, "return an iterable of global batches, or a torch Dataset"
    train = training_data.needed(engine, file, "train", seed, where=job.model, fix=fix)
    if file.data is not None and not train.resumes and getattr(engine.program.spec.batch, "balance", False):
        fix = "return a dataset of samples (shardc.text has rows of chats), or leave out balance"
        raise ShardcError("data() gives batches, and `batch: {balance: true}` deals samples", where="data", fix=fix)
    valid = training_data.held_out(engine, file, seed)
    if valid is not None and engine.mesh.rank == 0:  # which prints it
        training_data.note_same_data(train, valid)
    return train, valid


def main(file: str) -> None:
    """Run a job; if it fails, exit at once, as a rank that waits for its peers would hide the cause."""
    lasting_output.install()
    job = Job.model_validate_json(Path(file).read_text())
    if not job.joined and not torch.cuda.is_available():
        own_cores.pin_process(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    # DataLoaders make their files in the folder of the run, which is removed with it, also if this process is killed
    multiprocessing.current_process()._config["tempdir"] = job.folder  # type: ignore[attr-defined]
    try:
        work = forward_jobs.score if job.split else forward_jobs.generate if job.prompts else run
        summary = work(job)
    except Interrupted as e:
        _report(job, f"{e}\n", [{"where": "signal", "what": str(e), "fix": ""}])
        end_rank(128 + e.number)
    except BaseException as e:
        _fail(job, e)
    if int(os.environ.get("RANK", "0")) == 0:
        job.result.write_text(json.dumps(summary))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _fail(job: Job, error: BaseException) -> NoReturn:
    """Report a failure, and end the process at once. The first rank of torchrun or Slurm removes the run's folder."""
    if gave_up := isinstance(error, RankFailedError) or cut_off(error):
        time.sleep(FIRST_WORD)
    if no_memory(error):
        error = out_of_memory(error, "weights, gradients and the optimizer's state, before or after a step")
    if isinstance(error, ShardcError):
        if isinstance(error, OutOfMemoryError):
            error = ShardcError(f"{error.what}; {_expected(job)}", where=error.where, fix=error.fix)
        _report(job, f"{error.text()}\n", error.to_json())
    else:
        where = place(error) or f"rank {os.environ.get('RANK', '0')}"
        line = {"where": where, "what": one_line(error), "fix": "correct the code that raises it"}
        _report(job, users_traceback(error, debug=job.debug), [line])
    if job.joined and os.environ.get("LOCAL_RANK", "0") == "0":
        shutil.rmtree(job.folder, ignore_errors=True)
    # 2: the input was wrong. After another rank's failure, or a wrong replica, a restart may succeed
    wrong_input = isinstance(error, ShardcError) and not isinstance(error, ReplicasDifferError)
    os._exit(GAVE_UP if gave_up else 2 if wrong_input else 1)


def _report(job: Job, text: str, errors: list[dict[str, str]]) -> None:
    """Print a failure, unless another rank did. With --json the launcher, or the first rank, prints its errors."""
    report = functools.partial(print, text, end="", file=sys.stderr, flush=True)
    if not job.joined:
        report()  # `launch` shows a line of several ranks once
        record_errors(Path(job.folder), errors)
        return
    once(text, report)
    if job.quiet and os.environ.get("RANK", "0") == "0" and sys.__stdout__ is not None:
        print(json.dumps({"errors": errors}), file=sys.__stdout__, flush=True)


def _expected(job: Job) -> str:
    """Return how many bytes a step needs by calculation, for the error of a rank that is out of memory."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    known = kind if measured_file(kind).is_file() else None
    try:
        cost = load(job.program, trust=job.trust, as_compiled=True).cost(known)
    except ShardcError as e:
        return f"the memory of a step cannot be calculated: {e.what}"
    from shardc.report.cost import peak_place  # here: it imports the passes

    memory = cost.memory
    return f"a step needs by calculation {size(memory.peak)} on a rank at its peak, at {peak_place(cost, memory)}"


def end_rank(status: int = 0) -> NoReturn:
    """End a process of a world that has done its work, without the shutdown of the interpreter.

    gloo's threads may still hold a tensor then, and releasing it without an interpreter aborts the process
    (https://github.com/pytorch/pytorch/pull/179291). Functions registered with atexit run.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
    end_rank()
