"""Let the first process of a machine compile under torchrun and Slurm; the others read its program.

Compiling takes a core and the memory of a traced model, for seconds to minutes. Eight processes that compile at once
take eight times as much from the machine that is about to train.

    first     makes the meeting's folder ── compiles ── writes the program into it ── ... trains ... ── removes it
    others    wait for the folder ── wait for the program ── read it

A process compiles separately if the folder does not appear soon (a container with a private temporary folder), or if
the first process dies. If the first process fails with a ShardcError (in the model, the spec or an option), it stores
the error in the folder. The others then fail with it at once, also those that start after the first one has ended.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardc.cli.same_error_once import FirstFailedError
from shardc.errors import ShardcError

if TYPE_CHECKING:
    from shardc.api import Program

#: Seconds that others wait for the folder, which the first process makes before it compiles; seconds between checks.
APPEARS, POLL = 10.0, 0.1
_PROGRAM, _FAILED = "program", "failed"
#: When this process began: older files in the folder are from an earlier run.
_BEGAN = time.time()


def meeting() -> Path | None:
    """Return the folder that the processes of this machine share, or None for a single process.

    They find it without messages: its name has their parent process and the port of their world.
    """
    env = os.environ
    if int(env.get("LOCAL_WORLD_SIZE", "1")) == 1 or "LOCAL_RANK" not in env:
        return None
    again = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    names = (socket.gethostname(), os.getuid(), os.getppid(), env.get("MASTER_PORT", ""), again)
    return Path(tempfile.gettempdir()) / f"shardc-compiled-{'-'.join(map(str, names))}"


@contextmanager
def once(
    folder: Path | None, *, first: bool, compiled: Callable[[], Program], read: Callable[[Path], Program]
) -> Iterator[Program]:
    """Yield the program: the first process of a machine compiles it, and the others read it.

    folder: the shared one, which exists inside the `with`; None: compile in each process.
    """
    if folder is None or (first and not _made(folder)):
        yield compiled()
    elif first:
        try:
            program = compiled()
            program.save(folder / _PROGRAM)  # visible only when it is complete
            yield program
        except BaseException as e:
            _leave(folder, e)
            raise
        shutil.rmtree(folder, ignore_errors=True)
    else:
        saved = _awaited(folder)
        if saved is None:
            check(folder)
        yield _read(saved, compiled, read)


def _leave(folder: Path, error: BaseException) -> None:
    """Store the error of the first process for processes that come later; the last one removes the folder."""
    shutil.rmtree(folder / _PROGRAM, ignore_errors=True)
    with suppress(OSError):
        errors = error.to_json() if isinstance(error, ShardcError) else []
        (folder / ".writing").write_text(json.dumps(errors))
        (folder / ".writing").rename(folder / _FAILED)


def check(folder: Path | None) -> None:
    """Raise FirstFailedError if the first process of this machine has stored a ShardcError."""
    if folder is None or not _failed(folder):
        return
    try:
        errors = [ShardcError(**error) for error in json.loads((folder / _FAILED).read_text())]
        (folder / f"seen{os.environ.get('LOCAL_RANK', '')}").touch()
        if len(list(folder.glob("seen*"))) >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1:
            shutil.rmtree(folder, ignore_errors=True)
    except (OSError, ValueError, TypeError):
        return
    if errors:
        first = errors[0]
        raise FirstFailedError(first.what, where=first.where, fix=first.fix, errors=errors if errors[1:] else ())


def _failed(folder: Path) -> bool:
    """Return whether the first process of this run has failed."""
    try:
        return _ours(folder) and (folder / _FAILED).stat().st_mtime > _BEGAN
    except OSError:
        return False


def _read(found: Path | None, compiled: Callable[[], Program], read: Callable[[Path], Program]) -> Program:
    """Read the program of the first process; compile here if that one failed and removed the program."""
    if found is None:
        return compiled()
    try:
        return read(found)
    except (ShardcError, OSError):
        if found.is_dir():
            raise
        return compiled()


def _made(folder: Path) -> bool:
    """Make the folder, and return whether that worked. It replaces only a folder of the same user."""
    try:
        if _ours(folder):
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    except OSError:
        return False
    return True


def _ours(folder: Path) -> bool:
    """Return whether only this user can write to the folder: a program is Python code, which is run."""
    try:
        info = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077


def _awaited(folder: Path) -> Path | None:
    """Wait for the program of the first process, and return its folder; None: it will not come."""
    from shardc.runtime.mesh.activity import waiting

    with waiting():
        return _program(folder)


def _program(folder: Path) -> Path | None:
    until = time.monotonic() + APPEARS
    while not _ours(folder):
        if time.monotonic() > until:
            return None
        time.sleep(POLL)
    while _ours(folder) and not _failed(folder):
        if (folder / _PROGRAM).is_dir():
            return folder / _PROGRAM
        time.sleep(POLL)
    return None
