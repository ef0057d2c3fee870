"""Processes end together: a rank that fails speaks, the others are silent, and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime import launch

MESH = Mesh((("dp", 2), ("tp", 2)))
WAIT = "import time; time.sleep(60)"


def script(tmp_path: Path, body: str) -> list[str]:
    """A command whose ranks note their process ids and then run `body` (which knows `rank`)."""
    file = tmp_path / "rank.py"
    note = f"pathlib.Path({str(tmp_path)!r}, f'pid{{rank}}').write_text(str(os.getpid()))"
    file.write_text(f"import os, sys, pathlib\nrank = int(os.environ['RANK'])\n{note}\n{body}\n")
    return [sys.executable, str(file)]


def alive(tmp_path: Path) -> list[int]:
    """Process ids of ranks that still run. A zombie is dead: whoever adopted it has not looked yet."""
    pids = [int(f.read_text()) for f in tmp_path.glob("pid*")]
    return [pid for pid in pids if launch.process_state(pid)[0] not in ("", "Z")]


def test_all_ranks_run_with_their_coordinates(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = f"pathlib.Path({str(tmp_path)!r}, f'ok{{rank}}').write_text(os.environ['WORLD_SIZE'])\nprint('from', rank)"
    assert launch.launch(script(tmp_path, body), MESH) == 0
    assert [(tmp_path / f"ok{r}").read_text() for r in range(4)] == ["4"] * 4
    assert capfd.readouterr().out.split() == ["from", "0"]  # only rank 0 writes here


@pytest.mark.parametrize("first", [1, 2], ids=["its peers end first", "the rank that failed ends first"])
def test_a_rank_that_raises_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str], first: int) -> None:
    body = (
        "import time\nfrom shardc.runtime.launch import GAVE_UP, record_errors\n"
        "peers = [pathlib.Path(sys.argv[0]).with_name(f'pid{r}') for r in range(4)]\n"
        "while not all(p.exists() for p in peers):\n    time.sleep(0.01)\n"  # a busy machine starts some late
        f"time.sleep(0.3 * (rank != {first}))\n"
        f"if rank == 2:\n    record_errors(pathlib.Path({str(tmp_path)!r}), [{{'where': 'a'}}])\n"
        "    raise ValueError('the culprit')\n"
        "if rank == 1:\n"
        "    sys.exit(GAVE_UP)\ntime.sleep(60)"
    )
    assert launch.launch(script(tmp_path, body), MESH, folder=tmp_path) == 1
    assert json.loads((tmp_path / launch.ERRORS).read_text()) == [{"where": "a"}]
    err = capfd.readouterr().err
    assert "ValueError: the culprit" in err
    assert "rank 2 (dp=1, tp=0) failed with exit status 1; all ranks were ended" in err
    assert not alive(tmp_path)


def test_a_killed_rank_ends_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "import signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n" + WAIT
    start = time.monotonic()
    assert launch.launch(script(tmp_path, body), MESH) == 1
    assert time.monotonic() - start < 10
    err = capfd.readouterr().err
    assert "rank 1 (dp=0, tp=1) was killed by SIGKILL" in err
    assert "fix: if no one did, memory ran out" in err
    assert not alive(tmp_path)


def test_wrong_input_found_by_a_rank_has_exit_status_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.launch(script(tmp_path, "print('x.py:3: wrong', file=sys.stderr)\nsys.exit(2)"), MESH) == 2
    assert capfd.readouterr().err.strip() == "x.py:3: wrong"


def test_a_rank_that_heeds_no_signal_is_killed(tmp_path: Path) -> None:
    body = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank == 0:\n    time.sleep(0.5);"
        " sys.exit(1)\n" + WAIT
    )
    assert launch.launch(script(tmp_path, body), MESH) == 1
    assert not alive(tmp_path)


LAUNCHER = (
    "import sys; from shardc.ir.mesh import Mesh; from shardc.runtime import launch;"
    " sys.exit(launch.launch(sys.argv[1:], Mesh((('dp', 2),))))"
)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_stopping_the_launcher_leaves_no_process_behind(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """Ctrl-C and SIGTERM end the ranks in order; where the launcher itself is killed, the kernel ends them."""
    parent = subprocess.Popen([sys.executable, "-c", LAUNCHER, *script(tmp_path, WAIT)])
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("pid*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    assert len(alive(tmp_path)) == 2
    parent.send_signal(number)
    assert parent.wait(timeout=10) == status
    time.sleep(0.3)
    assert not alive(tmp_path)


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    """Also where the rank itself is gone before the others are ended."""
    body = (
        f"import subprocess\nif rank == 1:\n    child = subprocess.Popen([sys.executable, '-c', {WAIT!r}])\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'pid_child').write_text(str(child.pid))\n    os._exit(1)\n{WAIT}"
    )
    assert launch.launch(script(tmp_path, body), MESH) == 1
    time.sleep(0.3)
    assert (tmp_path / "pid_child").exists()
    assert not alive(tmp_path)


def test_a_second_ctrl_c_does_not_leave_ranks_half_ended(tmp_path: Path) -> None:
    body = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", LAUNCHER, *script(tmp_path, body)])
    deadline = time.monotonic() + 30
    while len(alive(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    time.sleep(0.3)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=10) == 130
    time.sleep(0.3)
    assert not alive(tmp_path)


def test_a_rank_that_still_starts_survives_a_request_for_a_checkpoint(tmp_path: Path) -> None:
    """It has no handler yet: SIGUSR1 would end it."""
    body = "import time\ntime.sleep(1)\nopen(f'done{rank}', 'w')"
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, *script(tmp_path, body)], cwd=tmp_path) as parent:
        while len(alive(tmp_path)) < 2:
            time.sleep(0.05)
        parent.send_signal(signal.SIGUSR1)
    assert parent.returncode == 0
    assert len([*tmp_path.glob("done*")]) == 2


def test_what_ranks_write_is_shown_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As often as one of them writes it; a last line that has not ended, too."""
    body = "print('a warning\\na warning', file=sys.stderr)\nif rank == 2:\n    print('of 2', end='', file=sys.stderr)"
    assert launch.launch(script(tmp_path, body), MESH) == 0
    assert sorted(capfd.readouterr().err.splitlines()) == ["a warning", "a warning", "of 2"]


SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2"}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No world is described in the environment, and what a test puts there goes again."""
    wiped = [n for n in os.environ if n.startswith("SLURM_")]
    for name in (*wiped, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("alone")
def test_worlds_that_others_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not launch.in_world()
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert not launch.in_world()  # a batch script: one process, whatever the job may have
    launch.join_slurm()
    assert "RANK" not in os.environ
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert launch.in_world()
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert launch.in_world()


@pytest.mark.usefixtures("alone")
def test_joining_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        **SLURM,
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": "node[03-04]",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ShardcError, match="first node is unknown") as caught:
        launch.join_slurm()
    assert "MASTER_ADDR" in caught.value.fix
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node03\necho node04\n")
    (tmp_path / "scontrol").chmod(0o755)
    launch.join_slurm()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[n] for n in names] == ["3", "8", "1", "4", "node03", "20079"]


def test_lines_are_shown_while_ranks_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A line of a rank's standard error is on the launcher's before the rank goes on."""
    body = (
        "import time\nif rank == 1:\n    print('early', file=sys.stderr, flush=True)\n"
        "seen = pathlib.Path('seen')\n"
        "for _ in range(3000):\n    if not seen.exists(): time.sleep(0.02)\n"
        "print('late', file=sys.stderr)"
    )
    command = [sys.executable, "-c", LAUNCHER, *script(tmp_path, body)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as p:
        assert p.stderr is not None
        assert p.stderr.readline() == "early\n"
        (tmp_path / "seen").touch()
        assert p.stderr.read().splitlines() == ["late"]
    assert p.returncode == 0


FOREIGN = """
import multiprocessing, torch
from .rows import Rows, stack

def model(): return torch.nn.Linear(8, 1)
def batch(): return {"input": torch.ones(4, 8)}
def loss(output, batch): return output.square().mean()
def square(i): return i * i
def data(split):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(square, [3]) == [9]
    how = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    return torch.utils.data.DataLoader(Rows(), 4, collate_fn=stack, **how) if split == "train" else None
"""
ROWS = """
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.full((8,), float(i))
def stack(samples): return {"input": torch.stack(samples)}
"""


def test_processes_that_a_model_file_starts_know_it_and_have_sockets(tmp_path: Path) -> None:
    """Workers and a pool, new interpreters, of a file in a package; TMPDIR is too long for a socket's name."""
    temporary = tmp_path / ("long" * 25)
    for folder in (temporary, tmp_path / "pkg"):
        folder.mkdir()
    (tmp_path / "pkg/model.py").write_text(FOREIGN)
    (tmp_path / "pkg/rows.py").write_text(ROWS)
    (tmp_path / "spec.yaml").write_text("shardc: 1\nmesh: {dp: 1}\n")
    command = [sys.executable, "-m", "shardc", "run", "pkg/model.py", "spec.yaml", "--steps", "2"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, timeout=240, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "2 steps" in run.stdout
    assert [p.name for p in temporary.iterdir() if "inductor" not in p.name] == []


def test_a_temporary_folder_with_a_long_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * launch.LONGEST)))
    assert launch.temporary_folder() == "/tmp"
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ShardcError, match=rf"TMPDIR(.|\n)*at most {launch.LONGEST} bytes"):
        launch.temporary_folder()
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * (launch.LONGEST - 1))
    assert launch.temporary_folder() == tempfile.tempdir
