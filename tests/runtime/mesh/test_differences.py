"""Each way in which ranks come to differ (differences.py) is an error that names it, on every rank, over gloo."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from shardc.runtime import launch
from tests import warm
from tests.runtime.mesh import differences
from tests.runtime.mesh.differences import CASES

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank of 4 read, by case."""
    folder = tmp_path_factory.mktemp("differences")
    warm.ranks(rank_of_four, launch.free_port(), folder, world=4)
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(4)]


def rank_of_four(rank: int, port: int, folder: Path) -> None:
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in here.items()}
    differences.main(folder)


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
