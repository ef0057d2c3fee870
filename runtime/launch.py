"""Start one process a rank on this machine, and end them together.

Standard errors of ranks appear as they are written. A rank that ends because of another's failure has the exit status
GAVE_UP, so that the one that failed first is named. Under torchrun or Slurm `shardc run` joins that world instead (see
`in_world`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import multiprocessing.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.time_limits import GRACE, KILLED, STOPPED

#: The address at which the ranks of one machine meet.
LOOPBACK = "127.0.0.1"
#: The variable with the folder in which ranks that `launch` started leave their records.
_FOLDER = "SHARDC_REPORTS"
POLL = 0.05  # seconds between looks at the ranks
#: The longest name of a temporary folder: a socket's name has at most 107 bytes, and 38 of them come after it.
LONGEST = 69
SHORTER = f"set TMPDIR to a folder with a name of at most {LONGEST} bytes"
#: Exit status of a rank that ended because another one failed, or does not answer.
GAVE_UP = 75
#: The file in a run's folder with the errors of the rank that failed first, for --json.
ERRORS = "errors.json"
#: The remedy where a process waits for a world that nobody starts.
LEFT_OVER = "another job left it behind: `unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE`"
#: Remedies where memory does not suffice.
LESS_MEMORY = (
    "more microbatches (`batch:`), `checkpoint:`, `data: {zero: 3}`, or a larger tp; `shardc inspect --memory` and"
    " program.cost() show what a step holds, without a device"
)


def in_world() -> bool:
    """Return whether torchrun, or Slurm through `srun`, has started this process as one of a world."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        check_variables()
        return True
    return _slurm_tasks() > 1


def check_variables() -> None:
    """Raise ShardcError if the environment has RANK, but not the variables to meet the other ranks."""
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if "RANK" in os.environ and missing:
        fault = f"the environment has RANK={os.environ['RANK']}, but not {', '.join(missing)}"
        fix = f"{LEFT_OVER}; or start the processes with torchrun, which sets all of them"
        raise ShardcError(fault, where="RANK", fix=fix)


def _slurm_tasks() -> int:
    """Return the processes of this job step. SLURM_NTASKS is no sign of one: batch scripts have it too."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) if "SLURM_PROCID" in os.environ else 1


def join_slurm() -> None:
    """Set torch.distributed's environment from Slurm's. Ranks meet at the step's first node.

    Existing MASTER_ADDR and MASTER_PORT are kept. Raises ShardcError if the node's name cannot be found.
    """
    if "RANK" in os.environ or _slurm_tasks() == 1:
        return
    env = os.environ
    if "MASTER_ADDR" not in env:
        try:
            nodes = subprocess.run(
                ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]],
                capture_output=True,
                text=True,
                check=True,
            )
        except (OSError, KeyError, subprocess.CalledProcessError) as e:
            fault, fix = f"the step's first node is unknown: {e}", "set MASTER_ADDR to its name before srun"
            raise ShardcError(fault, where="Slurm", fix=fix) from e
        env["MASTER_ADDR"] = nodes.stdout.split()[0]
    env.setdefault("MASTER_PORT", str(20000 + (int(env["SLURM_JOB_ID"]) + int(env.get("SLURM_STEP_ID", "0"))) % 20000))
    tasks = env.get(
        "SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"]
    )  # "4", "4(x2)", "4,3": the fullest node decides
    env |= {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(max(int(n) for n in re.findall(r"(?:^|,)(\d+)", tasks))),
    }


def temporary_folder() -> str:
    """Return the folder for temporary files, or a usual one if its name (TMPDIR) is too long for a socket in it."""
    named = tempfile.gettempdir()
    if len(os.fsencode(named)) <= LONGEST:
        return named
    usual = (folder for folder in ("/tmp", "/var/tmp", "/dev/shm") if os.access(folder, os.W_OK | os.X_OK))
    if (folder := next(usual, None)) is None:
        fault = f"the folder's name has {len(os.fsencode(named))} bytes: sockets in it would have too long names"
        raise ShardcError(fault, where="TMPDIR", fix=SHORTER)
    return folder


def short_sockets() -> bool:
    """Make multiprocessing choose a folder for its sockets in which they fit; else it waits for ever.

    DataLoader's workers send tensors over sockets; managers, forkserver and pools have some, too. Return whether that
    is not the folder for temporary files.
    """
    if (folder := temporary_folder()) != (named := tempfile.gettempdir()):
        tempfile.tempdir = folder
        try:
            multiprocessing.util.get_temp_dir()  # its first call chooses
        finally:
            tempfile.tempdir = named
    return folder != named


def free_port() -> int:
    with socket.socket() as s:
        s.bind((LOOPBACK, 0))
        return int(s.getsockname()[1])


def _die_with_parent() -> None:
    """Let the kernel kill this child when the launcher is gone (Linux). Called before exec."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the rank heeds it: it would end a rank that still imports
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def file_of(rank: int) -> Path | None:
    """Return the file in which a rank records for `launch` what it is doing; None if `launch` has not started it."""
    folder = os.environ.get(_FOLDER)
    return Path(folder) / f"rank{rank}.doing" if folder and Path(folder).is_dir() else None


def record_errors(folder: Path, errors: Sequence[Mapping[str, str]]) -> None:
    """Write the errors of a rank into the folder of its run, as ShardcError.to_json has them; the first rank's stay."""
    new = folder / f"errors-{os.getpid()}"
    new.write_text(json.dumps(errors))  # whole, also if this rank is killed meanwhile
    with contextlib.suppress(FileExistsError):
        os.link(new, folder / ERRORS)


class _Live:
    """Shows ranks' standard errors as they come. A line that several ranks write is shown once."""

    REMEMBERED = 10_000  # lines

    def __init__(self, logs: Sequence[Path]) -> None:
        self._logs, self._read = logs, [0] * len(logs)
        self._written = [Counter[str]() for _ in logs]
        self._shown = Counter[str]()

    def show(self, *, rest: bool = False) -> None:
        """Show new lines. rest: also a line that has not ended."""
        new = []
        for rank, log in enumerate(self._logs):
            with log.open("rb") as f:
                f.seek(self._read[rank])
                text = f.read()
            whole = text if rest else text[: max(text.rfind(b"\n"), text.rfind(b"\r")) + 1]  # bars end lines by \r
            self._read[rank] += len(whole)
            for line in whole.decode(errors="replace").splitlines(keepends=True):
                self._written[rank][line] += 1
                if self._written[rank][line] > self._shown[line]:
                    self._shown[line] += 1
                    new.append(line)
        if new:
            sys.stdout.flush()
            print(*new, sep="", end="", file=sys.stderr, flush=True)
        if len(self._shown) > self.REMEMBERED:
            for counted in (self._shown, *self._written):
                counted.clear()


def ignored_hangup(number: int) -> bool:
    """Return whether this is SIGHUP in a process that ignores it (started by nohup)."""
    return number == signal.SIGHUP and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def launch(
    command: Sequence[str],
    mesh: Mesh,
    *,
    folder: Path | None = None,
    stdout: int | None = None,
    patience: float = GRACE,
) -> int:
    """Run `command` once for every rank of a mesh, with torch.distributed's environment.

    Returns 0, 2 if a rank found the input wrong, 1 if it failed. Rank 0 writes to this terminal; stdout: to this file
    descriptor. Standard errors of all ranks are shown as they are written. If a rank fails, all end within seconds, and
    a line names the rank that failed first, its coordinates, and what it was doing. folder: of the run, for temporary
    files and `record_errors`. Ctrl-C, SIGTERM and SIGHUP (the terminal closes; not under nohup) go to all ranks, which
    have `patience` seconds to save and leave; a second one ends them at once. Then the signal's exit status (130, 143)
    is returned.
    """
    world = str(mesh.world)
    env = {n: x for n, x in os.environ.items() if not n.startswith("TORCHELASTIC_")}  # those of a job around this one
    env |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    env |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // mesh.world)))
    ranks: list[subprocess.Popen[bytes]] = []
    stops: list[int] = []  # signals to stop that came

    def pass_on(number: int, _: object) -> None:
        for p in ranks:
            if p.poll() is None:
                os.kill(p.pid, number)

    def second_signal() -> bool:
        live.show()
        return len(stops) > 1

    heeded = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if not ignored_hangup(s)]
    before = {s: signal.signal(s, lambda number, _: stops.append(number)) for s in heeded}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, pass_on)
    with tempfile.TemporaryDirectory(prefix="shardc-", dir=folder) as reports:
        env[_FOLDER] = reports
        logs = [Path(reports) / f"rank{r}.err" for r in range(mesh.world)]
        for log in logs:
            log.touch()
        live = _Live(logs)
        try:
            for r, log in enumerate(logs):
                with log.open("wb") as err:
                    # separate sessions: a Ctrl-C reaches only the launcher, which ends them in order
                    p = subprocess.Popen(
                        command,
                        env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
                        stdout=stdout if r == 0 else subprocess.DEVNULL,
                        stderr=err,
                        start_new_session=True,
                        preexec_fn=_die_with_parent,
                    )
                    ranks.append(p)
            culprit = _watch(ranks, live, stops)
            if culprit is None and stops:
                # not their DataLoaders' workers, which read the batches until the ranks have agreed to stop
                _signal(ranks, stops[0], patience, second_signal)
                return 128 + stops[0]
            if culprit is None:
                return 0
            live.show(rest=True)
            doing, code = Path(reports) / f"rank{culprit}.doing", ranks[culprit].returncode
            _report(culprit, code, mesh, doing.read_text(errors="replace").rstrip("\0") if doing.exists() else "")
            killed = {"where": f"rank {culprit}", "what": "the process was killed", "fix": ""}
            record_errors(folder or Path(reports), [killed])
            return 2 if code == 2 else 1
        finally:
            live.show(rest=True)  # not what ranks write because they are ended
            _signal(ranks, signal.SIGTERM, GRACE)
            _signal(ranks, signal.SIGKILL, KILLED)
            for s, handler in before.items():
                signal.signal(s, handler)


def _watch(ranks: Sequence[subprocess.Popen[bytes]], live: _Live, stops: Sequence[int]) -> int | None:
    """Show lines until all ranks have ended, or one fails or is stopped (SIGSTOP, SIGTSTP); return that one.

    Return None if a signal comes: stops. Ranks that gave up because of a failure may end before the one that failed.
    Stopping all ranks together is intended: it fails only while others run.
    """
    failed, since, deadline = list[int](), dict[int, float](), math.inf
    while not stops and not all(p.poll() == 0 for p in ranks):
        time.sleep(POLL)
        live.show()
        now = time.monotonic()
        failed += [r for r, p in enumerate(ranks) if p.poll() and r not in failed]
        if failed:
            deadline = min(deadline, now + GRACE)
            killed = [r for r in failed if ranks[r].returncode < 0]
            culprits = killed or [r for r in failed if ranks[r].returncode != GAVE_UP]
            if culprits or now > deadline:
                return (culprits or failed)[0]
        stopped = [r for r, p in enumerate(ranks) if process_state(p.pid)[0] == "T"]
        since = {r: since.get(r, now) for r in stopped} if len(stopped) < len(ranks) else {}
        if since and now - min(since.values()) > STOPPED:
            return min(since, key=lambda r: since[r])
    return None


def process_state(pid: int) -> tuple[str, int]:
    """Return Linux's (state, start) of a process: "R": runs, "T": is stopped, "Z": has ended; ("", 0): unknown."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return "", 0


def _report(rank: int, code: int | None, mesh: Mesh, doing: str) -> None:
    """Print how a rank failed. code: its exit status; None: it is stopped."""
    how, fix = f"failed with exit status {code}", ""
    if code is None:
        how, fix = f"was stopped (SIGSTOP) for {STOPPED:.0f} s", "let all ranks run, or stop all of them together"
    elif code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        fix = "native code of an op or an extension crashed; see its last output"
        if code == -signal.SIGKILL:
            fix = f"if no one did, memory ran out (`dmesg` says so): {LESS_MEMORY}"
    if code == 2:
        return  # wrong input is the user's error, and its message is enough
    line = f"{mesh.named(rank)} {how}{f' {doing}' if doing else ''}; " if code != GAVE_UP else ""
    print(f"{line}all ranks were ended", *[f"  fix: {fix}"] * bool(fix), sep="\n", file=sys.stderr, flush=True)


def _signal(
    ranks: list[subprocess.Popen[bytes]], number: int, patience: float, enough: Callable[[], bool] | None = None
) -> None:
    """Signal each rank, and its processes unless it may go on until `enough`; wait at most `patience` seconds."""
    for p in ranks:
        with contextlib.suppress(ProcessLookupError):  # its session is empty
            (os.killpg if enough is None else os.kill)(p.pid, number)
    deadline = time.monotonic() + patience
    while any(p.poll() is None for p in ranks) and time.monotonic() < deadline and not (enough and enough()):
        time.sleep(POLL)
