"""The script that measures on a GPU runs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests import warm

FILE = Path(__file__).parents[1] / "bench" / "gpu.py"


def work(rank: int, setting: str) -> None:
    sys.path.insert(0, str(FILE.parent))
    options = {"--device": "cpu", "--rounds": "1", "--machine": "h100-80g", "--only": setting}
    sys.argv = [FILE.name, "--no-compile", *(word for pair in options.items() for word in pair)]
    assert runpy.run_path(str(FILE))["main"]() == 0


@pytest.mark.parametrize("setting", ["bfloat16", "LoRA"])
def test_the_measurement_runs_on_a_cpu(setting: str) -> None:
    warm.ranks(work, setting, world=1)
