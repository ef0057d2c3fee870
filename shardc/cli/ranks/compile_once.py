"""Under torchrun and Slurm, the first process of a machine compiles, and the others read the program that it wrote.

Compiling takes a core and the memory of a traced model for seconds to minutes; eight processes that do it at once take
eight times as much, of the machine that is to train.

    first     makes the meeting's folder ── compiles ── writes the program into it ── ... trains ... ── removes it
    others    wait for the folder ── wait for the program ── read it

Whoever does not see the folder within moments (a container that has a temporary folder of its own), or sees that the
first process died, compiles for itself. An error that the first process tells, in the model, the spec or an option, is
left in the folder: the others end with it at once, also those that come when the first has gone.
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

#: Seconds for which others wait for the folder, which the first process makes before it compiles; between two looks.
APPEARS, POLL = 10.0, 0.1
_PROGRAM, _FAILED = "program", "failed"
#: When this process began: what was left in a folder before that is of an earlier run.
_BEGAN = time.time()


def meeting() -> Path | None:
    """A folder that the processes of this machine know without having spoken: they have one parent, and one address of
    their world. None where this process is not one of several on its machine.
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
    """The program, compiled by the first process of a machine and read by the others. folder: where they meet; None:
    nobody shares. In its `with` the folder is there.
    """
    if folder is None or (first and not _made(folder)):
        yield compiled()
    elif first:
        try:
            program = compiled()
            program.save(folder / _PROGRAM)  # visible at once, when it is whole
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
    """Say why the first process ends, to those that come yet; the last of them removes the folder."""
    shutil.rmtree(folder / _PROGRAM, ignore_errors=True)
    with suppress(OSError):
        errors = error.to_json() if isinstance(error, ShardcError) else []
        (folder / ".writing").write_text(json.dumps(errors))
        (folder / ".writing").rename(folder / _FAILED)


def check(folder: Path | None) -> None:
    """Raises FirstFailedError where the first process of this machine has ended with an error that it told."""
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
    """Has the first process of this run failed?"""
    try:
        return _ours(folder) and (folder / _FAILED).stat().st_mtime > _BEGAN
    except OSError:
        return False


def _read(found: Path | None, compiled: Callable[[], Program], read: Callable[[Path], Program]) -> Program:
    """The first process's program. If that process fails while it is read, this one does the same by itself, and meets
    the same error.
    """
    if found is None:
        return compiled()
    try:
        return read(found)
    except (ShardcError, OSError):
        if found.is_dir():
            raise
        return compiled()


def _made(folder: Path) -> bool:
    """Whether the folder is there and new. What an earlier run left of it goes; somebody else's stays."""
    try:
        if _ours(folder):
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    except OSError:
        return False
    return True


def _ours(folder: Path) -> bool:
    """Whether only this user can have written there: a program is Python, which runs."""
    try:
        info = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077


def _awaited(folder: Path) -> Path | None:
    """The first process's program; None: it will not come."""
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
