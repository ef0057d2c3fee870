"""What the documentation adds to the code, added and tried."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from docs import generate
from shardc.cli import app
from shardc.passes import PIPELINE, Entry
from shardc.rules import RULES
from shardc.rules.core.registry import find, rule
from shardc.runtime import schedule
from shardc.verify.rules.check import check_op
from tests.docs.pages import CONTRIBUTING, ROOT, Page
from tests.rules.making import call, sample
from tests.rules.samples import SAMPLES

OP = torch.ops.aten.vdot.default


def noted(note: str) -> str:
    return next(b.text for b in CONTRIBUTING.blocks("python", "console") if any(n.startswith(note) for n in b.notes))


@pytest.fixture
def registry() -> Iterator[None]:
    """Rules that a test registers are gone after it."""
    yield
    for table in (RULES, SAMPLES):
        for op in [op for op in table if op is OP or str(op).startswith("mylib")]:
            del table[op]
    find.cache_clear()


@pytest.mark.usefixtures("registry")
def test_a_rule_for_an_op_of_ones_own(tmp_path: Path) -> None:
    """The file of docs/explanation/rules.md."""
    page = Page(ROOT / "docs" / "explanation/rules.md")
    (tmp_path / "my_rules.py").write_text(next(b.text for b in page.blocks("python") if "own op" in b.notes))
    done = CliRunner().invoke(app, ["rules", "--check", "--file", str(tmp_path / "my_rules.py")])
    assert done.exit_code == 0, done.output
    assert "1 rules on" in done.stdout
    assert "0 wrong, 0 too strict" in done.stdout


@pytest.mark.usefixtures("registry")
def test_the_rule() -> None:
    assert find(OP) is None
    find.cache_clear()
    names: dict[str, Any] = {"aten": torch.ops.aten, "rule": rule, "sample": sample, "call": call}
    exec(noted("rule"), names)
    exec(noted("sample"), names)
    report = check_op(OP, SAMPLES[OP])
    assert (report.calls, report.wrong) == (4, [])


def test_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On README's example: it changes what is shown, and the program is still equal to one device."""
    generate.example(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"Entry": Entry}
    exec(noted("pass"), names)
    at = 1 + next(i for i, entry in enumerate(PIPELINE) if entry.name == "canonical")
    lines = (*PIPELINE[:at], *eval(f"({noted('entry')})", names), *PIPELINE[at:])
    monkeypatch.setattr(importlib.import_module("shardc.compile"), "PIPELINE", lines)
    command, _, output = noted("diff").removeprefix("$ shardc ").partition("\n")
    done = CliRunner().invoke(app, command.split())
    assert done.output == output
    assert CliRunner().invoke(app, ["verify", "model.py", "spec.yaml"]).exit_code == 0


@pytest.mark.parametrize(("stages", "ranks", "microbatches"), [(1, 1, 3), (2, 2, 1), (4, 2, 3), (4, 4, 8)])
def test_the_schedule(stages: int, ranks: int, microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    exec(noted("schedule"), names)
    monkeypatch.setitem(schedule.SCHEDULES, "serial", schedule.Maker(names["serial"]))
    made = schedule.make("serial", stages=stages, ranks=ranks, microbatches=microbatches)
    edges = [(i, i + 1) for i in range(stages - 1)]
    assert max(schedule.prove(made, edges).live) == stages // ranks  # one microbatch at a time
