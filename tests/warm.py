"""Commands of the product in processes that have torch imported already: forks of a server that did so once.

A new Python takes 4 s until it has imported torch, and a test of `shardc run` on 2 ranks starts three. Nothing of the
commands is changed but for this: `subprocess.Popen`, with which they start their ranks, asks the same server. How real
commands start is what tests/runtime/test_launch.py and tests/docs test.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import start_processes

PRELOADED = [
    "torch.export._trace",
    "torch.distributed.checkpoint",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "shardc.compile",
    "shardc.runtime.step.engine",
    "shardc.runtime.step.forward",
    "shardc.cli.run",
    "shardc.cli.ranks.worker",
    "shardc.cli.ranks.forward_jobs",
    "tests.collected_once",  # the last one
]
_OUT, _ERR = "SHARDC_TEST_STDOUT", "SHARDC_TEST_STDERR"  # files of the command, for the ranks that write there too


def context() -> Any:
    """Makes processes by forking the server, which is started with the first one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def ranks(work: Callable[..., None], *args: Any, world: int) -> None:
    """work(rank, *args) in a process for each rank. Raises what one of them raises."""
    context()
    start_processes(work, args, nprocs=world, start_method="forkserver")


def run(*args: str, cwd: Path, timeout: float = 300, env: Mapping[str, str] | None = None) -> Any:
    """`shardc ARGS` in a folder. Returns what subprocess.run does."""
    command = [sys.executable, "-m", "shardc", *args]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        variables = {**os.environ, **(env or {}), _OUT: str(out), _ERR: str(err)}
        process = context().Process(target=_run, args=(command, variables, str(cwd), str(out), str(err)))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(command, timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(command, process.exitcode, out.read_text(), err.read_text())


class Popen:
    """As much of subprocess.Popen as shardc.runtime.launch and torchrun need."""

    def __init__(
        self, args: Sequence[str], *, env: Mapping[str, str], stdout: int | None, stderr: Any, **_: Any
    ) -> None:
        out = os.devnull if stdout == subprocess.DEVNULL else env[_OUT] if stdout is None else env[_ERR]
        err = env[_ERR] if stderr is None else stderr.name
        self._process = context().Process(target=_run, args=(list(args), dict(env), os.getcwd(), out, err))
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0)
        return code


def start(*args: str, log: Path) -> Popen:
    """`python ARGS` in this folder. What it and its ranks write is added to the log."""
    environment = {**os.environ, _OUT: str(log), _ERR: str(log)}
    return Popen([sys.executable, *args], env=environment, stdout=None, stderr=None)


def _run(command: Sequence[str], env: Mapping[str, str], cwd: str, out: str, err: str) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for path, number in ((out, 1), (err, 2)):
        with open(path, "ab") as f:
            os.dup2(f.fileno(), number)
    time.tzset()
    tempfile.tempdir = None  # asks the environment again
    multiprocessing.set_start_method("fork", force=True)  # of DataLoaders, as in a process of one's own
    sys.path.insert(0, cwd)
    subprocess.Popen = Popen  # type: ignore[assignment, misc]
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]  # it is this process's parent
    _, dash_m, module, *sys.argv[1:] = command
    assert dash_m == "-m", command
    sys.argv[0] = module
    warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)  # it was imported before the fork
    runpy.run_module(module, run_name="__main__", alter_sys=True)
