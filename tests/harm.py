"""What reading a file of somebody else's may not do, and what it costs.

    with harm.Watch(folder) as seen:
        shardc.load(folder)
    assert not seen.harm and seen.seconds < 0.05

Python tells its audit hooks of every exec, import, open, process and connection; the CPU's time is this process's, and
memory is the peak of what it holds, over what it held before (Linux).
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch.fx import operator_schemas

import shardc
import shardc.machine.device  # first: where classes of pydantic are made, the text of their types is evaluated

#: Events of Python's audit hooks.
FORBIDDEN = (
    "pickle.find_class",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.symlink",
    "os.truncate",
    "shutil.rmtree",
    "socket.connect",
    "socket.bind",
    "ctypes.dlopen",
    "exec",
)
#: Where Python's own modules lie, torch's, and ours.
OURS = tuple(os.path.realpath(Path(x).parents[n]) + os.sep for x, n in ((os.__file__, 0), (shardc.__file__, 1)))
#: They run code that they write themselves: methods of classes, types of an op's schema.
WRITERS = (dataclasses.__file__, collections.__file__, operator_schemas.__file__)
_watched: list[tuple[str, Any]] | None = None
_hooked = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watched is not None and (event == "open" or event in FORBIDDEN):
        caller = sys._getframe(1).f_code.co_filename if event == "exec" else ""
        _watched.append((event, (*args[:2], caller)))


class Watch:
    """Around reading something. inside: the folders in which files may be opened, for reading only.

    harm: the first thing that was done and may not be, "" if none. seconds: of CPU; nbytes: of memory, at its peak.
    """

    def __init__(self, *inside: Path) -> None:
        self.inside = tuple(f"{os.path.realpath(x)}{os.sep}" for x in inside)
        self.harm, self.seconds, self.nbytes = "", 0.0, 0

    def __enter__(self) -> Watch:
        global _watched, _hooked
        if not _hooked:
            sys.addaudithook(_audit)
            _hooked = True
        gc.collect(0)
        self._before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._start = time.process_time()
        _watched = []
        return self

    def __exit__(self, *_: object) -> None:
        global _watched
        seen, _watched = _watched or [], None
        self.seconds = time.process_time() - self._start
        self.nbytes = _status("VmHWM") - self._before
        self.harm = next((f"{event} {args[:2]}"[:200] for event, args in seen if self._harms(event, args)), "")

    def _harms(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "exec" and getattr(args[0], "co_name", "") == "<module>":
            file = args[0].co_filename
            if os.path.isabs(file) and os.path.realpath(file).startswith(OURS):
                return False  # a module, imported late
            return args[-1] not in WRITERS
        if event != "open":
            return True
        path, mode = args[0], args[1]
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False  # a descriptor, which was opened before
        name = os.path.abspath(os.fsdecode(path))
        writes = isinstance(mode, str) and bool(set(mode) & set("wax+"))
        if name.endswith((".py", ".pyc", ".so")) and not writes and name.startswith(tuple(map(_real, sys.path))):
            return False  # Python's own: lines of a traceback, modules
        return writes or not f"{os.path.realpath(os.path.dirname(name))}{os.sep}".startswith(self.inside)


def _real(path: str) -> str:
    return os.path.realpath(path or ".") + os.sep


def _status(key: str) -> int:
    """Bytes, of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024
