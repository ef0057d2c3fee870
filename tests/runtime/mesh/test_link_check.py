"""Slow and broken links between ranks are named, by rank and host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardc.runtime.mesh import link_check
from shardc.runtime.mesh.link_check import named, report

ROOT = Path(__file__).parents[3]


def links(world: int, seconds: float = 0.01) -> dict[tuple[int, int], float]:
    return {(a, b): seconds for a in range(world) for b in range(world) if a != b}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (
            "healthy",
            r"links: 6 between 3 ranks, hosts: 1, [\d.]+ .iB/s at the median, .* over the slowest, rank \d on ",
        ),
        ("slow", r"links: more than 4 times as slow as the median: rank 1 on \S+ -> rank 2 on \S+\s"),
        (
            "broken",
            r"--check-links: nothing came within 2 s over rank 1 on \S+ -> rank 2 on \S+\n  fix: check the netw",
        ),
    ],
)
def test_links_between_processes(how: str, expected: str) -> None:
    script = str(ROOT / "tests/runtime/mesh/link_script.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone", script, how]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert re.search(expected, done.stdout), done.stdout + done.stderr


def test_a_host_between_which_all_links_are_slower_is_not_slow() -> None:
    hosts = ["a", "a", "b", "b"]
    seconds = {link: 0.01 if hosts[link[0]] == hosts[link[1]] else 0.3 for link in links(4)}
    (line,) = report({**seconds}, hosts)
    assert line.startswith("links: 12 between 4 ranks, hosts: 2")
    slow = report({**seconds, (0, 2): 2.0}, hosts)[1]
    assert slow.endswith(": rank 0 on a -> rank 2 on b")


def test_a_rank_whose_links_are_all_slow_is_named_once() -> None:
    seconds = links(6) | {link: 0.5 for link in links(6) if 4 in link}
    assert report(seconds, ["a"] * 6)[1].endswith("median: all or most links of rank 4 on a")


def test_not_all_links_are_listed() -> None:
    assert named([(1, 0)], links(3), ["h0", "h1", "h2"]) == "rank 1 on h1 -> rank 0 on h0"
    text = named([(a, a + 1) for a in range(20)], links(40), ["x"] * 40)
    assert text.startswith("rank 0 on x -> rank 1 on x, rank 1 on x")
    assert text.endswith(" and 14 more")


@pytest.mark.parametrize(
    ("world", "rounds"), [(2, [1]), (5, [1, 2, 3, 4]), (17, [1, 2, 4, 8, 16]), (64, [1, 2, 4, 8, 16, 32])]
)
def test_a_large_world_tries_some_distances(world: int, rounds: list[int]) -> None:
    assert [*link_check.distances(world)] == rounds
