"""The record of seconds, by which `make test` takes a share of a test's cases (shares.py), names tests that exist."""

from __future__ import annotations

import json
import re

from tests.shares import SECONDS


def test_every_test_on_record_exists() -> None:
    """All cases of a test that was renamed would run, which takes minutes."""
    gone = []
    for row in json.loads(SECONDS.read_text(encoding="utf-8")):
        file, name = row.split("::")
        path = SECONDS.parents[1] / file
        if not (path.exists() and re.search(rf"^def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE)):
            gone.append(row)
    assert not gone, "rename the rows of tests/seconds.json as their tests, or delete them"
