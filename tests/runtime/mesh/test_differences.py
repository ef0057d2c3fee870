"""Each way in which ranks come to differ (differences.py) is an error that names it, on every rank, over gloo."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from shardc.ir.mesh import Mesh
from shardc.runtime import launch
from tests.runtime.mesh.differences import CASES

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank of 4 read, by case."""
    folder = tmp_path_factory.mktemp("differences")
    command = [sys.executable, "-m", "tests.runtime.mesh.differences", str(folder)]
    assert launch.launch(command, Mesh((("dp", 2), ("tp", 2)))) == 0
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(4)]


@pytest.mark.every_case  # one run of four processes serves all
@pytest.mark.parametrize("what", CASES)
def test_it_is_named_on_every_rank_with_a_remedy(messages: list[dict[str, str]], what: str) -> None:
    assert messages[0][what].startswith(CASES[what][1])
    alike = {
        re.sub(r" \(.*?\)", "", m[what]) for m in messages
    }  # without coordinates: of ranks whose meshes differ too
    assert len(alike) == 1
    assert "\n  fix: " in messages[0][what]


def test_the_table_of_the_documentation_is_this_one() -> None:
    text = (ROOT / "docs" / "reference/rank-checks.md").read_text()
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \|$", text.split("<!-- differences -->")[1], re.MULTILINE)
    assert [row for row, _ in rows] == list(CASES)
    for row, says in rows:
        assert says.startswith(CASES[row][1]) or CASES[row][1].startswith(says), row
