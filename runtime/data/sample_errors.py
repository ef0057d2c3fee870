"""Errors of a user's dataset and collate function: they name the sample, and leave a worker process as they are.

torch makes a new exception of a worker's: of the same type, if that takes a text, and with the worker's traceback as
its message; the attributes are lost. Here a worker hands the exception itself over, and the process that reads raises
it, caused by a `WorkerTraceback` that shows where in the worker it came from.
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
    """Around the user's code: what it raises gets a note on what was being read; StopIteration is a ShardcError."""
    try:
        yield
    except StopIteration as e:  # would end the epoch without a word
        fault = f"{doing} raises StopIteration, which would end the epoch as if it were its last sample"
        raise ShardcError(fault, where="engine.loader", fix="give `next` a default there, or catch it") from e
    except Exception as e:
        add_note(e, f"in {doing}")
        raise


def add_note(error: Exception, note: str) -> None:
    """As BaseException.add_note, which Python has since 3.11, and prints."""
    error.__notes__ = [*getattr(error, "__notes__", ()), note]


class WorkerTraceback(Exception):
    """Where in a worker process an exception was raised. frames: (file, line, function, code), outermost first."""

    def __init__(self, text: str, frames: tuple[tuple[str, int, str, str], ...] = ()) -> None:
        super().__init__(text)
        self.text, self.frames = text, frames

    def __str__(self) -> str:
        return f"\n{self.text}"


@dataclass(frozen=True)
class Failed:
    """What a worker gives in place of a batch. pickled: the exception; b"" for one that no other process can have."""

    pickled: bytes
    said: str
    notes: tuple[str, ...]
    cause: WorkerTraceback

    @staticmethod
    def of(error: Exception) -> Failed:
        stack = traceback.extract_tb(error.__traceback__)
        frames = tuple((f.filename, f.lineno or 0, f.name, f.line or "") for f in stack)
        text = "".join(traceback.format_exception(error)).rstrip()
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # its class may take other arguments than those that it keeps
        except Exception:
            pickled = b""
        worker = get_worker_info()
        notes = (*getattr(error, "__notes__", ()), *((f"in DataLoader worker process {worker.id}",) if worker else ()))
        return Failed(pickled, f"{type(error).__name__}: {error}", notes, WorkerTraceback(text, frames))

    def again(self) -> Exception:
        """The exception, to be raised in the process that reads."""
        error: Exception = pickle.loads(self.pickled) if self.pickled else RuntimeError(self.said)
        error.__notes__ = list(self.notes)
        error.__cause__ = self.cause
        return error
