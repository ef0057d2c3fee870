"""Console blocks that are marked `<!-- run -->`: their commands print what the page shows.

A page's commands run in order, in a folder with README's example, the model of the second tutorial (lm.py), and the
files that the page itself introduces: a line that begins with the file's name in backquotes, then a code block.
A page with `hf:base` also has a model in `base`, and chats.jsonl.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from docs import generate
from shardc.cli import app
from tests.docs.pages import PAGES, ROOT, Page
from tests.features.text import chat_folder

LM = ROOT / "docs" / "tutorial" / "from-ddp-to-3d.md"
_FILE = re.compile(
    r"^`([\w.]+\.(?:py|yaml))`[^\n]*\n\n(?:<!-- [^\n]* -->\n)?```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_RUN = re.compile(r"^<!-- run -->\n```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_STARTS_RANKS = ("run", "score", "generate")


def output_of(command: str) -> str:
    """What a command prints; commands that start ranks, and other programs, run in processes of their own."""
    program, *words = shlex.split(command, comments=True)
    if program == "shardc" and words[0] not in _STARTS_RANKS:
        return CliRunner().invoke(app, words).output
    module = {"shardc": "shardc", "torchrun": "torch.distributed.run"}[program]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    arguments = [sys.executable, "-m", module, *words]
    for _ in range(3):
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path})
        if "terminate called without an active exception" not in done.stderr:
            break  # else torch has aborted a process that had done its work: github.com/pytorch/pytorch/pull/179291
    assert done.returncode == 0, done.stderr
    return done.stdout


def same(text: str) -> str:
    """Without what differs from run to run and from processor to processor: seconds, speeds, memory, rounding."""
    text = re.sub(r"(?<=relative difference )\d\.\de-1[3-9]", "_", text)
    text = re.sub(r" +\d+ s left$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\b\d[\d.]* s\b", "_ s", text)
    return re.sub(r" +[\d.]+( [kM])? (samples|tokens)/s( +[\d.]+ MiB( peak)?)?", " _ a second", text)


def shows(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed. A line `...` stands for any lines."""
    parts = re.split(r"^\.\.\.\n", same(shown), flags=re.MULTILINE)
    return re.fullmatch(".*?".join(map(re.escape, parts)), same(printed), re.DOTALL) is not None


@pytest.mark.parametrize("page", [p for p in PAGES if _RUN.search(p.text)], ids=str)
def test_its_commands(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    generate.example(tmp_path)
    (tmp_path / "lm.py").write_text(dict(_FILE.findall(LM.read_text()))["lm.py"])
    if "hf:base" in page.text:
        chat_folder.write_all(tmp_path)
    steps = sorted([*_FILE.finditer(page.text), *_RUN.finditer(page.text)], key=lambda found: found.start())
    for step in steps:
        if step.re is _FILE:
            (tmp_path / step[1]).write_text(step[2])
            continue
        for part in re.split(r"^\$ ", step[1], flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            printed = output_of(command)
            assert shows(shown, printed), f"{page}: {command}\n{printed}"
