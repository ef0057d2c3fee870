"""Code blocks of the documentation: Python runs, specs parse, commands exist."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

import shardc
from docs import generate
from shardc.cli import app
from shardc.spec import Spec
from tests.docs.pages import PAGES, README, Block, Page
from tests.features.text import chat_folder

# Sections of the documentation's fragments name axes of a mesh that the page shows elsewhere, or not at all.
MESH = {"pp": 4, "dp_outer": 2, "dp": 2, "ep": 2, "tp": 2, "cp": 2}
GROUP = typer.main.get_command(app)


@pytest.mark.parametrize("page", [p for p in PAGES if p.blocks("python")], ids=str)
def test_python(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page in one namespace, with README's model, its batch, and a spec.yaml for one rank.

    README's is tried below, and what is added to the code is tried in test_contributing.py.
    """
    monkeypatch.chdir(tmp_path)
    generate.example(tmp_path)
    (tmp_path / "spec.yaml").write_text("shardc: 1\nmesh: {tp: 1}\nshard: {use: structure}\n")
    if "hf:base" in page.text:
        chat_folder.write_all(tmp_path)
    names: dict[str, Any] = {"torch": torch, "shardc": shardc}
    exec(compile((tmp_path / "model.py").read_text(), str(tmp_path / "model.py"), "exec"), names)
    names |= {"model": names["model"](), "batch": names["batch"]()}
    for block in page.blocks("python"):
        if (
            page is README
            or block.skipped
            or any("tried by" in note or note in ("rule", "sample", "own op") for note in block.notes)
        ):
            continue
        code = compile("\n" * block.line + block.text, str(page), "exec")
        exec(code, names)


@pytest.mark.parametrize("block", [b for p in PAGES for b in p.blocks("yaml")], ids=str)
def test_specs_parse(block: Block) -> None:
    """A fragment is completed by a version and a mesh of all axes."""
    if block.skipped:
        return
    for text in re.split(r"^---$", block.text, flags=re.MULTILINE):
        written = yaml.safe_load(text)
        spec = {"shardc": 1, "mesh": MESH} | written
        world = 2 if -1 in spec["mesh"].values() else None
        assert Spec.load(spec, world=world).mesh.world > 1


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_exist(page: Page) -> None:
    """Subcommands and options of every `shardc ...` line of a console block are there, and so are make's targets."""
    makefile = (
        page.file.parents[0] if page.file.name in ("README.md", "CONTRIBUTING.md") else README.file.parent
    ) / "Makefile"
    targets = set(re.findall(r"^(\w+):", makefile.read_text(), re.MULTILINE))
    for block in page.blocks("console"):
        commands = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
        assert commands, f"{block} has no line that begins with $"
        for command in commands:
            words = shlex.split(command, comments=True)
            if words[0] == "make":
                assert next(w for w in words[1:] if "=" not in w) in targets, f"{block}: {command}"
            if "shardc" not in words:
                continue
            name, *rest = words[words.index("shardc") + 1 :]
            shown: Any = GROUP.commands[name]  # type: ignore[attr-defined]
            if hasattr(shown, "commands"):  # of a group of commands
                shown = shown.commands[rest.pop(0)]
            options = {o for p in shown.params for o in p.opts}
            assert {w.partition("=")[0] for w in rest if w.startswith("-")} <= options, f"{block}: {command}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_languages(page: Page) -> None:
    """Every fenced block says what it is, so that none is left out of the tests above."""
    known = {"python", "yaml", "console", "text", "diff", "{toctree}", "{include}"}
    assert set(re.findall(r"^ *```(\S*)[^\n]*\n(?:.*?)^ *```$", page.text, re.DOTALL | re.MULTILINE)) <= known


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    generate.example(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("example")
def test_readme_shows_what_a_rank_runs() -> None:
    """Each value of the first block is a line of the program, with its type."""
    (block,) = (b for b in README.blocks("python") if "what a rank runs" in b.notes)
    program = " ".join(CliRunner().invoke(app, ["compile", "model.py", "spec.yaml"]).output.split())
    for line in re.split(r"\n(?=\w)", block.text):
        assert " ".join(line.split()) in program


def test_readme_s_python(example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In one process: what each process of torchrun does is done by the one rank of a mesh of one."""
    monkeypatch.syspath_prepend(example)
    monkeypatch.setitem(sys.modules, "model", None)  # type: ignore[arg-type]  # so that it is forgotten after the test
    del sys.modules["model"]
    (example / "spec.yaml").write_text("shardc: 1\nmesh: {tp: 1}\nshard: {use: structure}\n")
    code = next(b.text for b in README.blocks("python") if "shardc.compile" in b.text)
    assert len(code.splitlines()) == 9
    whole, each = code.split("engine = ", 1)
    names: dict[str, Any] = {}
    exec(compile(whole, "README.md", "exec"), names)
    assert names["program"].mesh.axes == (("tp", 4),)
    assert names["sim"].loss.isfinite()
    assert "ops.all_reduce" in capsys.readouterr().out
    names["program"] = shardc.compile(names["model"], names["batch"], "spec.yaml")
    exec(compile("engine = " + each.replace("devices=64", "devices=2"), "README.md", "exec"), names)
    assert float(names["loss"]) == pytest.approx(float(names["sim"].loss), rel=1e-6)
    assert isinstance(names["module"], torch.nn.Module)
    assert names["plan"].best is not None
