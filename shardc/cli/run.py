"""Define `shardc run`: train, with one process for each rank, or as one rank of torchrun or Slurm."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shardc.cli.common import check_outputs, console
from shardc.cli.options import Named, NprocOption, PushOption, given, names_program, option
from shardc.cli.ranks.make_job import ranks
from shardc.errors import ShardcError
from shardc.optional import needed
from shardc.runtime.storage.urls import Url, expanded

if TYPE_CHECKING:
    from shardc.api import Program
    from shardc.spec import Run

EXAMPLES = """Examples:

shardc run model.py spec.yaml --steps 1000 --lr 1e-4 --save runs/a --log runs/a

shardc run model.py spec.yaml --epochs 3 --save runs/a --eval-every 100 --keep best --patience 5 --track wandb"""
FAILED = 1  # exit status of a run in which a rank failed; 2: its input was wrong


@names_program("forward", "score")
def command(
    named: Named,
    nproc: NprocOption = None,
    lr: Annotated[float | None, option("learning rate, instead of the spec's `optimizer: {lr: ...}`", min=0)] = None,
    overwrite: Annotated[bool, option("replace earlier contents of --save and --log (runs or weights)")] = False,
    resume: Annotated[Path | None, option("folder that --save wrote, on any mesh")] = None,
    last_good: Annotated[bool, option("if the last checkpoint is damaged, resume from the last good one")] = False,
    new_schedule: Annotated[
        bool, option("resume with the model file's learning rates and schedule, not the checkpoint's")
    ] = False,
    new_data: Annotated[
        bool, option("resume with the data from the start, not from the position of the checkpoint")
    ] = False,
    weights: Annotated[
        Path | None,
        option("weights to start from: a folder or file of safetensors, a torch file, or what --save wrote"),
    ] = None,
    as_compiled: Annotated[
        bool, option("train a compiled DIR although forward or loss changed in the model file since")
    ] = False,
    push_to_hub: PushOption = None,
    **settings: Any,
) -> None:
    """Train: start one process for each rank on this machine, or join the world of torchrun or Slurm."""

    resume = expanded(resume) if resume else None
    options = given(settings)
    save, log = (expanded(options[name]) if name in options else None for name in ("save", "log"))
    with ranks(named, nproc, weights, options.get("watch")) as all_ranks:
        # only rank 0 writes lines, on its machine; without a launcher, another job has left RANK behind
        first = not all_ranks.joined or os.environ["RANK"] == "0"
        check_outputs(folders={"--save": save, "--log": log if first else None})
        _check_options(options)
        program = all_ranks.program(as_compiled=as_compiled)
        run = _settings(program.spec.run, **options)
        save, log = (expanded(x) if x else None for x in (run.save, run.log))
        if new_schedule and not run.auto_resume:
            _check_resumed(resume, "--new-schedule", "has the model file's schedule")
        if new_data:
            _check_new_data(save, resume)
        if run.auto_resume and resume is None:
            resume = _checkpoint(save)
        if all_ranks.joined and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):  # torchrun's --max-restarts
            new_data = new_data and _checkpoint(save) is None
            resume = _checkpoint(save) or resume
            overwrite = overwrite or resume is None
        _check(program, named.model, resume)
        _check_folders(save, log, resume, overwrite=overwrite)
        if push_to_hub and first:
            needed("hub", "upload", "prepare")(push_to_hub, save)
        writes = {n: str(getattr(run, n)) for n in ("save", "log") if n not in options and getattr(run, n)}
        writes |= {f"offload: {n}": x for n, x in program.spec.data.offload.used.items() if x != "cpu"}
        job = all_ranks.job(
            run,
            writes,
            overwrite=overwrite and not resume,
            resume=str(resume or ""),
            lr=lr,
            load={"last_good": last_good, "new_schedule": new_schedule, "new_data": new_data},
        )
        summary = all_ranks.start(job)
        for restart in range(1, run.max_restarts + 1):
            if all_ranks.joined or all_ranks.status != FAILED:
                break
            own = _checkpoint(save)
            again = own or resume
            where = f"the checkpoint in {again}" if again else "the beginning"
            print(f"restart {restart} of {run.max_restarts}, from {where}", file=sys.stderr, flush=True)
            load = job.load | {"new_data": new_data and not own}  # its own has the data position
            more = {"resume": str(again or ""), "overwrite": overwrite and not again, "load": load}
            job = job.model_copy(update=more)
            summary = all_ranks.start(job)
        if summary is None and all_ranks.status == 0 and not all_ranks.joined:
            fault = "rank 0 ended with status 0 before the last step, and nothing was saved then"
            fix = "the model file ends the process (os._exit): raise an error instead, which saves first"
            raise ShardcError(fault, where="run", fix=fix)
        if summary is not None:
            tied = any(p.aliases for p in program.params)
            all_ranks.show(_summary(summary, tied=tied), summary)
            if push_to_hub:
                console.print(f"uploaded to {needed('hub', 'upload', 'upload')(save, push_to_hub)}", markup=False)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise ShardcError if an option has a value that the spec's section `run:` would refuse."""
    from pydantic import ValidationError

    from shardc.spec import Run
    from shardc.spec.explain import explain

    try:
        Run.model_validate(options)
    except ValidationError as e:
        errors = []
        for wrong in e.errors():
            name = str(wrong["loc"][0])
            examples = Run.model_fields[name].examples or [Run.model_fields[name].default]
            fault, fix = wrong["msg"], f"e.g. {_flag(name)} {examples[0]}, or leave it out"
            if wrong["type"] == "literal_error":
                fault, fix = explain({**wrong, "loc": ("run", *wrong["loc"])}, ("run", name))
            errors.append(ShardcError(fault, where=_flag(name), fix=fix))
        raise ShardcError("wrong options", errors=errors) from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _settings(run: Run, **options: Any) -> Run:
    """Return the spec's section `run:` with the given options. Raises ShardcError if they conflict."""
    from shardc.spec.run_section import NEEDS

    run = run.model_copy(update=options)
    paths = {name: str(expanded(x)) for name in ("save", "log") if (x := getattr(run, name))}
    run = run.model_copy(update=paths)
    for name, needs, fault in NEEDS:
        if getattr(run, name) and not getattr(run, needs):
            flag, kind = _flag(needs), "N" if needs == "eval_every" else "DIR"
            fix = f"{'' if kind == 'N' else 'name the folder, '}{flag} {kind} or `run: {{{needs}: {kind}}}`"
            raise ShardcError(fault, where="--keep best" if name == "keeps_best" else _flag(name), fix=fix)
    if run.trackers:
        if "tensorboard" in run.trackers and not run.log:
            fix = "name the folder, --log DIR or `run: {log: DIR}`"
            raise ShardcError("tensorboard needs a folder to write to", where="--track tensorboard", fix=fix)
        needed("trackers", "runtime", "check_installed")(run.trackers)
    return run


def _check_resumed(resume: Path | None, option: str, otherwise: str) -> None:
    if resume is None:
        fix = f"name the checkpoint, --resume DIR; a new run {otherwise} anyway"
        raise ShardcError("it needs a checkpoint, but none is resumed", where=option, fix=fix)


def _check_new_data(save: Path | None, resume: Path | None) -> None:
    """Raise ShardcError if --new-data has no checkpoint to resume from, or --save is that folder.

    A restarted run resumes from its own checkpoints and their place in the data. It must not confuse the two folders.
    """
    _check_resumed(resume, "--new-data", "reads its data from the start")
    if save is not None and _is_in(resume, save):
        fault = f"--save names {save}, which it also resumes from: a restart could not know which data its"
        raise ShardcError(f"{fault} checkpoints are of", where="--new-data", fix="save to another folder")


def _is_in(resume: Path | None, folder: Path) -> bool:
    """Return whether the run resumes from a checkpoint in this folder."""
    return resume is not None and folder.resolve() in (resume.resolve(), *resume.resolve().parents)


def _checkpoint(save: Path | None) -> Path | None:
    """Return the folder of --save if a finished checkpoint is in it, else None."""
    return save if save is not None and _in_use(save / "checkpoint") else None


def _check(program: Program, model: str, resume: Path | None) -> None:
    from shardc.runtime.state import checkpoint_folder
    from shardc.runtime.state.weight_files import has_weights

    if program.forward_only:
        fault = "the program is forward-only: there is no loss to train by"
        fix = "compile without --forward and --score; in Python: program.forward(model) (docs/how-to/forward.md)"
        raise ShardcError(fault, where=model, fix=fix)
    if resume is not None and not checkpoint_folder.checkpoints_in(resume):
        error = checkpoint_folder.none_in(resume)
        begin = f"to start a run with these weights, write --weights {resume}" if has_weights(resume) else ""
        raise ShardcError(error.what, where=f"--resume {resume}", fix=begin or error.fix)


def _check_folders(save: Path | None, log: Path | None, resume: Path | None, *, overwrite: bool) -> None:
    """Check that the run can write to its folders, and create them.

    Refuses to replace files of an earlier run, or weights that no run wrote.
    """
    from shardc.runtime.state.export import foreign_weights, refused

    for folder, where, kept in ((save, "--save", "checkpoint"), (log, "--log", "steps.jsonl")):
        if folder is None:
            continue
        check_outputs(folders={where: folder})
        folder.mkdir(parents=True, exist_ok=True)
        goes_on = resume is not None and (where == "--log" or _is_in(resume, folder))
        if _in_use(folder / kept) and not overwrite and not goes_on:
            on = folder if where == "--save" else "and what it saved to"
            fix = f"continue it (--resume {on}), name another folder, or add --overwrite"
            raise ShardcError(f"an earlier run's {kept} is in {folder}", where=where, fix=fix)
        if where == "--save" and not overwrite and not goes_on and (file := foreign_weights(folder)) is not None:
            error = refused(file, "add --overwrite")
            raise ShardcError(error.what, where=f"{where} {folder}", fix=error.fix)


def _in_use(path: Path) -> bool:
    """Return whether an earlier run left a file here, or, in a folder, a finished checkpoint."""
    from shardc.runtime.state.checkpoint_folder import generations

    return bool(generations(path)) if path.is_dir() else path.exists()


def _exported(folder: Path, *, tied: bool) -> str:
    """Return which files of a run's folder other libraries can load, and how."""
    if isinstance(folder, Url):
        return f"no model.safetensors (a store has no file that ranks write together): shardc export MODEL {folder} OUT"
    if (folder / "adapter_config.json").exists():
        return f"adapter_model.safetensors\nload it with peft: PeftModel.from_pretrained(MODEL, {str(folder)!r})"
    if (folder / "config.json").exists():
        return f"config and model.safetensors\nload them with transformers: from_pretrained({str(folder)!r})"
    once = "; a tied weight is stored once, and load_state_dict alone misses its other names" if tied else ""
    written = "model.safetensors (the plain model's weights)"
    return f"{written}\nload them with safetensors.torch.load_model(model, FILE){once}"


def _summary(run: dict[str, Any], *, tied: bool) -> str:
    from shardc.cli.ranks.step_lines import speed

    loss = f"loss {run['losses'][-1]:.4f}" if run["losses"] else "no steps"
    held_out = f", held-out loss {run['held_out']:.4f}" if run["held_out"] is not None else ""
    held_out += "".join(f", {name} {x:.4g}" for name, x in run["held_out_outputs"].items())
    lines = [f"{run['steps']} steps in {run['seconds']:.1f} s, {speed(run)}: {loss}{held_out}"]
    if run["state"] == "stopped early":
        lines += [f"stopped early after step {run['step']}: {run['best']['stale']} evaluations brought nothing better"]
    if best := run["best"]:
        where = f" after step {best['step']}" if "step" in best else ""
        path = " (saved before the resume, to another folder)" if "step" in best else ""
        path = f": {best['checkpoint']} (export it: shardc export --best)" if best["checkpoint"] else path
        lines += [f"best held-out {best['metric']} {best['value']:.4g}{where}{path}"]
    if run["skipped"]:
        lines += [f"{run['skipped']} of {run['steps']} updates were left out: their loss or gradient was nan or inf"]
    if run["saved"]:
        lines += [
            f"saved to {run['saved']}: checkpoint/ (loads on any mesh), {_exported(expanded(run['saved']), tied=tied)}"
        ]
    return "\n".join(lines)
