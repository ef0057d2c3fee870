"""The examples in the docstrings of shardc.ir hold."""

from __future__ import annotations

import doctest

from shardc.ir import layers, mesh, units


def test_examples_of_the_docstrings() -> None:
    for module in (layers, mesh, units):
        result = doctest.testmod(module)
        assert result.attempted
        assert not result.failed
