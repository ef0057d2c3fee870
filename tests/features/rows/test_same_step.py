"""Any assignment of rows to ranks and microbatches is the same step.

Also where microbatches have lengths of their own, and where short rows of a split sequence are on fewer ranks.

`python -m tests.features.rows.assignments 100` draws many more.
"""

from __future__ import annotations

import pytest

from tests.features.rows import assignments

CASES = [
    ("dense", "padded", "zero 3"),
    ("dense", "packed", "ring"),
    ("dense", "ragged", "cp"),
    ("moe", "ragged", "pp"),
    ("moe with a loss of its router", "packed", "zero 3"),
    ("mla", "ragged", "tp"),
    ("mla", "packed", "cp"),
    ("dense", "shared", "ring of 4"),
    ("moe", "shared", "zero 3, cp"),
    ("mla", "shared", "pp, cp"),
]


@pytest.mark.parametrize(("model", "kind", "mesh"), CASES)
def test_an_assignment_is_the_step_of_one_device(model: str, kind: str, mesh: str) -> None:
    assert assignments.worst(model, kind, mesh, 3, seed=1) <= 1e-12
