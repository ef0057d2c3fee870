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
        from shardc.cli import config_file
        from shardc.optional import needed

        if not model.startswith("hf:"):
            fix = f"write hf:{model}" if Path(model).is_dir() else "name a folder with config.json: shardc init hf:DIR"
            raise ShardcError("this is no model of transformers", where=model, fix=fix)
        config = config_file.path_of(model.removeprefix("hf:"), model)
        config_file.read(config, str(config), model)
        into = folder.expanduser()
        files = needed("text", "scaffold", "written")(config, into, str(data) if data else None, batch, seq)
        path, spec = files[:2]
        listed = "\n".join(f"written: {file}" for file in files)
        show(f"{listed}\ntrain with: shardc run {path} {spec}", {"files": [str(file) for file in files]})
