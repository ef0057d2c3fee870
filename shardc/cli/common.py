"""Share code between the commands: reports of errors, progress, and the program that the user names.

No command imports torch when its module is loaded, so that `shardc --help` is quick.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console

from shardc.cli.options import Named
from shardc.collector import collect_seldom
from shardc.errors import ERROR, ShardcError
from shardc.runtime.storage.urls import Url
from shardc.runtime.time_limits import FAILING

if TYPE_CHECKING:
    from shardc.api import Program
    from shardc.cli.model_file import ModelFile

collect_seldom()  # a rank that trains restores the default (ranks/job.py)

#: Errors, progress and notes go to stderr: stdout is for results.
console = Console(stderr=True, highlight=False, soft_wrap=True)

#: Prints a text, or, with --json, a document. Either may be a function that returns it.
Show = Callable[..., None]
#: The spec of an hf: model, and of `inspect --before`, when the user names none.
ONE_DEVICE: dict[str, Any] = {"shardc": 1, "mesh": {"dp": 1}}
#: Seconds between lines of progress if there is no bar.
EVERY = 5.0


def json_text(value: Any, **options: Any) -> str:
    """Return a value as JSON. nan and inf, which JSON does not have, become null: strict readers stop at them."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), **options)


@contextmanager
def reporting(debug: bool, as_json: bool = False) -> Iterator[Show]:
    """Yield a function that prints results on stdout. Print a ShardcError, and exit with status 2.

    as_json: stdout has one document, also for errors; output of the user's code goes to stderr.
    """
    stdout = sys.stdout

    def show(text: str | Callable[[], str] = "", document: Any = None) -> None:
        shown = document if as_json else text
        if callable(shown):
            shown = shown()
        if shown is not None and shown != "":
            stdout.write(f"{json_text(shown) if as_json else shown.rstrip(chr(10))}\n")
            stdout.flush()

    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            yield show
    except ShardcError as e:
        if debug:
            traceback.print_exc()
        _end(e, show)
    except OSError as e:
        if debug or not e.filename or not e.strerror:
            raise
        error = ShardcError(e.strerror, where=str(e.filename), fix="name a file or folder of the right kind")
        _end(error, show)
    except KeyboardInterrupt:
        console.print("stopped")
        raise typer.Exit(130) from None


def _end(error: ShardcError, show: Show) -> NoReturn:
    """Print an error, and end the process with exit status 2."""

    def report() -> None:
        print_error(error.text())
        show(document={"errors": error.to_json()})

    once(error.text(), report)
    raise typer.Exit(2) from None


def once(text: str, report: Callable[[], None]) -> None:
    """Call `report`, which prints an error, unless another rank of torchrun or Slurm has printed the same text.

    A rank that is not connected to the others prints it, too. The one that holds their store waits for them.
    """
    store: Any = None
    rank, world, first = 0, 1, True
    if "RANK" in os.environ:  # else nothing need be imported
        from shardc.runtime.mesh import presence
        from shardc.runtime.mesh.watch import within

        store, rank, world = presence.joined()
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun shows what is in it at its end
        more = {"py_callstack": text.rstrip(), "timestamp": int(time.time())}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))
    with suppress(RuntimeError):  # the store went with the process that held it
        if store is not None:
            store.set_timeout(timedelta(seconds=FAILING))
            presence.failed(text)
            first = store.add(f"error/{zlib.crc32(text.encode())}", 1) == 1
    if first:
        report()
    with suppress(RuntimeError):
        ended = store.add("ended", 1) if store is not None else world
        if rank == 0 and ended < world and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            within(FAILING, lambda: store.add("ended", 0) >= world)


def print_error(text: str) -> None:
    """Print an error text on stderr, with the word "error" in red at the start of each error."""
    for line in text.splitlines():
        if line.startswith(ERROR):
            console.print(f"[bold red]{ERROR}[/]", end="")
        console.print(line.removeprefix(ERROR), markup=False)


@contextmanager
def progress(doing: str, *, quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Show the progress of slow work on stderr: a bar in a terminal, else a line every few seconds.

    Yields the function to call: (name of the work, number done, total number or 0 if unknown).
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(30), TimeElapsedColumn()
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(doing, total=None)
        started = printed = time.monotonic()

        def on(doing: str, done: int, total: int) -> None:
            nonlocal printed
            bar.update(task, description=doing, completed=done, total=total or None)
            now = time.monotonic()
            if not quiet and not console.is_terminal and now - printed >= EVERY:
                printed = now
                count = f" ({done + 1} of {total})" if total else ""
                console.print(f"{now - started:3.0f} s: {doing}{count}", markup=False)

        yield on


def check_outputs(files: Mapping[str, Path | None] = {}, folders: Mapping[str, Path | None] = {}) -> None:
    """Check that a command can write its outputs before it starts work. Raises ShardcError if not.

    files: {option: file}, in a folder that exists. folders: {option: folder}; the command creates missing ones.
    """
    for option, path in files.items():
        if path is None:
            continue
        if path.is_dir():
            raise ShardcError(f"{path} is a folder", where=option, fix=f"name a file in it, {option} {path / 'NAME'}")
        if not path.parent.is_dir():
            fix = f"mkdir -p {path.parent}, or name a file in an existing folder"
            raise ShardcError(f"there is no folder {path.parent}", where=option, fix=fix)
        if path.exists():  # a file to replace, or a pipe such as /dev/fd/63
            if not os.access(path, os.W_OK):
                raise ShardcError(f"cannot write {path}", where=option, fix="name a place that can be written to")
            continue
        _try(path.parent, path, option)
    for option, path in folders.items():
        if path is None:
            continue
        if isinstance(path, Url) and option == "--save":
            path.check(option)
            continue
        existing = next(p for p in (path, *path.absolute().parents) if p.exists())
        if not existing.is_dir():
            raise ShardcError(f"{existing} is a file, not a folder", where=option, fix="name a new or empty folder")
        _try(existing, path, option)


def _try(folder: Path, path: Path, option: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as f:
            f.write(b"tried before the work")
    except OSError as e:
        fix = "name a place that can be written to"
        raise ShardcError(f"cannot write {path}: {e.strerror}, in {folder}", where=option, fix=fix) from None


def is_artifact(source: str) -> bool:
    """Return whether `source` is a compiled folder. Raises ShardcError for a folder of transformers."""
    folder = Path(source)
    if (folder / "config.json").is_file() and not (folder / "manifest.json").is_file():
        raise ShardcError("this is a folder of transformers", where=source, fix=f"write hf:{source}")
    return folder.is_dir()


def program_of(
    named: Named,
    spec: Path | dict[str, Any] | None = None,
    *,
    dump: Path | None = None,
    world: int | None = None,
    as_compiled: bool = False,
) -> Program:
    """Return the program of a compiled folder, or compile it now.

    The running pass is shown on stderr unless --json. spec: used if the user names none. as_compiled: accept a compiled
    folder although the model file's forward or loss has changed since, with a note; without it, raise ShardcError.
    """
    source = named.model
    spec = named.spec or spec or (ONE_DEVICE if source.startswith("hf:") else None)
    if named.forward and named.score:
        fault, fix = "a program returns either values or scores", "remove one of the two"
        raise ShardcError(fault, where="--forward, --score", fix=fix)
    if is_artifact(source):
        if named.forward or named.score:
            fault, fix = "the options of a compiled DIR are fixed", "compile the model with it: -o DIR"
            raise ShardcError(fault, where="--forward" if named.forward else "--score", fix=fix)
        if spec is not None or named.mesh or named.overrides or named.batch or named.seq or named.data:
            fault = "a compiled DIR already contains its spec and the sizes of its batch, and names its data"
            fix = "leave out the spec, --mesh, --set, --data, --batch and --seq, or compile the model again"
            raise ShardcError(fault, where=source, fix=fix)
        program = _loaded(source, trust=named.trust, model=named.model_file)
        _check_source(source, program, named.model_file, refuse=not as_compiled)
        return program
    if spec is None and not Path(source.partition(":")[0]).exists():
        fix = "make one with `shardc compile model.py spec.yaml -o DIR`"
        raise ShardcError("this file or compiled DIR does not exist", where=source, fix=fix)
    if spec is None:
        raise ShardcError("no spec given", where=source, fix="add one: shardc ... model.py spec.yaml")
    from shardc.cli import model_file
    from shardc.compile import compile

    data = str(Path(named.data).expanduser().resolve()) if named.data else None
    file = model_file.load(source, batch=named.batch, seq=named.seq, data=data)
    module = file.on_meta()
    with console.status("compiling") as status:
        program = compile(
            module,
            file.batch,
            spec,
            mesh=_mesh_sizes(named.mesh or []),
            overrides=tuple(named.overrides or ()),
            loss=file.loss,
            forward="score" if named.score else (file.outputs or True) if named.forward else False,
            dump=dump,
            world=world,
            on_pass=None if named.as_json else lambda name: status.update(f"compiling: {name}"),
        )
    names = model_file.captured(file.ref)
    return replace(
        program,
        meta=program.meta | {"model_ref": file.ref, "example": {"batch": named.batch, "seq": named.seq, "data": data}},
        origins=(*((model_file.source_of(file.ref), name) for name in names), *program.origins),
    )


def example_sizes(program: Program) -> dict[str, Any]:
    """Return the batch size, the sequence length and the data of an hf: model, those that were set.

    The data of a compiled folder, which may come from anybody, may be a Python file: only an absolute path counts.
    """
    given = {k: x for k, x in program.meta.get("example", {}).items() if k in ("batch", "seq", "data") and x}
    return {k: x for k, x in given.items() if k != "data" or os.path.isabs(x)}


def file_of(program: Program) -> ModelFile:
    """Return the model file that a program was compiled from."""
    from shardc.cli import model_file

    return model_file.load(str(program.meta["model_ref"]), **example_sizes(program))


def _check_source(folder: str, program: Program, model: str | None, *, refuse: bool) -> None:
    """Raise or note if the model file changed after compilation. model: the file of --model."""
    from shardc.artifact import model_source
    from shardc.cli import model_file

    fault = model_source.stale(program.meta, model_file.source_of(model) if model else None)
    if fault and refuse:
        file = Path(model_file.source_of(model) if model else program.meta["source"]["main"])
        again = f"shardc compile {file.name} SPEC -o {folder}"
        fix = f"compile it again ({again}), or, to train it as it is, add --as-compiled"
        raise ShardcError(fault, where=folder, fix=fix)
    if fault:
        console.print(f"note: {folder}: {fault}", markup=False)


def _loaded(folder: str, *, trust: bool, model: str | None) -> Program:
    """Load the program of a compiled folder; no user code runs, unless the program calls a custom op.

    Then the Python file that registers the op is imported, and a note on stderr says so.
    """
    from shardc.api import load
    from shardc.artifact import parser
    from shardc.cli import model_file

    try:
        return load(folder, trust=trust, as_compiled=True)
    except parser.MissingOpError as e:
        file = model_file.path_of(model or model_of(e.meta))
        if not file or not Path(file).is_file():
            lost = f"; the file that the program was compiled from, {file}, does not exist" if file else ""
            raise ShardcError(f"{e.what}{lost}", where=e.where, fix=e.fix) from None
        console.print(f"importing {file}: {folder} calls an op that it registers", markup=False)
        model_file.imported(file)
        return load(folder, trust=trust, as_compiled=True)


def model_of(facts: Mapping[str, Any]) -> str:
    """Return the model reference in the facts of a compiled folder, or "" if none or not an absolute path.

    The folder may come from anybody, and the file is run: a path relative to the current folder is not trusted.
    """
    from shardc.cli import model_file

    ref = str(facts.get("model_ref") or "")
    file = model_file.path_of(ref) or ref.rpartition(":")[2]
    return ref if os.path.isabs(file) else ""


def _mesh_sizes(options: list[str]) -> dict[str, int]:
    """Parse the --mesh options: dp=4,tp=1 becomes {"dp": 4, "tp": 1}."""
    sizes: dict[str, int] = {}
    for pair in (p for text in options for p in text.split(",") if p):
        axis, _, size = pair.partition("=")
        if not axis or not re.fullmatch(r"-?[0-9]{1,18}", size):
            raise ShardcError(f"{pair!r} does not name an axis and its size", where="--mesh", fix="e.g. dp=4,tp=1")
        if axis in sizes:
            raise ShardcError(f"{axis} has two sizes, {sizes[axis]} and {size}", where="--mesh", fix="keep one of them")
        sizes[axis] = int(size)
    return sizes
