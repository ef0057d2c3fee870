"""Let the first process of a machine compile under torchrun and Slurm; the others read its program.

Compiling takes a core and the memory of a traced model, for seconds to minutes. Eight processes that compile at once
take eight times as much from the machine that is about to train. The first process puts the folder of its program, or
the ShardcError that it ended with, into the store over which the ranks meet. A process that cannot read that folder (a
container with a private temporary folder) compiles separately.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardc.cli.same_error_once import FirstFailedError
from shardc.errors import ShardcError

if TYPE_CHECKING:
    from shardc.api import Program

#: Seconds between looks into the store.
POLL = 0.1


def compiled_once(folder: Path, compiled: Callable[[], Program], read: Callable[[Path], Program]) -> Program:
    """Return the program: the first process of a machine compiles it and saves it to `folder`; the others read it.

    folder: of the first process, private to its user and there until it ends. Raises FirstFailedError if the first one
    has failed.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1 or "LOCAL_RANK" not in os.environ:
        return compiled()
    from shardc.runtime.mesh.activity import waiting
    from shardc.runtime.mesh.presence import world_store

    store, _, _ = world_store()
    # the same for all processes that one launcher has started on one machine
    key = f"compiled/{os.environ.get('GROUP_RANK') or os.environ.get('SLURM_NODEID') or socket.gethostname()}"
    if os.environ["LOCAL_RANK"] == "0":
        try:
            program = compiled()
            program.save(folder)
        except ShardcError as e:
            store.set(key, json.dumps(e.to_json()))
            raise
        store.set(key, json.dumps(str(folder)))
        return program
    try:
        with waiting():
            while not store.check([key]):
                time.sleep(POLL)
        result = json.loads(store.get(key))
    except RuntimeError as e:  # the store went with the process that held it
        fault = "rank 0, where the ranks meet, ended while this rank waited for the compiled program"
        raise ShardcError(fault, where="compiling", fix="see the error of rank 0") from e
    if isinstance(result, list):
        first, *others = errors = [ShardcError(**error) for error in result]
        raise FirstFailedError(first.what, where=first.where, fix=first.fix, errors=errors if others else ())
    return read(Path(result)) if _is_private(Path(result).parent) else compiled()


def _is_private(folder: Path) -> bool:
    """Return whether only this user can write to the folder: a program is Python code, which is run."""
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077
