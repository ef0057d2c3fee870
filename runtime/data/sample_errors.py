"""Name the sample in errors of a user's dataset or collate function, and pass them on from workers.

torch makes a new exception from a worker's: of the same type, if that accepts a text, with the worker's traceback as
its message; attributes are lost. Here a worker sends the exception itself, and the reading process raises it, caused by
a `WorkerTraceback` with its place in the worker.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.utils.data import get_worker_info

from shardc.errors import ShardcError


@contextmanager
def named(doing: str) -> Iterator[None]:
    """Add a note on what was read to errors of the user's code; turn StopIteration into a ShardcError."""
    try:
        yield
    except StopIteration as e:  # would silently end the epoch
        fault = f"{doing} raises StopIteration, which would end the epoch as if it were its last sample"
        raise ShardcError(fault, where="engine.loader", fix="pass `next` a default there, or catch it") from e
    except Exception as e:
        add_note(e, f"in {doing}")
        raise


def add_note(error: Exception, note: str) -> None:
    """Add a note to an error, as BaseException.add_note of Python 3.11 does."""
    error.__notes__ = [*getattr(error, "__notes__", ()), note]


class WorkerTraceback(Exception):
    """Where in a worker an exception was raised. frames: (file, line, function, code), outermost first."""

    def __init__(self, text: str, frames: tuple[tuple[str, int, str, str], ...] = ()) -> None:
        super().__init__(text)
        self.text, self.frames = text, frames

    def __str__(self) -> str:
        return f"\n{self.text}"


@dataclass(frozen=True)
class Failed:
    """A worker's result in place of a batch. pickled: the exception; b"" if it cannot be pickled."""

    pickled: bytes
    error_text: str
    notes: tuple[str, ...]
    cause: WorkerTraceback

    @staticmethod
    def of(error: Exception) -> Failed:
        stack = traceback.extract_tb(error.__traceback__)
        frames = tuple((f.filename, f.lineno or 0, f.name, f.line or "") for f in stack)
        text = "".join(traceback.format_exception(error)).rstrip()
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # fails if its class takes other arguments than it keeps
        except Exception:
            pickled = b""
        worker = get_worker_info()
        notes = (*getattr(error, "__notes__", ()), *((f"in DataLoader worker process {worker.id}",) if worker else ()))
        return Failed(pickled, f"{type(error).__name__}: {error}", notes, WorkerTraceback(text, frames))

    def again(self) -> Exception:
        """Return the exception, for the reading process to raise."""
        error: Exception = pickle.loads(self.pickled) if self.pickled else RuntimeError(self.error_text)
        error.__notes__ = list(self.notes)
        error.__cause__ = self.cause
        return error
