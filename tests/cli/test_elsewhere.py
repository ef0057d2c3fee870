"""Options of other trainers: the error says where shardc has them."""

from __future__ import annotations

import re

import pytest
import typer.main
from typer.testing import CliRunner

from shardc.cli import app
from shardc.cli.elsewhere import PLACES


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run model.py spec.yaml --lr 1e-3", "def optimizer(params)"),
        ("run model.py --epochs 3", "--steps counts steps"),
        ("run model.py --gradient-accumulation-steps 2", "batch.microbatches"),
        ("train model.py", "shardc run model.py spec.yaml"),
    ],
)
def test_it_says_where(line: str, said: str) -> None:
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2
    words = re.sub(r"[│\s]+", " ", result.output)
    assert said in words, result.output


def test_what_nobody_else_has_stays_as_it_was() -> None:
    assert "No such option: --frobnicate" in CliRunner().invoke(app, ["run", "model.py", "--frobnicate"]).output


def test_options_and_commands_that_are_named_exist() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {o for c in commands.values() for p in c.params for o in p.opts}
    for place in PLACES.values():
        assert set(re.findall(r"(?<![\w-])--[a-z-]+", place)) <= options, place
        assert set(re.findall(r"`shardc (\w+)", place)) <= set(commands), place
