"""Write numbered texts of the program after every pass, and the differences between them."""

from __future__ import annotations

import difflib
from pathlib import Path

from shardc.artifact import emit
from shardc.ir.program import Program


def dump(folder: Path, number: int, name: str, program: Program, before: str) -> str:
    """Write `NN-name.txt`, and `NN-name.diff` against the text before it, and return the new text."""
    folder.mkdir(parents=True, exist_ok=True)
    text = emit.text(program, full=True)
    (folder / f"{number:02d}-{name}.txt").write_text(text)
    if before:
        (folder / f"{number:02d}-{name}.diff").write_text(diff(before, text))
    return text


def diff(old: str, new: str) -> str:
    """Return the unified difference of two program texts."""
    return "".join(
        difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), "before", "after", n=2)
    )
