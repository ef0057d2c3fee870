"""The command line: compile | inspect | verify | plan | run | rules | device | spec.

Exit status 0 = done, 1 = the check or run failed, 2 = the input is wrong.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shardc.errors import ShardcError

app = typer.Typer(
    name="shardc",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "A declarative model-sharding compiler for PyTorch: an unmodified model and a YAML spec become the program of"
        " every rank."
    ),
)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

Source = Annotated[
    str, typer.Argument(help="model.py, model.py:builder, hf:config.json, or a compiled DIR", show_default=False)
]
SpecFile = Annotated[Path | None, typer.Argument(help="spec.yaml (not with a compiled DIR)", show_default=False)]
MeshOption = Annotated[list[str] | None, typer.Option("--mesh", help="sizes instead of the spec's: dp=4,tp=1")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="a setting instead of the spec's: data.bucket_mb=50")
]
JsonOption = Annotated[bool, typer.Option("--json", help="one JSON document on stdout, nothing else there")]
BatchOption = Annotated[int | None, typer.Option(help="batch size of an hf: model's example batch")]
SeqOption = Annotated[int | None, typer.Option(help="sequence length of an hf: model's example batch")]
TrustOption = Annotated[bool, typer.Option("--trust", help="accept a compiled DIR whose files were edited")]
DebugOption = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]


Show = Callable[[str], None]


@contextmanager
def _told(debug: bool, as_json: bool = False) -> Iterator[Show]:
    """Gives what prints text on stdout. Errors as a person reads them; the exit status says whose they are.

    as_json: stdout is for one document: errors are a document too, and what the user's code prints goes to stderr.
    """
    stdout = sys.stdout

    def show(text: str) -> None:
        stdout.write(text if text.endswith("\n") else text + "\n")
        stdout.flush()

    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            yield show
    except ShardcError as e:
        if debug:
            traceback.print_exc()
        for one in e.errors:
            errors.print("[bold red]error[/] ", end="")
            errors.print(str(one), markup=False)
        if as_json:
            show(json.dumps({"errors": e.to_json()}))
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        errors.print("stopped")
        raise typer.Exit(130) from None


def _mesh(given: list[str] | None) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for pair in (p for text in given or [] for p in text.split(",") if p):
        name, _, size = pair.partition("=")
        if not name or not size.lstrip("-").isdigit():
            raise ShardcError(f"{pair!r} is no axis=size", where="--mesh", fix="write e.g. --mesh dp=4,tp=1")
        sizes[name] = int(size)
    return sizes


ONE_DEVICE: dict[str, Any] = {"shardc": 1, "mesh": {"dp": 1}}  # the spec of what is asked without one


def _is_artifact(source: str) -> bool:
    return Path(source).is_dir()


def _program(
    source: str,
    spec: Path | dict[str, Any] | None,
    mesh: list[str] | None,
    sets: list[str] | None,
    batch: int | None,
    seq: int | None,
    *,
    trust: bool = False,
    quiet: bool = False,
    dump: Path | None = None,
    world: int | None = None,
) -> Any:
    """A program from a compiled folder, or compiled now with its passes shown as they run."""
    if _is_artifact(source):
        if spec is not None or mesh or sets:
            raise ShardcError(
                "a compiled DIR has its spec inside",
                where=source,
                fix="leave the spec and overrides out, or compile the model again",
            )
        from shardc.artifact import load

        return load(source, trust=trust)
    if spec is None and not Path(source.partition(":")[0]).exists() and not source.startswith("hf:"):
        raise ShardcError(
            "there is no such file or compiled DIR",
            where=source,
            fix="make one with `shardc compile model.py spec.yaml -o DIR`",
        )
    if spec is None:
        raise ShardcError("no spec given", where=source, fix="add one: shardc ... model.py spec.yaml")
    import shardc
    from shardc.cli import model_file

    file = model_file.load(source, batch=batch, seq=seq)
    with errors.status("compiling") as status:
        program = shardc.compile(
            file.on_meta(),
            file.batch,
            spec,
            mesh=_mesh(mesh),
            overrides=tuple(sets or ()),
            loss=file.loss,
            dump=dump,
            world=world,
            on_pass=None if quiet else lambda name: status.update(f"compiling: {name}"),
        )
    program.meta |= {"model_ref": file.ref, "example": {"batch": batch, "seq": seq}}
    return program


def _summary(program: Any) -> str:
    from shardc.artifact.emit import human
    from shardc.report import comm_rows

    whole = sum(p.value.nbytes() for p in program.params)
    mine = sum(p.value.nbytes(program.mesh) for p in program.params)
    sent = sum(r.bytes for r in comm_rows(program))
    lines = [
        (
            f"{program.meta.get('model')} on {program.mesh}: {program.mesh.world} ranks, compiled in"
            f" {program.meta.get('compile_seconds')} s"
        ),
        f"parameters {human(whole)}, {human(mine)} a rank; collectives of {human(sent)} a step and rank",
    ]
    if written := program.meta.get("shard"):
        lines += ["shard:  # what `use` came to", *written]
    return "\n".join([*lines, *(f"note: {n}" for n in program.notes)])


def _version(asked: bool) -> None:
    if asked:
        from shardc import __version__

        print(f"shardc {__version__}")
        raise typer.Exit


@app.callback()
def shardc_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass


@app.command()
def compile(
    model: Source,
    spec: SpecFile = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="folder for the artifact")] = None,
    mesh: MeshOption = None,
    set_: SetOption = None,
    dump: Annotated[Path | None, typer.Option(help="folder for the text after every pass")] = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compile a model and a spec; write the artifact with -o, else print the program."""
    with _told(debug, as_json) as show:
        if _is_artifact(model):
            raise ShardcError(
                f"{model} is a folder", where=model, fix="name a model file; `shardc inspect DIR` shows a compiled one"
            )
        program = _program(model, spec, mesh, set_, batch, seq, quiet=as_json, dump=dump)
        if output:
            program.save(output)
        if as_json:
            from shardc.report import to_json

            show(json.dumps({**to_json(program), "output": str(output) if output else None}))
        elif output:
            show(f"{_summary(program)}\nwritten to {output}")
        else:
            show(str(program))


@app.command()
def inspect(
    model: Source,
    spec: SpecFile = None,
    stage: Annotated[int | None, typer.Option(help="only this stage")] = None,
    before: Annotated[
        bool, typer.Option("--before", help="the captured graph: the model as one device runs it; needs no spec")
    ] = False,
    diff: Annotated[
        str | None, typer.Option(help="what a pass changed: canonical | annotate | place | partition | data")
    ] = None,
    comm: Annotated[bool, typer.Option("--comm", help="collectives of a step by axis and cause")] = False,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="ops of a model file that no rule knows, and their lines; needs no spec")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="write one HTML file")] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="what a step holds on each rank, by kind; the op at the peak")
    ] = False,
    device: Annotated[
        str, typer.Option(help="with --memory: a name that `shardc device` lists, or a YAML file")
    ] = "h100-80g",
    schedule: Annotated[
        bool, typer.Option("--schedule", help="who computes what when in a pipeline: bubbles, live activations")
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="with --schedule or --memory: write it to an SVG file")] = None,
    mesh: MeshOption = None,
    set_: SetOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show a program: its typed text, the captured graph, what a pass changed, its collectives."""
    from shardc import report
    from shardc.artifact import emit

    with _told(debug, as_json) as show, tempfile.TemporaryDirectory() as folder:
        if svg and schedule == memory:
            raise ShardcError(
                "--svg draws the schedule, or memory over a step", where="--svg", fix="add --schedule or --memory"
            )
        if coverage:
            found = _coverage(model, batch, seq)
            show(json.dumps(found.to_json()) if as_json else str(found))
            return
        alone = before and spec is None and not _is_artifact(model)
        given = ONE_DEVICE if alone else spec
        program = _program(
            model, given, mesh, set_, batch, seq, trust=trust, quiet=as_json, dump=Path(folder) if diff else None
        )
        if stage is not None and not 0 <= stage < len(program.stages):
            raise ShardcError(
                f"there is no stage {stage}",
                where="--stage",
                fix=f"the program has stages 0 to {len(program.stages) - 1}",
            )
        if html:
            html.write_text(report.html(program))
        if schedule:
            _schedule(program, svg, as_json, show)
        elif memory:
            _memory(program, device, svg, as_json, show)
        elif as_json:
            show(json.dumps(report.to_json(program)))
        elif diff:
            show(_difference(Path(folder), diff, model))
        elif before:
            show(report.before(program))
        elif comm:
            show(report.comm_table(program))
        elif stage is not None:
            show(emit.function(program.stages[stage].graph, program, program.stages[stage].name))
        elif html:
            show(f"written to {html}")
        else:
            show(str(program))


def _coverage(source: str, batch: int | None, seq: int | None) -> Any:
    """Which ops of a model file have no rule."""
    if _is_artifact(source):
        raise ShardcError(
            "a compiled DIR has no op without a rule",
            where=source,
            fix="name a model file: shardc inspect model.py --coverage",
        )
    import shardc
    from shardc.cli import model_file

    file = model_file.load(source, batch=batch, seq=seq)
    with errors.status("capturing"):
        return shardc.coverage(file.on_meta(), file.batch, loss=file.loss)


def _memory(program: Any, device: str, svg: Path | None, as_json: bool, show: Show) -> None:
    from shardc.report import memory

    found = program.cost(device)
    if svg:
        svg.write_text(memory.svg(found), encoding="utf-8")
    if as_json:
        show(json.dumps(memory.to_json(found)))
    else:
        show(memory.table(found))
        if svg:
            show(f"written to {svg}")


def _schedule(program: Any, svg: Path | None, as_json: bool, show: Show) -> None:
    from rich.console import Console

    from shardc.report import timeline

    drawn = timeline.timeline(program)
    if svg:
        svg.write_text(timeline.svg(drawn), encoding="utf-8")
    if as_json:
        show(json.dumps(timeline.to_json(drawn)))
    elif svg:
        show(f"written to {svg}")
    elif sys.stdout.isatty():
        console = Console()
        console.print(timeline.text(drawn, width=console.width))
    else:
        show(timeline.text(drawn).plain)


def _difference(folder: Path, name: str, model: str) -> str:
    found = {p.stem.partition("-")[2]: p for p in sorted(folder.glob("*.diff"))}
    if not found:
        what = "--diff needs a model and a spec: a compiled DIR keeps no passes"
        raise ShardcError(what, where=model, fix="shardc inspect model.py spec.yaml --diff PASS")
    if name not in found:
        raise ShardcError(f"there is no pass {name}", where="--diff", fix=f"one of {', '.join(found)}")
    return found[name].read_text() or f"{name} changed nothing"


@app.command()
def verify(
    model: Source,
    spec: SpecFile = None,
    mesh: MeshOption = None,
    set_: SetOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    seed: Annotated[int, typer.Option(help="of the random weights and inputs")] = 0,
    trust: TrustOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run one step on all ranks in this process, in float64, and compare loss and every gradient with one device."""
    with _told(debug, as_json) as show:
        program = _program(model, spec, mesh, set_, batch, seq, trust=trust, quiet=as_json)
        with errors.status(f"running {program.mesh.world} ranks in float64"):
            report = program.verify(seed=seed)
        if as_json:
            findings = [{"where": f.where, "what": f.what, "fix": f.fix} for f in report.findings]
            show(
                json.dumps(
                    {
                        "ok": report.ok,
                        "checked": report.checked,
                        "worst": report.worst,
                        "seconds": report.seconds,
                        "findings": findings,
                    }
                )
            )
        else:
            show(str(report))
        raise typer.Exit(0 if report.ok else 1)


@app.command()
def run(
    model: Source,
    spec: SpecFile = None,
    steps: Annotated[int, typer.Option(min=0, help="optimizer steps")] = 100,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="processes on this machine; default: what the mesh needs")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="folder for the checkpoint and model.safetensors")] = None,
    resume: Annotated[Path | None, typer.Option(help="folder that --save wrote, on any mesh")] = None,
    seed: Annotated[int, typer.Option(help="of initial weights and dropout")] = 0,
    log: Annotated[Path | None, typer.Option(help="folder for steps.jsonl")] = None,
    routing: Annotated[
        bool, typer.Option("--routing", help="say in every step line how tokens are spread over experts")
    ] = False,
    mesh: MeshOption = None,
    set_: SetOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train: starts one process a rank on this machine, or joins the world of torchrun or Slurm."""
    from shardc.cli import worker
    from shardc.runtime import launch

    with _told(debug, as_json) as show, tempfile.TemporaryDirectory(prefix="shardc-run-") as folder:
        launch.join_slurm()
        world = int(os.environ["WORLD_SIZE"]) if launch.in_world() else nproc
        program = _program(model, spec, mesh, set_, batch, seq, trust=trust, quiet=as_json, world=world)
        if resume and not (resume / "checkpoint").is_dir():
            raise ShardcError(
                f"there is no checkpoint in {resume}", where="--resume", fix="name a folder that --save wrote"
            )
        if world is not None and world != program.mesh.world:
            what = f"the mesh {program.mesh} has {program.mesh.world} ranks, not {world}"
            raise ShardcError(what, where="--nproc", fix="change --mesh, or leave --nproc out")
        ref = program.meta.get("model_ref")
        if not ref:
            raise ShardcError(
                "this artifact does not say which model file it came from",
                where=model,
                fix="compile it with `shardc compile -o DIR`",
            )
        example = program.meta.get("example", {})
        artifact = Path(model) if _is_artifact(model) else Path(folder) / "program"
        if not _is_artifact(model):
            program.save(artifact)
        job = worker.Job(
            program=str(artifact),
            model=ref,
            batch=example.get("batch"),
            seq=example.get("seq"),
            steps=steps,
            seed=seed,
            save=str(save or ""),
            resume=str(resume or ""),
            log=str(log or ""),
            quiet=as_json,
            result=str(Path(folder) / "result.json"),
            trust=trust,
            routing=routing,
            progress=folder,
            joined=launch.in_world(),
        )
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(vars(job)))
        if launch.in_world():
            worker.main(str(file))
            status = 0
        else:
            culprit: list[int] = []
            command = [sys.executable, "-m", "shardc.cli.worker", str(file)]
            to = sys.stderr.fileno() if as_json else None
            status = launch.launch(command, program.mesh, progress=Path(folder), failed_first=culprit.append, stdout=to)
            if culprit and as_json:
                told = Path(folder) / f"errors{culprit[0]}.json"
                silent = [{"where": f"rank {culprit[0]}", "what": "the process was killed", "fix": ""}]
                show(json.dumps({"errors": json.loads(told.read_text()) if told.exists() else silent}))
        result = Path(job.result)
        if status == 0 and result.exists():
            _tell(json.loads(result.read_text()), as_json, show, tied=any(p.aliases for p in program.params))
    if launch.in_world():
        worker.leave(status)
    raise typer.Exit(status)


def _tell(summary: dict[str, Any], as_json: bool, show: Show, *, tied: bool) -> None:
    if as_json:
        show(json.dumps(summary))
        return
    held = f", held-out loss {summary['held_out']:.4f}" if summary["held_out"] is not None else ""
    last = f"loss {summary['losses'][-1]:.4f}" if summary["losses"] else "no steps"
    show(
        f"{summary['steps']} steps in {summary['seconds']:.1f} s, {summary['tokens_per_second']:,.0f} tokens/s:"
        f" {last}{held}"
    )
    if summary["saved"]:
        once = "; a tied weight is stored once, and load_state_dict alone misses its other names" if tied else ""
        show(
            f"saved to {summary['saved']}: checkpoint/ (loads on any mesh), model.safetensors (the plain model's"
            " weights)"
        )
        show(f"load them with safetensors.torch.load_model(model, FILE){once}")


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="model.py, model.py:builder, or hf:config.json", show_default=False)],
    devices: Annotated[int | None, typer.Option(help="how many there are; required, but with --given")] = None,
    device: Annotated[str, typer.Option(help="a100-80g | h100-80g | h200, or a YAML file")] = "h100-80g",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write the best spec, annotated with why")
    ] = None,
    given: Annotated[Path | None, typer.Option(help="price this spec, and search for no other")] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", help="rows of a step (default: those that batch() gives)")
    ] = None,
    precision: Annotated[str, typer.Option(help="bfloat16 | float16 | float32 | pure-bfloat16 | model")] = "bfloat16",
    largest: Annotated[str | None, typer.Option(help="batch | sequence: also answer how large it may be")] = None,
    fewest: Annotated[bool, typer.Option("--fewest", help="also answer on how few devices anything fits")] = False,
    headroom: Annotated[float, typer.Option(help="share of memory left to the allocator, NCCL and workspaces")] = 0.05,
    batch: BatchOption = None,
    seq: SeqOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the spec that trains a model fastest on so many devices, by the cost model alone: meshes, ZeRO,
    recomputation, schedules.
    """
    with _told(debug, as_json) as show:
        if _is_artifact(model):
            fix = "name a model file; `shardc inspect DIR --memory` prices a compiled one"
            raise ShardcError("a compiled DIR has its spec already", where=model, fix=fix)
        from shardc.cli.plan import command

        status = command(
            model,
            batch=batch,
            seq=seq,
            output=output,
            as_json=as_json,
            show=show,
            console=errors,
            devices=devices,
            device=device,
            given=given,
            global_batch=global_batch,
            precision=precision,
            largest=largest,
            fewest=fewest,
            headroom=headroom,
        )
    raise typer.Exit(status)


@app.command()
def rules(
    ops: Annotated[
        list[str] | None,
        typer.Argument(help="names or globs: aten.mm.default 'aten.*norm*' (default: all)", show_default=False),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="prove them against the whole ops; exit status 1 if one is wrong")
    ] = False,
    file: Annotated[
        str | None, typer.Option("--file", help="a Python file that registers rules; alone: only its rules")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the rules of ops: what may be split. --check proves them: forward, backward, on 2, 3, 4, 6 parts and on two
    axes.
    """
    from shardc.cli.rules import command

    with _told(debug, as_json) as show:
        status = command(ops or [], check=check, file=file, as_json=as_json, show=show)
        raise typer.Exit(status)


@app.command()
def device(
    which: Annotated[
        str | None,
        typer.Argument(help="a name or a YAML file; cpu, cuda: this machine's, once measured", show_default=False),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="measure this machine's cpu or cuda (default: cuda if it is there)")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="with --measure: write this file, not that of `--device cpu`")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List devices that programs are priced for; show one and where its numbers are from; measure this machine."""
    from shardc.cli.device import listed, measured_here
    from shardc.cli.device import show as shown

    with _told(debug, as_json) as show:
        found: str | Path | None = which
        if measure:
            with errors.status("measuring") as status:
                found = measured_here(which, output, lambda what: status.update(f"measuring {what}"))
            errors.print(f"written to {found}")
        elif output:
            raise ShardcError("-o is where --measure writes to", where="-o", fix="add --measure")
        show(shown(found, as_json) if found else listed(as_json))


@app.command()
def spec(
    schema: Annotated[bool, typer.Option("--schema", help="the JSON Schema of specs, for editors")] = False,
) -> None:
    """About the spec format: --schema prints its JSON Schema."""
    from shardc.spec import Spec

    if not schema:
        errors.print("shardc spec --schema prints the JSON Schema of specs; ready specs are in shardc.specs")
        raise typer.Exit(2)
    print(json.dumps(Spec.json_schema(), indent=1))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
