"""The size of the product, by folder: lines and files of Python. The numbers only fall.

`python -m tests.test_budget` lowers the numbers of tests/budget.toml to what the folders have. A commit that needs more
raises a number by hand, writes the reason behind it, and lowers another one.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
BUDGET = ROOT / "tests" / "budget.toml"
#: The folders of the product.
PRODUCT = ("shardc", "passes", "runtime", "specs")
_ROW = re.compile(r'^"(?P<folder>[^"]+)" = \[(?P<lines>\d+), (?P<files>\d+)\](?P<reason>.*)$', re.MULTILINE)


class Size(NamedTuple):
    lines: int
    files: int


def sizes() -> dict[str, Size]:
    """What each folder has, without those below it; tests as one."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *(f"{top}/*.py" for top in (*PRODUCT, "tests"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    lines, files = Counter[str](), Counter[str]()
    for path in (ROOT / name for name in listed if (ROOT / name).exists()):
        folder = "tests" if path.is_relative_to(ROOT / "tests") else str(path.parent.relative_to(ROOT))
        lines[folder] += len(path.read_text().splitlines())
        files[folder] += 1
    return {folder: Size(lines[folder], files[folder]) for folder in sorted(lines)}


def allowed() -> dict[str, Size]:
    rows = _ROW.finditer(BUDGET.read_text())
    return {row["folder"]: Size(int(row["lines"]), int(row["files"])) for row in rows}


def test_no_folder_is_above_its_budget() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository: the files of the product cannot be listed")
    budget = allowed()
    above = [
        f"{folder}: {size.lines} lines in {size.files} files, {budget.get(folder, Size(0, 0))} allowed"
        for folder, size in sizes().items()
        if folder not in budget or size.lines > budget[folder].lines or size.files > budget[folder].files
    ]
    assert not above, "make it smaller, or raise a number of tests/budget.toml with a reason, and lower another"


def _lowered(text: str) -> str:
    """The budget with the numbers that fell; folders that are gone leave it."""
    now = sizes()

    def row(found: re.Match[str]) -> str:
        if (size := now.get(found["folder"])) is None:
            return ""
        lines, files = min(size.lines, int(found["lines"])), min(size.files, int(found["files"]))
        return f'"{found["folder"]}" = [{lines}, {files}]{found["reason"]}'

    return re.sub(r"\n{2,}", "\n\n", _ROW.sub(row, text))


if __name__ == "__main__":
    BUDGET.write_text(_lowered(BUDGET.read_text()))
