"""Of a test with many cases that take long together, a run of everything takes a share: some of them, evenly spaced,
for about `LIMIT` seconds. `pytest --all-cases` (`make test-all`) takes all; so does a run that names a file or a test.

    tests/seconds.json    {test: seconds of one of its cases}, the mean; of those that take more than LIMIT together
    --write-seconds       writes it anew, from this run
    --quick               one test of each file, a short one: `make quick`, for a look after each change

What proves something for each of its cases and nothing else does (an op's rule) says `@pytest.mark.every_case`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SECONDS = Path(__file__).parent / "seconds.json"
LIMIT = 1.5


def take_shares(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the rest."""
    if config.getoption("--quick"):
        _take_quick(config, items)
        return
    whole = all(Path(config.rootpath, a).is_dir() for a in config.args)
    if config.getoption("--all-cases") or config.option.keyword or not whole:
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "[" in item.nodeid and item.get_closest_marker("every_case") is None:
            cases[test_of(item.nodeid)].append(item)
    seconds = json.loads(SECONDS.read_text(encoding="utf-8"))
    left_out = {x for test, every in cases.items() for x in every if x not in share(every, seconds.get(test, 0.0))}
    if left_out:
        items[:] = [x for x in items if x not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def _take_quick(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each file the test that takes least, as far as that is known: of one that is not on record, all cases together
    take less than LIMIT; a test without cases is not recorded.
    """
    seconds = json.loads(SECONDS.read_text(encoding="utf-8"))

    def least(item: pytest.Item) -> tuple[float, bool]:
        return seconds.get(test_of(item.nodeid), 0.0), "[" not in item.nodeid

    files: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    taken = {min(each, key=least) for each in files.values()}
    config.hook.pytest_deselected(items=[x for x in items if x not in taken])
    items[:] = [x for x in items if x in taken]


def share(cases: Sequence[Any], seconds: float) -> Sequence[Any]:
    """As many as take LIMIT, one at least: the first, the last, and those evenly between.

    >>> share("abcdefg", LIMIT / 3)
    ['a', 'd', 'g']
    """
    count = max(math.floor(LIMIT / seconds), 1) if seconds else len(cases)
    if count >= len(cases):
        return cases
    return [cases[round(i * (len(cases) - 1) / max(count - 1, 1))] for i in range(count)]


def test_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


class Recorder:
    """Of a run: the seconds of each test's cases."""

    def __init__(self) -> None:
        self._cases: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "[" in report.nodeid:
            self._cases[test_of(report.nodeid)][report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        long = {test: each for test, each in self._cases.items() if sum(each.values()) > LIMIT}
        found = {test: round(sum(each.values()) / len(each), 2) for test, each in sorted(long.items())}
        SECONDS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
