"""Define `shardc init`: write a model file and a spec for a folder of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardc.cli.common import reporting
from shardc.cli.options import DebugOption, JsonOption, option
from shardc.errors import ShardcError


def command(
    model: Annotated[str, typer.Argument(help="hf:DIR, a folder with a model of transformers", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="folder for the files")] = Path("."),
    data: Annotated[
        Path | None, option("conversations, or texts, in a .jsonl file; default: an example of them is written")
    ] = None,
    batch: Annotated[int, option("rows of a global batch", min=1)] = 8,
    seq: Annotated[int | None, option("tokens of a row; default: 1024, or the longest of the model", min=8)] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a model file and a spec that fine-tune a model of transformers, to run as they are and to change."""
    with reporting(debug, as_json) as show:
        from shardc.cli import model_file
        from shardc.optional import needed

        if not model.startswith("hf:"):
            fix = f"write hf:{model}" if Path(model).is_dir() else "name a folder with config.json: shardc init hf:DIR"
            raise ShardcError("this is no model of transformers", where=model, fix=fix)
        file, path = model_file.load(model), str(data.expanduser()) if data else None
        positions, write = model_file.takes_positions(file), needed("text", "scaffold", "written")
        files = write(model_file.source_of(file.ref), folder.expanduser(), path, batch, seq, positions=positions)
        names = [str(written) for written in files]
        listed = "\n".join(f"written: {name}" for name in names)
        show(f"{listed}\ntrain with: shardc run {names[0]} {names[1]}", {"files": names})
