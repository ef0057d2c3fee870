"""Define `shardc checkpoint`: list, verify, compare, remove and export checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardc.cli.common import console, reporting
from shardc.cli.options import Command, DebugOption, JsonOption, option
from shardc.errors import ShardcError
from shardc.runtime.state import KEEP

if TYPE_CHECKING:
    from shardc.runtime.state.checkpoint_folder import Generation

app = typer.Typer(no_args_is_help=True, help="Checkpoints: list, verify, compare, remove, export.")

Folder = Annotated[
    Path, typer.Argument(help="folder that --save or engine.save wrote, or one checkpoint of it", show_default=False)
]


@app.command(cls=Command)
def ls(folder: Folder, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List the checkpoints in a folder, the last one first."""
    from shardc.ir.units import size

    with reporting(debug, as_json) as show:
        rows = [_row(g) for g in _all(folder)]
        for row in rows:
            whole = (
                [] if row["problem"] else [row["model"], row["mesh"], f"{row['tensors']} tensors", size(row["bytes"])]
            )
            shown = row["problem"] or ", ".join(filter(None, whole))
            show(f"{row['name']}  {shown}{'  (training went back to before it)' if row['replaced'] else ''}")
        show(document={"checkpoints": rows})


def _row(g: Generation) -> dict[str, Any]:
    from shardc.runtime.state.checkpoint_folder import check_files, read_index

    row: dict[str, Any] = {"name": g.path.name, "path": str(g.path), "step": g.step, "replaced": g.replaced}
    try:
        index = read_index(g.path)
        check_files(g.path, index)
    except ShardcError as e:
        return {**row, "problem": str(e)}
    mesh = " x ".join(f"{a}={n}" for a, n in index.mesh.items())
    facts = {"model": index.model, "mesh": mesh, "tensors": len(index.tensors), "bytes": index.nbytes}
    return {**row, **facts, "step": index.step, "problem": ""}


@app.command(cls=Command)
def verify(folder: Folder, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Read every byte of all checkpoints in a folder, or of one, and compare with the digests."""
    from shardc.runtime.state import checkpoint_folder

    with reporting(debug, as_json) as show:
        by_name = {}
        for g in _all(folder):
            with console.status(f"reading {g.path.name}"):
                by_name[g.path.name] = problems = [
                    e for error in checkpoint_folder.verify(g.path) for e in error.to_json()
                ]
            read = "whole" if any(g.path.glob("index.json")) else "read whole; torch's format has no digests of numbers"
            show(f"{g.path.name}  {read if not problems else f'{len(problems)} problems'}")
            for p in problems:
                show(f"  {p['where']}: {p['what']}")
        whole = not any(by_name.values())
        show(document={"ok": whole, "checkpoints": by_name})
        raise typer.Exit(0 if whole else 1)


@app.command(cls=Command)
def diff(a: Folder, b: Folder, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Show how two checkpoints differ, on any meshes. Exit status 1 if they differ."""
    from shardc.runtime.state import checkpoint_folder

    with reporting(debug, as_json) as show:
        differences = list(checkpoint_folder.diff(_one(a), _one(b)))
        for d in differences:
            show(f"{d.what}: {d.a or 'missing'}" + (f" | {d.b or 'missing'}" if d.a != d.b else ""))
        summary = f"{len(differences)} differences" if differences else "the checkpoints are the same"
        show(summary, {"differences": [vars(d) for d in differences]})
        raise typer.Exit(1 if differences else 0)


@app.command(cls=Command)
def prune(
    folder: Folder,
    keep: Annotated[int, option("number of checkpoints to keep; damaged ones do not count", min=1)] = KEEP,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Remove all but the last checkpoints of a folder, and the best. The last undamaged one always stays."""
    from shardc.runtime.state import checkpoint_folder
    from shardc.runtime.storage import disk_calls

    with reporting(debug, as_json) as show:
        holder = _all(folder)[0].path.parent
        try:
            lock = disk_calls.Lock(holder / checkpoint_folder.LOCK)
        except OSError as e:
            fix = "wait until the run that saves to it ends"
            raise ShardcError(f"the folder cannot be locked: {e.strerror}", where=str(holder), fix=fix) from None
        removed = [str(path) for path in checkpoint_folder.prune(holder, keep)]
        lock.release()
        text = "\n".join(f"removed {p}" for p in removed) or "there was nothing to remove"
        show(text, {"removed": removed})


@app.command(cls=Command)
def export(
    folder: Folder,
    new: Annotated[Path, typer.Argument(help="folder to write, new or empty", show_default=False)],
    to: Annotated[Literal["torch"], option("torch: torch.distributed.checkpoint's format")] = "torch",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a checkpoint in torch.distributed.checkpoint's format, for other tools."""
    from shardc.runtime.state.torch_conversion import export_checkpoint

    with reporting(debug, as_json) as show:
        exported = export_checkpoint(_one(folder), new)
        show(f"{exported}\nwritten to {new}", {"what": exported, "written": str(new)})


def _all(folder: Path) -> list[Generation]:
    from shardc.runtime.state.checkpoint_folder import checkpoints_in, none_in
    from shardc.runtime.storage.disk_calls import expanded

    folder = expanded(folder)
    if not (checkpoints := checkpoints_in(folder)):
        raise none_in(folder)
    return checkpoints


def _one(folder: Path) -> Path:
    return _all(folder)[0].path
