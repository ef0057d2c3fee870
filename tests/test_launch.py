"""Processes end together: a rank that fails speaks, the others are silent, and nothing stays behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardc.mesh import Mesh
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
    """Process ids of ranks that still run."""
    found = []
    for f in tmp_path.glob("pid*"):
        stat = Path("/proc", f.read_text(), "stat")
        try:
            state = stat.read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            continue
        if state != "Z":  # a zombie is dead: whoever adopted it has not looked yet
            found.append(int(f.read_text()))
    return found


def test_all_ranks_run_with_their_coordinates(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = f"pathlib.Path({str(tmp_path)!r}, f'ok{{rank}}').write_text(os.environ['WORLD_SIZE'])\nprint('from', rank)"
    assert launch.launch(script(tmp_path, body), MESH) == 0
    assert [(tmp_path / f"ok{r}").read_text() for r in range(4)] == ["4"] * 4
    assert capfd.readouterr().out.split() == ["from", "0"]  # only rank 0 writes here


def test_a_rank_that_raises_ends_all_with_its_own_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The others lose their peer a little later: that is not the cause, and is not shown."""
    body = (
        "import time\nif rank == 2:\n    raise ValueError('the culprit')\n"
        "time.sleep(0.3)\nif rank == 1:\n    raise RuntimeError('Connection closed by peer')\ntime.sleep(60)"
    )
    start = time.monotonic()
    assert launch.launch(script(tmp_path, body), MESH) == 1
    assert time.monotonic() - start < 10
    err = capfd.readouterr().err
    assert "rank 2 (dp=1, tp=0) failed" in err
    assert "ValueError: the culprit" in err
    assert "closed by peer" not in err
    assert not alive(tmp_path)


def test_the_peers_may_notice_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = (
        "import time\nif rank == 0:\n    raise RuntimeError('Connection reset by peer')\n"
        "time.sleep(0.2)\nif rank == 3:\n    raise KeyError('what was wrong')\ntime.sleep(60)"
    )
    assert launch.launch(script(tmp_path, body), MESH) == 1
    err = capfd.readouterr().err
    assert "rank 3 (dp=1, tp=1) failed" in err
    assert "what was wrong" in err
    assert not alive(tmp_path)


def test_a_killed_rank_ends_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "import signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n" + WAIT
    start = time.monotonic()
    assert launch.launch(script(tmp_path, body), MESH) == 1
    assert time.monotonic() - start < 10
    assert "rank 1 (dp=0, tp=1) was killed by SIGKILL" in capfd.readouterr().err
    assert not alive(tmp_path)


def test_wrong_input_found_by_a_rank_has_exit_status_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.launch(script(tmp_path, "print('x.py:3: wrong', file=sys.stderr)\nsys.exit(2)"), MESH) == 2
    assert capfd.readouterr().err.strip() == "x.py:3: wrong"


def test_a_rank_that_heeds_no_signal_is_killed(tmp_path: Path) -> None:
    body = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank == 0:\n    time.sleep(0.5); sys.exit(1)\n" + WAIT
    assert launch.launch(script(tmp_path, body), MESH) == 1
    assert not alive(tmp_path)


LAUNCHER = "import sys; from shardc.mesh import Mesh; from shardc.runtime import launch; sys.exit(launch.launch(sys.argv[1:], Mesh((('dp', 2),))))"


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


def test_worlds_that_others_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert not launch.in_world()
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert not launch.in_world()  # one task: it starts its own ranks
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert launch.in_world()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.in_world()
