"""The examples in docstrings hold."""

from __future__ import annotations

import doctest

from shardc import layer_names
from shardc.ir import mesh, units


def test_examples_of_the_docstrings() -> None:
    for module in (layer_names, mesh, units):
        result = doctest.testmod(module)
        assert result.attempted
        assert not result.failed
