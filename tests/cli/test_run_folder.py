"""The temporary folder of a run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from shardc.cli.ranks.start import run_folder


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "shardc-run-left"
    left.mkdir()
    (left / ".lock").touch()
    (left / "program").touch()
    with run_folder() as one, run_folder() as two:
        assert {*tmp_path.iterdir()} == {one, two}, "one that is in use stays"
    assert not [*tmp_path.iterdir()]
