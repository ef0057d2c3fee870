"""Dry runs in other processes: the same answer, the same errors, and no process is left."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardc.cost import device
from shardc.errors import ShardcError
from shardc.plan import workers
from shardc.plan.few_layers import Subject
from shardc.plan.planner import Planner
from shardc.plan.records import Records
from shardc.plan.source import Source
from shardc.plan.space import Core
from shardc.plan.workers import Workers
from tests.plan.test_monotone import MODELS, Stack


def children() -> list[str]:
    """Processes that this one has, but for those that have ended and wait to be asked how."""
    mine = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [p for p in mine if Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[0] != "Z"]


def until(true: Any) -> bool:
    """Wait for it, for ten seconds at most."""
    end = time.monotonic() + 10
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(true())


def source() -> Source:
    with torch.device("meta"):
        model, batch = Stack(*MODELS[0]), {"ids": torch.empty(16, 64, dtype=torch.long)}
    return Source(lambda: Subject.of(model, batch))


def test_dry_runs_of_two_processes_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, and by as many processes as were asked for."""
    taken, take = list[bool](), Workers.take

    def noted(self: Workers, name: str) -> bytes | None:
        found = take(self, name)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(Workers, "take", noted)
    before, said = children(), []
    for processes in (1, 2):
        q = Planner(source(), device("h100-80g"), "bfloat16", 0.0, "it", lambda what, done, of: None, None, processes)
        splits = Core(), Core(tp=2, sequence_parallel=True)
        q.finder.begin(splits[0], splits[1:])
        for core in splits:
            q.library.ask(core)
        said.append(q.records._texts)
        q.records.close()
        assert any(taken) == (processes > 1)
    assert said[0] == said[1]
    assert children() == before


def test_a_worker_answers_what_it_was_given_and_keeps_what_it_knows() -> None:
    seen: list[int] = []

    def answer(question: dict[int, int]) -> bytes:
        seen.append(question[1])
        return bytes(seen)

    pool = Workers(answer, 2)
    try:
        pool.begin([("a", {1: 1}), ("b", {1: 2})])  # one worker: it begins with the first
        assert pool.take("b") is None
        assert pool.take("a") == b"\1"
        pool.begin([("a", {1: 1})])
        assert pool.take("a") == b"\1\1"
        assert seen == []
    finally:
        pool.close()


def test_what_a_worker_has_no_answer_to_is_answered_here() -> None:
    here = os.getpid()

    def answer(question: str) -> bytes:
        if question == "a defect":
            raise ZeroDivisionError
        os.kill(os.getpid() if os.getpid() != here else 0, signal.SIGKILL)
        return b""

    before, pool = children(), Workers(answer, 2)
    try:
        for question in ("a defect", "is killed"):
            pool.begin([(question, question)])
            assert pool.take(question) is None
        assert children() == before
        pool.begin([("another", "another")])  # none is begun in place of one that was killed
        assert children() == before
    finally:
        pool.close()


def test_a_worker_ends_with_the_process_that_it_is_of() -> None:
    """Also where that was killed, or was interrupted by the keyboard, as all processes of a terminal are."""
    before = children()
    pool = Workers(lambda question: time.sleep(60) or b"", 2)  # type: ignore[func-returns-value]
    pool.begin([("long", 0)])
    (pid,) = {*children()} - {*before}
    time.sleep(0.05)
    os.kill(int(pid), signal.SIGINT)
    assert pid in children()
    pool.close()
    assert until(lambda: children() == before)

    heard, told = os.pipe()
    parent = os.fork()
    if parent == 0:
        pool = Workers(lambda question: b"it", 2)
        pool.begin([("a", 0)])
        pool.take("a")
        (worker,) = pool._each
        os.write(told, str(worker.process.pid).encode())
        os._exit(0)
    os.waitpid(parent, 0)
    pid = os.read(heard, 100).decode()
    assert until(lambda: not Path(f"/proc/{pid}").exists())


def test_errors_are_those_of_one_process() -> None:
    """Of a spec that compile refuses: the keys of `activations` are numbers in a worker, too."""
    refused = {"shardc": 1, "mesh": {"tp": 2}, "activations": {"h.*": {9: "tp"}}}
    said = []
    for processes in (1, 2):
        records = Records(source(), processes=processes)
        good, bad = (partial(records.ranks, spec, 4, 5, None, (0,)) for spec in ({"shardc": 1, "mesh": {}}, refused))
        try:
            records.begin(good, [bad])
            assert len(records._workers._each) == processes - 1
            with pytest.raises(ShardcError) as e:
                bad()
        finally:
            records.close()
        said.append(str(e.value))
    assert said[0] == said[1]
    assert "activations" in said[0]


def test_no_workers_where_torch_has_threads_that_a_fork_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    before = children()
    pool = Workers(lambda question: b"it", 2)
    pool.begin([("a", 0)])
    assert children() == before
    assert pool.take("a") is None
    assert workers.cores() >= 1
