"""Who keeps the others waiting: what is said of the answers that ranks give."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shardc.ir.mesh import Mesh
from shardc.runtime.launch import GAVE_UP
from shardc.runtime.mesh import activity, local_processes
from shardc.runtime.mesh.activity import Activity
from shardc.runtime.mesh.local_processes import KILLED, Processes
from shardc.runtime.mesh.watch import SILENT, Watch, verdict, within

MESH = Mesh((("dp", 2), ("tp", 2)))


def waiting(at: str = "in step 5, at all_reduce 'h' over tp") -> dict[str, Any]:
    return {"waits": True, "doing": at, "place": "engine.py:3, in step"}


BUSY = {"waits": False, "doing": "in step 5, at all_reduce 'g' over tp", "place": "model.py:22, in forward"}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (
            {0: waiting(), 1: BUSY, 2: waiting(), 3: waiting()},
            "rank 1 (dp=0, tp=1) keeps the others waiting for 9 s: it is at model.py:22, in forward, in step 5, at"
            " all_reduce 'g' over tp; ranks 0, 2, 3 wait for it in step 5, at all_reduce 'h' over tp",
        ),
        (
            {0: waiting(), 1: BUSY, 2: BUSY, 3: waiting()},
            "ranks 1 (dp=0, tp=1), 2 (dp=1, tp=0) keep the others waiting for 9 s: they are at model.py:22, in forward,"
            " in step 5, at all_reduce 'g' over tp; ranks 0, 3 wait for it in step 5, at all_reduce 'h' over tp",
        ),
        (
            {0: waiting(), 1: {**BUSY, "doing": "after step 4"}, 2: waiting(), 3: waiting()},
            "rank 1 (dp=0, tp=1) keeps the others waiting for 9 s: it is at model.py:22, in forward, after step 4;"
            " ranks 0, 2, 3 wait for it in step 5, at all_reduce 'h' over tp; fix: if it never gets there: every rank "
            "must call each step, backward, evaluation and save",
        ),
        (
            {0: BUSY, 1: BUSY, 2: BUSY, 3: BUSY},
            "ranks 0 (dp=0, tp=0), 1 (dp=0, tp=1), 2 (dp=1, tp=0), 3 (dp=1, tp=1) have been busy for 9 s, at"
            " model.py:22, in forward, in step 5, at all_reduce 'g' over tp",
        ),
        (
            {0: waiting(), 1: waiting(), 3: waiting("after step 4")},
            "rank 2 (dp=1, tp=0) does not answer for 9 s: it is stopped, or its machine is gone; ranks 0, 1, 3 wait for"
            " it in step 5, at all_reduce 'h' over tp",
        ),
        (
            {0: waiting("in step 5, at all_reduce 'h' over tp"), 1: waiting("in saving"), 2: waiting(), 3: waiting()},
            "all ranks wait for each other for 9 s: rank 0 in step 5, at all_reduce 'h' over tp; rank 1 in saving;"
            " rank 2 in step 5, at all_reduce 'h' over tp; rank 3 in step 5, at all_reduce 'h' over tp",
        ),
    ],
)
def test_what_is_said(answers: dict[int, dict[str, Any]], said: str) -> None:
    assert verdict(MESH, answers, 9.2, dict.fromkeys({0, 1, 2, 3} - {*answers}, SILENT)) == said


def test_a_rank_that_is_stopped_on_this_machine_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of two has no thread, and is a process that is stopped: nobody waits for the 2.4 s of a machine gone."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(activity, "waits", lambda: True)
    heard: list[str] = []
    with subprocess.Popen(["sleep", "60"]) as other:
        as_rank(store, 1, other.pid)
        other.send_signal(signal.SIGSTOP)
        watch = met(store, 0, Mesh((("tp", 2),)), heard)
        assert other.wait(30) == -signal.SIGKILL
        watch.stop()
    assert heard == ["rank 1 (tp=1) does not answer for 0 s: it is stopped (SIGSTOP); rank 0 waits for it; ended now"]


def met(store: dist.Store, rank: int, layout: Mesh, heard: list[str]) -> Watch:
    """The watch of a rank when all ranks are there."""
    watch = Watch(store, rank, layout.world, 0.4, say=heard.append)
    watch.meet(layout, 0.4)
    return watch


def as_rank(store: dist.Store, rank: int, pid: int) -> None:
    """Say in the store that a process is that rank's."""
    store.append(
        f"shardc/processes/{local_processes._machine()}", f"{rank} {pid} {local_processes.process_state(pid)[1]} -1;"
    )
    store.set(f"shardc/came/{rank}", "")


def test_what_is_known_of_a_process() -> None:
    store = dist.HashStore()
    with subprocess.Popen(["sleep", "60"]) as other, ExitStack() as stack:
        stack.callback(other.kill)
        as_rank(store, 1, other.pid)
        store.append("shardc/processes/another-machine", f"2 {other.pid} 1 -1;")
        # before that number was given anew
        store.append(f"shardc/processes/{local_processes._machine()}", f"3 {other.pid} 1 -1;")
        mine = Processes(store, 0, 5)
        assert ([*mine.ended()], mine.stopped()) == ([3], {})
        other.send_signal(signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)
        assert ([*mine.ended()], mine.stopped()) == ([3], {1: other.pid})
        other.kill()
        other.wait()
        assert ([*mine.ended()], mine.stopped()) == ([1, 3], {})


def test_a_rank_that_is_stopped_before_it_registers_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)
    monkeypatch.setenv("MASTER_PORT", "29501")
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "RANK": "1"}) as other, ExitStack() as stack:
        stack.callback(other.kill)
        mine = Processes(dist.HashStore(), 0, 2)
        assert mine.stopped() == {}
        other.send_signal(signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)
        assert mine.stopped() == {1: other.pid}
        monkeypatch.setenv("MASTER_PORT", "29502")
        assert mine.stopped() == {}, "of another world"


def test_a_rank_that_was_killed_is_named_by_those_it_cut_off() -> None:
    """At once; and one that comes later does not take the first, which has ended because of it, for the cause."""
    store, said = dist.HashStore(), "rank 2 (dp=1, tp=0) was killed, or ended without an error, in step 5"
    gone = RuntimeError("Connection closed by peer")
    for rank, ended in ((0, [2]), (1, [0, 2])):
        states = {"ended.side_effect": lambda at, ended=ended: dict.fromkeys(ended, f"{KILLED} {at}")}
        known = mock.Mock(**states, **{"on.return_value": ""})
        watch = Watch(store, rank, 4, 0)
        watch.layout, watch.processes = MESH, known
        error = watch.cause(gone, "step 5")
        assert error.what == said


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_rank_that_went_on_before_all_answered_says_nothing(monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    """On a busy machine all ranks are slow, and by the time of their answers nobody waits any more."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(activity, "waits", lambda: True)
    heard: list[str] = []
    store.set("shardc/watch0/rank1", json.dumps(BUSY))
    ask, asked = Watch._ask, threading.Event()

    def ask_and_go_on(watch: Watch, now: float, since: float) -> None:
        """In the watch's own thread, for a busy machine may let this test's thread come too late."""
        ask(watch, now, since)
        if goes_on:
            watch.activity.begin("all_reduce", ("tp",), "h")
        asked.set()

    monkeypatch.setattr(Watch, "_ask", ask_and_go_on)
    watch = met(store, 0, Mesh((("tp", 2),)), heard)
    assert asked.wait(60)
    while watch._question is not None:  # until the answers are judged
        time.sleep(0.01)
    watch.stop()
    assert len(heard) == (not goes_on)


def test_it_stays_short_on_thousands_of_ranks() -> None:
    mesh = Mesh((("dp", 8192),))
    text = verdict(mesh, dict.fromkeys(range(100, 8192), waiting()), 9.0, dict.fromkeys(range(100), SILENT))
    assert "7 (dp=7) and 92 more do not answer" in text
    assert len(text) < 500


def test_what_a_rank_does() -> None:
    written: list[str] = []
    a = Activity()
    a.note = written.append
    assert str(a) == ""
    with a.during("step 1") as outermost:
        a.begin("all_reduce", ("dp", "tp"), "h")
        with a.during("agreeing") as inner:
            assert (outermost, inner) == (True, False)
        a.act("at 1F0 of the schedule")
    a.act("")
    assert written == [
        "in step 1",
        "in step 1, at all_reduce 'h' over dp+tp",
        "in step 1, at 1F0 of the schedule",
        "after step 1",
        "after step 1",
    ]
    with pytest.raises(ValueError, match="no"), a.during("step 2"):
        raise ValueError("no")
    assert written[-1] == "in step 2, at all_reduce 'h' over dp+tp", "where it failed is what stays"
    a.act("")
    assert written[-1] == "in step 2, at all_reduce 'h' over dp+tp", "until"
    with a.during("saving"):
        assert written[-1].startswith("in saving")
    assert written[-1] == "in step 2, at all_reduce 'h' over dp+tp", "a step that failed is why it saved"
    with a.during("step 3"):
        assert written[-1].startswith("in step 3")
    assert written[-1] == "after step 3", "an error that a run survives"


def test_a_rank_that_does_not_answer_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 of three has no thread; of the two that wait, one asks, tells, and both end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heard: list[str] = []
    ended: list[tuple[str, int]] = []

    def leave(status: int) -> None:
        ended.append((threading.current_thread().name, status))
        raise RuntimeError  # the thread does nothing more

    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr(activity, "waits", lambda: True)
    store.set("shardc/came/2", "")
    ranks = [met(store, r, Mesh((("tp", 3),)), heard) for r in range(2)]
    for r, watch in enumerate(ranks):
        watch._thread.name = str(r)
    for watch in ranks:
        watch._thread.join(30)
    assert sorted(ended) == [("0", GAVE_UP), ("1", GAVE_UP)]
    assert heard[0] == (
        "rank 2 (tp=2) does not answer for 0 s: it is stopped, or its machine is gone; ranks 0, 1 wait for it;"
        " unless it answers, the run ends in 3 s"
    )


def test_two_ranks_ask_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both as threads of this process, which only says of one that it waits."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heard: list[str] = []
    waits = {"0": True, "1": False}
    monkeypatch.setattr(activity, "waits", lambda: waits[threading.current_thread().name])
    monkeypatch.setattr(activity, "place", lambda: "model.py:22, in forward")
    mesh = Mesh((("tp", 2),))
    ranks = [met(store, r, mesh, heard) for r in range(2)]
    for r, watch in enumerate(ranks):
        watch._thread.name = str(r)
    within(30, lambda: bool(heard))
    for watch in ranks:
        watch.stop()
    assert heard[0].startswith(
        "rank 1 (tp=1) keeps the others waiting for 0 s: it is at model.py:22, in forward; rank 0"
    )
