"""`shardc run`: train, with one process a rank that this command starts, or as one rank of torchrun's or Slurm's."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardc.cli import compile_once, lasting_output
from shardc.cli.common import (
    BatchOption,
    DebugOption,
    JsonOption,
    MeshOption,
    ModelOption,
    SeqOption,
    SetOption,
    Show,
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
from shardc.cli.run_options import given, with_settings
from shardc.errors import ShardcError

if TYPE_CHECKING:
    from shardc.api import Program
    from shardc.cli.job import Job
    from shardc.spec import Run

FAILED = 1  # exit status of a run in which a rank failed; 2: its input was wrong
SAVING = 120.0  # seconds that ranks have to save in when the run is stopped by a signal


@with_settings
def command(
    model: Source,
    spec: SpecFile = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="processes on this machine; default: what the mesh needs")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace what is in --save and --log: an earlier run's, or weights")
    ] = False,
    resume: Annotated[Path | None, typer.Option(help="folder that --save wrote, on any mesh")] = None,
    last_good: Annotated[
        bool, typer.Option("--last-good", help="if the last checkpoint is damaged, resume from the last that is not")
    ] = False,
    new_schedule: Annotated[
        bool,
        typer.Option(
            "--new-schedule", help="resume with the model file's learning rates and schedule, not the checkpoint's"
        ),
    ] = False,
    new_data: Annotated[
        bool,
        typer.Option("--new-data", help="resume with the data from its beginning, not from where the checkpoint stood"),
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option(help="begin from these: a folder or file of safetensors, a torch file, or what --save wrote"),
    ] = None,
    mesh: MeshOption = None,
    set_: SetOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    trust: TrustOption = False,
    as_compiled: Annotated[
        bool,
        typer.Option(
            "--as-compiled", help="train a compiled DIR although forward or loss changed in the model file since"
        ),
    ] = False,
    model_: ModelOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
    **settings: Any,
) -> None:
    """Train: starts one process a rank on this machine, or joins the world of torchrun or Slurm."""
    from shardc.cli import worker
    from shardc.cli.job import Job
    from shardc.runtime import launch
    from shardc.spec import Run

    resume, weights = (x.expanduser() if x else None for x in (resume, weights))
    options = given(settings)
    save, log = (Path(options[name]) if name in options else None for name in ("save", "log"))
    one_rank = any(name in os.environ for name in ("RANK", "SLURM_PROCID"))
    lasting_output.install(tell=as_json or one_rank)  # else rank 0, which writes the lines, says it
    with reporting(debug, as_json) as show, ExitStack() as stack:
        folder = stack.enter_context(run_folder())
        launch.join_slurm()
        first = os.environ.get("RANK", "0") == "0"  # it alone writes lines, on its own machine
        check_outputs(folders={"--save": save, "--log": log if first else None})
        _check_options(options)
        joined = launch.in_world()

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
                as_compiled=as_compiled,
            )

        program, world = stack.enter_context(compile_once.in_world(model, nproc, compiled, watch=options.get("watch")))
        run = _settings(program.spec.run if program.spec is not None else Run(), **options)
        save, log = (Path(x) if x else None for x in (run.save, run.log))
        if new_schedule and resume is None and not run.auto_resume:
            fix = "name the checkpoint, --resume DIR; a run that begins has the model file's schedule anyway"
            raise ShardcError("there is no checkpoint whose schedule it would replace", where="--new-schedule", fix=fix)
        if new_data:
            _check_new_data(save, resume)
        if run.auto_resume and resume is None:
            resume = _checkpoint(save)
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):  # torchrun's own --max-restarts
            new_data = new_data and _checkpoint(save) is None
            resume = _checkpoint(save) or resume
            overwrite = overwrite or resume is None
        compiled_before = is_artifact(model)
        ref = model_ or (model_of(program.meta) if compiled_before else program.meta["model_ref"])
        _check(program, ref, model, resume, world)
        if compiled_before and os.environ.get("LOCAL_RANK", "0") == "0":
            writes = {n: str(getattr(run, n)) for n in ("save", "log") if n not in options and getattr(run, n)}
            writes |= {f"offload: {n}": x for n, x in program.offload.used.items() if x != "cpu"}
            say_whose(model, "" if model_ else ref, writes)
        check_weights(weights)
        _check_folders(save, log, resume, overwrite=overwrite)
        if compiled_before:
            artifact = Path(model)
        else:
            artifact = folder / "program"
            program.save(artifact)
        example = program.meta.get("example", {})
        job = Job(
            program=str(artifact),
            model=ref,
            batch=example.get("batch"),
            seq=example.get("seq"),
            run=run.model_dump(),
            overwrite=overwrite and not resume,
            resume=str(resume or ""),
            last_good=last_good,
            new_schedule=new_schedule,
            new_data=new_data,
            weights=str(weights.resolve() if weights else ""),
            quiet=as_json,
            result=str(folder / "result.json"),
            trust=trust,
            progress="" if joined else str(folder),
            joined=joined,
            debug=debug,
        )
        status = start(job, folder, program, show)
        for restart in range(1, run.max_restarts + 1):
            if joined or status != FAILED:
                break
            own = _checkpoint(save)
            again = own or resume
            where = f"the checkpoint in {again}" if again else "the beginning"
            print(f"restart {restart} of {run.max_restarts}, from {where}", file=sys.stderr, flush=True)
            overwrite, new_data = overwrite and not again, new_data and not own  # its own knows where the data stands
            job = dataclasses.replace(job, resume=str(again or ""), overwrite=overwrite, new_data=new_data)
            status = start(job, folder, program, show)
        result = Path(job.result)
        if status == 0 and not joined and not result.exists():
            fault = "rank 0 ended with status 0 before the last step, and nothing was saved then"
            fix = "something in the model file ends the process (os._exit): raise an error, which saves first"
            raise ShardcError(fault, where="run", fix=fix)
        if status == 0 and result.exists():
            summary = json.loads(result.read_text())
            tied = any(p.aliases for p in program.params)
            show(json.dumps(summary) if as_json else _summary(summary, tied=tied))
    if joined:
        worker.leave(status)
    raise typer.Exit(status)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises ShardcError for values that the spec's section would not take either."""
    from pydantic import ValidationError

    from shardc.spec import Run

    try:
        Run.model_validate(options)
    except ValidationError as e:
        errors = []
        for wrong in e.errors():
            name = str(wrong["loc"][0])
            like = Run.model_fields[name].examples or [Run.model_fields[name].default]
            fix = f"e.g. --{name} {like[0]}, or leave it out"
            errors.append(ShardcError(wrong["msg"], where=f"--{name.replace('_', '-')}", fix=fix))
        raise ShardcError("wrong options", errors=errors) from None


def _settings(run: Run, **options: Any) -> Run:
    """The spec's section with the options that were given. Raises ShardcError where they do not go together."""
    run = run.model_copy(update=options)
    paths = {name: str(Path(x).expanduser()) for name in ("save", "log") if (x := getattr(run, name))}
    run = run.model_copy(update=paths)
    for name, wanted in (
        ("tensorboard", run.tensorboard),
        ("trace", run.trace),
        ("breakdown", run.breakdown),
        ("memory-snapshot", run.memory_snapshot),
    ):
        if wanted and not run.log:
            fix = "name a folder, --log DIR or `run: {log: DIR}`"
            raise ShardcError(f"{name} needs a folder to write to", where=f"--{name}", fix=fix)
    if run.save_every and not run.save:
        fix = "name the folder, --save DIR or `run: {save: DIR}`"
        raise ShardcError("checkpoints need a folder", where="--save-every", fix=fix)
    if run.auto_resume and not run.save:
        fix = "name the folder, --save DIR or `run: {save: DIR}`"
        raise ShardcError("nothing is saved that a run could go on from", where="--auto-resume", fix=fix)
    if run.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ShardcError("TensorBoard is not installed", where="--tensorboard", fix="pip install tensorboard")
    return run


def _check_new_data(save: Path | None, resume: Path | None) -> None:
    """A run that is begun again goes on from its own checkpoints, with the data where they stood: so they lie apart
    from those that it began with.
    """
    if resume is None:
        fault = "there is no checkpoint whose place in the data it would replace"
        fix = "name the checkpoint, --resume DIR; a run that begins reads its data from the beginning anyway"
        raise ShardcError(fault, where="--new-data", fix=fix)
    if save is not None and save.resolve() in (resume.resolve(), *resume.resolve().parents):
        fault = (
            f"--save names {save}, where it resumes from: a restart could not tell which data its checkpoints are of"
        )
        raise ShardcError(fault, where="--new-data", fix="save to another folder")


def _checkpoint(save: Path | None) -> Path | None:
    """The folder of --save, if there is a finished checkpoint in it."""
    return save if save is not None and _in_use(save / "checkpoint") else None


def _check(program: Program, file: str | None, model: str, resume: Path | None, world: int | None) -> None:
    from shardc.cli.training_loop import checkpoints
    from shardc.runtime.state import checkpoint_folder
    from shardc.runtime.state.weight_files import has_weights

    if program.forward_only:
        fault = "the program is forward-only: there is no loss to train by"
        fix = "compile without --forward and --score; in Python, program.forward(model) runs it (docs/forward.md)"
        raise ShardcError(fault, where=model, fix=fix)
    if resume is not None:
        folder = checkpoints(resume)
        if not (checkpoint_folder.is_one(folder) or checkpoint_folder.generations(folder)):
            error = checkpoint_folder.none_in(folder)
            begin = f"to begin a run with these weights, write --weights {resume}" if has_weights(resume) else ""
            raise ShardcError(error.what, where=f"--resume {resume}", fix=begin or error.fix)
    check_ranks(program, file, model, world)


def check_ranks(program: Program, file: str | None, model: str, world: int | None) -> None:
    """Raises ShardcError for another number of ranks than the mesh's, and where no model file is known."""
    if world is not None and world != program.mesh.world:
        fault = f"the mesh {program.mesh} has {program.mesh.world} ranks, not {world}"
        raise ShardcError(fault, where="--nproc", fix="change --mesh, or leave --nproc out")
    if not file:
        raise ShardcError(
            "this artifact does not say which model file it was compiled from",
            where=model,
            fix="name it with --model, or compile it with `shardc compile -o DIR`",
        )


def check_weights(weights: Path | None) -> None:
    """Raises ShardcError where --weights names none."""
    from shardc.runtime.state.weight_files import has_weights

    if weights is not None and not has_weights(weights):
        fix = "name a .safetensors or .bin file, a folder that has some (with their index), or what --save wrote"
        raise ShardcError(f"there are no weights in {weights}", where="--weights", fix=fix)


def _check_folders(save: Path | None, log: Path | None, resume: Path | None, *, overwrite: bool) -> None:
    """Try where the run will write, before it begins; and refuse to replace what an earlier run left there, or weights
    that no run wrote.
    """
    from shardc.runtime.state.export import foreign_weights, refused

    for folder, option, kept in ((save, "--save", "checkpoint"), (log, "--log", "steps.jsonl")):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as f:
                f.write(b"tried before the run")
        except OSError as e:
            fix = "name a folder that can be written to"
            raise ShardcError(f"cannot write to {folder}: {e.strerror}", where=option, fix=fix) from None
        goes_on = resume is not None and (
            option == "--log" or folder.resolve() in (resume.resolve(), *resume.resolve().parents)
        )
        if _in_use(folder / kept) and not overwrite and not goes_on:
            on = folder if option == "--save" else "and what it saved to"
            fix = f"go on with it (--resume {on}), name another folder, or add --overwrite"
            raise ShardcError(f"an earlier run's {kept} is in {folder}", where=option, fix=fix)
        if option == "--save" and not overwrite and not goes_on and (file := foreign_weights(folder)) is not None:
            error = refused(file, "add --overwrite")
            raise ShardcError(error.what, where=f"{option} {folder}", fix=error.fix)


def _in_use(path: Path) -> bool:
    """Has an earlier run left something there? A folder in which no save was finished is as good as none."""
    from shardc.runtime.state.checkpoint_folder import generations

    return bool(generations(path)) if path.is_dir() else path.exists()


def start(job: Job, folder: Path, program: Program, show: Show) -> int:
    """Run the job, here as one rank of a given world, or as one process a rank. Returns the exit status."""
    from shardc.cli import hidden_modules, worker
    from shardc.runtime import launch

    file = folder / "job.json"
    file.write_text(json.dumps(vars(job)))
    if job.joined:
        worker.main(str(file))
        return 0
    hidden_modules.check_folder(Path.cwd())
    failed_first: list[int] = []
    command = [sys.executable, "-m", "shardc.cli.worker", str(file)]
    stdout = sys.stderr.fileno() if job.quiet else None
    status = launch.launch(
        command, program.mesh, progress=folder, failed_first=failed_first.append, stdout=stdout, patience=SAVING
    )
    if failed_first and job.quiet:
        report = folder / f"errors{failed_first[0]}.json"
        killed = [{"where": f"rank {failed_first[0]}", "what": "the process was killed", "fix": ""}]
        show(json.dumps({"errors": json.loads(report.read_text()) if report.exists() else killed}))
    return status


def _exported(folder: Path, *, tied: bool) -> str:
    """What of a run's folder is for others, and how they load it."""
    if (folder / "adapter_config.json").exists():
        return f"adapter_model.safetensors\nload it with peft: PeftModel.from_pretrained(MODEL, {str(folder)!r})"
    if (folder / "config.json").exists():
        return f"config and model.safetensors\nload them with transformers: from_pretrained({str(folder)!r})"
    once = "; a tied weight is stored once, and load_state_dict alone misses its other names" if tied else ""
    written = "model.safetensors (the plain model's weights)"
    return f"{written}\nload them with safetensors.torch.load_model(model, FILE){once}"


def _summary(run: dict[str, Any], *, tied: bool) -> str:
    from shardc.cli.step_lines import speed

    loss = f"loss {run['losses'][-1]:.4f}" if run["losses"] else "no steps"
    held_out = f", held-out loss {run['held_out']:.4f}" if run["held_out"] is not None else ""
    held_out += "".join(f", {name} {x:.4g}" for name, x in run["held_out_outputs"].items())
    lines = [f"{run['steps']} steps in {run['seconds']:.1f} s, {speed(run)}: {loss}{held_out}"]
    if run["saved"]:
        lines += [
            f"saved to {run['saved']}: checkpoint/ (loads on any mesh), {_exported(Path(run['saved']), tied=tied)}"
        ]
    return "\n".join(lines)
