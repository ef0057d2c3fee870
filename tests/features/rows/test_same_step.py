"""Any assignment of rows to ranks and microbatches is the same step, also where microbatches have their own lengths.

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
]


@pytest.mark.parametrize(("model", "kind", "mesh"), CASES)
def test_an_assignment_is_the_step_of_one_device(model: str, kind: str, mesh: str) -> None:
    assert assignments.worst(model, kind, mesh, 3, seed=1) <= 1e-12
