"""Ranks that do not come to where all meet: they are named, and the others do not wait for the time limit."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime import launch
from shardc.runtime.launch import GAVE_UP
from shardc.runtime.mesh import TorchMesh, local_processes, presence
from shardc.runtime.mesh.local_processes import Processes
from shardc.runtime.mesh.watch import Watch, within
from tests import warm


def world(rank: int, port: int, size: int) -> dict[str, str]:
    return {
        **{"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }


def stops(rank: int, port: int, folder: str) -> None:
    """Rank 1 stops before it joins; the others write what they say, and end by themselves."""
    os.environ |= world(rank, port, 3)
    with open(f"{folder}/rank{rank}", "w") as f:
        os.dup2(f.fileno(), 2)
    here = presence.begin(2.0)
    assert here is not None
    if rank == 1:
        with here.activity.during("compiling"):
            os.kill(os.getpid(), signal.SIGSTOP)
    try:
        TorchMesh(Mesh.of({"tp": 3}), watch=2.0)
    finally:
        time.sleep(20)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_is_stopped_before_all_have_met_ends_the_others(tmp_path: Path) -> None:
    context, port = warm.context(), launch.free_port()
    ranks = [context.Process(target=stops, args=(r, port, str(tmp_path))) for r in range(3)]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join(60)
        p.kill()
    assert [p.exitcode for p in ranks] == [GAVE_UP, -signal.SIGKILL, GAVE_UP]
    said = r"rank 1 does not answer for \d s: it is stopped \(SIGSTOP\); ranks 0, 2 wait for it in joining the world"
    for r in (0, 2):
        assert re.match(said, (tmp_path / f"rank{r}").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory without a name")
def test_what_a_process_did_is_known_after_it_was_killed() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        there = dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False)
        Processes(there, 1, 2).note("in step 7, at all_reduce 'h.0' over tp")
        os.write(theirs, b"noted")
        time.sleep(60)
        os._exit(0)
    assert os.read(ours, 5) == b"noted"
    mine = Processes(store, 0, 2)
    assert mine.ended() == {}
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert mine.ended() == {1: "was killed, or ended without an error, in step 7, at all_reduce 'h.0' over tp"}


def ends(rank: int, port: int) -> None:
    """Ranks 1 and 2 compile, and are ended; rank 0 says which of them it takes to be gone."""
    os.environ |= world(rank, port, 3)
    here = presence.begin(0)
    assert here is not None
    if rank:
        time.sleep(60)
    assert within(60, lambda: bool(here.processes.ended()) or here.processes.known())
    pids = [p.number for _, p in sorted(here.processes._others().items())]
    os.kill(pids[0], signal.SIGTERM)
    os.kill(pids[1], signal.SIGKILL)
    assert within(60, lambda: all(local_processes.process_state(pid)[0] in ("", "Z") for pid in pids))
    assert [*here.processes.ended()] == [2]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_its_launcher_ends_is_not_taken_for_the_one_that_failed() -> None:
    context, port = warm.context(), launch.free_port()
    ranks = [context.Process(target=ends, args=(r, port)) for r in range(3)]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join(60)
    assert [p.exitcode for p in ranks] == [0, 128 + signal.SIGTERM, -signal.SIGKILL]


def test_a_rank_that_has_not_come_is_told_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a machine that starts slowly."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr("shardc.runtime.mesh.activity.waits", lambda: True)
    heard: list[str] = []
    first = Watch(store, 0, 2, 0.4, say=heard.append)
    time.sleep(4)  # longer than one that came and does not answer is given
    assert heard
    said = r"rank 1 has not arrived for \d s: it starts slowly, is stopped, or its machine is gone; rank 0"
    assert all(re.match(said, line) for line in heard)
    second = Watch(store, 1, 2, 0.4, say=heard.append)
    assert within(20, lambda: heard[-1].startswith("all ranks wait for each other"))
    first.stop()
    second.stop()


def test_a_rank_that_ended_before_all_have_met_ends_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended: list[int] = []

    def leave(status: int) -> None:
        ended.append(status)
        raise RuntimeError  # the thread does nothing more

    said: list[str] = []
    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr("shardc.runtime.mesh.watch.print_line", said.append)
    monkeypatch.setattr("shardc.runtime.mesh.activity.waits", lambda: True)
    how = "was killed, or ended without an error, in compiling"
    states = {"stopped.return_value": {}, "ended.return_value": {1: how}}
    known = mock.Mock(**states, **{"known.return_value": True})
    monkeypatch.setattr("shardc.runtime.mesh.watch.Processes", lambda *_: known)
    watch = Watch(store, 0, 2, 0.4)
    watch._thread.join(30)
    assert ended == [GAVE_UP]
    assert said == ["rank 1 was killed, or ended without an error, in compiling; this rank has ended"]


def test_a_process_that_nobody_started_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables are those of a job that is over: rank 0, or torchrun's agent, does not come."""
    said: list[str] = []
    monkeypatch.setattr(presence, "print_line", said.append)
    for more, who in (({}, "rank 0"), ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, "torchrun's agent")):
        with mock.patch.dict(os.environ, {**world(3, launch.free_port(), 8), **more}), pytest.raises(dist.DistError):
            presence.world_store(timedelta(seconds=3), 0.1)
        assert re.match(f"{who} has not arrived(?s:.*)`unset RANK WORLD_SIZE", said.pop())


def test_ranks_that_wait_end_with_the_error_of_one_that_failed_on_another_machine(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is known there of the process; without a word it would be waited for, as a machine that hangs."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(local_processes, "_machine", lambda: "")
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    failing = Watch(store, 1, 2, 0)
    monkeypatch.setattr(presence, "_begun", [(failing, mock.Mock())])
    monkeypatch.setattr("shardc.runtime.mesh.activity.waits", lambda: True)
    monkeypatch.setattr("os._exit", mock.Mock(side_effect=RuntimeError))  # the thread does nothing more
    waiting = Watch(store, 0, 2, 0.4)
    presence.failed("error lm.py: there is no model file lm.py\n  fix: name one\n")
    waiting._thread.join(30)
    os._exit.assert_called_once_with(GAVE_UP)  # type: ignore[attr-defined]
    assert capfd.readouterr().err.splitlines()[-3:] == [
        "error lm.py: there is no model file lm.py",
        "  fix: name one",
        "on node7: rank 1 ended with this error; this rank has ended",
    ]
    assert (failing.processes.on([0, 1]), Processes(None, 0, 2).on([1])) == ("on node7: ", "")


def test_a_place_to_meet_that_cannot_be_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "UNKNOWN_HOST", 0.1)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        here = {**world(0, port, 2), "MASTER_ADDR": "localhost"}
        for more, where, fault, fix in (
            ({}, "MASTER_PORT", f"rank 0 cannot listen at port {port}: address already in use", "a free port"),
            ({"MASTER_ADDR": "node.invalid"}, "MASTER_ADDR", "no host node.invalid: ", "by which all machines reach"),
        ):
            with mock.patch.dict(os.environ, {**here, **more}), pytest.raises(ShardcError, match=fault) as e:
                presence.world_store(timedelta(seconds=3), 0.1)
            assert (e.value.where, fix in e.value.fix) == (where, True)


def waits_for_ever(port: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
    os.environ |= world(0, port, 2)
    assert presence.begin(0.4) is not None
    TorchMesh(Mesh.of({"tp": 2}))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_one_that_nobody_starts_heeds_signals(number: int) -> None:
    """It waits in native code, where Python runs no handler; variables that another job left behind cause it."""
    port = launch.free_port()
    rank = warm.context().Process(target=waits_for_ever, args=(port,))
    rank.start()
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60), wait_for_workers=False)
    started = dist.PrefixStore("join1", dist.PrefixStore("shardc/start0", store))  # type: ignore[attr-defined]
    started.wait(["shardc/came/0"], timedelta(seconds=60))
    time.sleep(1.5)  # now it waits
    os.kill(rank.pid or 0, number)
    rank.join(10)
    status, _ = rank.exitcode, rank.kill()
    assert status == 128 + number
