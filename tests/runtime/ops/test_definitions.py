"""Each op of the runtime, and each conversion, against its definition on the whole value."""

from __future__ import annotations

import pytest

from tests.runtime.ops.checks import CHECKS


@pytest.mark.every_case
@pytest.mark.parametrize("name", CHECKS)
def test_an_op_is_what_it_is_said_to_be(name: str) -> None:
    CHECKS[name]()
