"""The tables of models can be read without their libraries, and their batches made."""

from __future__ import annotations

import pytest
from torch import Tensor

from shardc.torch_private import pytree
from tests import libraries


@pytest.mark.parametrize("kind", libraries.KINDS)
def test_a_table(kind: str) -> None:
    cases = libraries.table(kind)
    assert len(cases) > 10
    for name, case in cases.items():
        batch = case.batch()
        assert isinstance(batch, tuple | dict)
        tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
        assert tensors, name
        assert len(tensors[0]) in (libraries.ROWS, libraries.NODES), name
