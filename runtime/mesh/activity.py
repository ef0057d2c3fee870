"""Record what a rank is doing, for the watching thread (watch.py) and for after a kill (launch.py)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch.distributed.distributed_c10d as c10d

from shardc.errors import ShardcError
from shardc.ir.source import models_frame


class Activity:
    """What a rank is doing now.

    doing: "step 5", during which ranks may wait for each other; outside of it the last one. action: of a pipeline's
    schedule, "at 1F1 of the schedule: stage 1, microbatch 1". collective: the last one that began, "all_reduce 'h.0'
    over tp". count: of all collectives. note: called with the text whenever it changes. callback: the user's that runs
    now; alone: on this rank only, so that it can have no collective.
    """

    def __init__(self) -> None:
        self.doing = self.action = self.callback = ""
        self.inside = self.alone = False
        self.count = 0
        self._failed = ""  # where the rank failed; shown until it goes on
        self._last: tuple[str, tuple[str, ...], str] | None = None
        self.note: Callable[[str], None] = lambda _: None

    @contextmanager
    def during(self, doing: str) -> Iterator[bool]:
        """Record a joint action of all ranks. Yield whether it is the outermost; only that one is named."""
        if self.inside:
            yield False
            return
        self.doing, self.inside = doing, True
        self._write()
        try:
            yield True
        except BaseException:
            self._failed, self.inside = str(self), False
            raise
        self.inside = False
        if self._failed.split()[1:2] == doing.split()[:1]:
            self._failed = ""  # a later action of its kind succeeded; the save after an error does not count
        self._write()

    def act(self, action: str) -> None:
        self.action = action
        self._write()

    def begin(self, kind: str, axes: tuple[str, ...], tag: str) -> None:
        """Record the start of a collective. Raises ShardcError in a callback of this rank alone."""
        if self.alone:
            fix = "leave out rank0 = True, and write `if engine.mesh.rank == 0:` around what prints or logs alone"
            fault = "it runs on the first rank alone (rank0 = True), and this call needs all ranks"
            raise ShardcError(fault, where=f"the callback {self.callback}", fix=fix)
        self.count += 1
        self._last = kind, axes, tag
        self._write()

    @property
    def collective(self) -> str:
        if self._last is None:
            return ""
        kind, axes, tag = self._last
        return f"{kind} {tag!r} over {'+'.join(axes)}" if tag else f"{kind} over {'+'.join(axes)}"

    def __str__(self) -> str:
        """Return a text such as "in step 5, at all_reduce 'h.0' over tp" or "after step 5"."""
        if not self.doing:
            return ""
        if not self.inside:
            return f"after {self.doing}"
        place = self.action or (f"at {self.collective}" if self.collective else "")
        return f"in {self.doing}, {place}" if place else f"in {self.doing}"

    def _write(self) -> None:
        self.note(str(self) if self.inside else self._failed or str(self))


_waiting: list[None] = []


@contextmanager
def waiting() -> Iterator[None]:
    """Mark a wait for other ranks by other means than torch.distributed's, such as a file."""
    _waiting.append(None)
    try:
        yield
    finally:
        _waiting.pop()


def waits() -> bool:
    """Return whether another thread of this process waits for other ranks now (also in `waiting`)."""
    this_thread = threading.get_ident()
    return bool(_waiting) or any(_is_wait(f) for thread, f in sys._current_frames().items() if thread != this_thread)


def _is_wait(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename == c10d.__file__ or (code.co_name == "wait" and code.co_filename.endswith("mesh/base.py"))


def place() -> str:
    """Return the main thread's place, in the user's code if that calls: "model.py:22, in forward"."""
    first = sys._current_frames().get(threading.main_thread().ident or 0)
    if (frame := models_frame(first) or first) is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, in {frame.f_code.co_name}"
