"""Reduce a traceback to the frames of the user's code."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

from shardc.ir.source import is_users

#: A frame in a traceback's text. torch's DataLoader puts a worker's traceback into the message of a new exception.
_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+), in (.*)\n(?:    (.*)\n(?:    .*\n)*)?', re.MULTILINE)
_OF_WORKER = re.compile(r"^Caught \w+ (in \w+ worker process \d+)\.\nOriginal Traceback \(most recent call last\):\n")


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code, outermost first; those of its worker process are the last."""
    frames, text = list(traceback.extract_tb(error.__traceback__)), _message(error)
    inner = _FRAME.findall(text) if _OF_WORKER.match(text) else getattr(error.__cause__, "frames", ())
    frames += [traceback.FrameSummary(file, int(line), name, line=code) for file, line, name, code in inner]
    return [f for f in frames if is_users(f.filename)]


def _message(error: BaseException) -> str:
    """Return the message of an exception. str() of a KeyError has quotes and escaped line ends."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def _of_worker(error: BaseException) -> str:
    """Return the worker process's type and message of an exception from a DataLoader; "" for another one."""
    of_worker = _OF_WORKER.match(message := _message(error))
    return f"{_FRAME.split(message)[-1].strip()} ({of_worker[1]})" if of_worker else ""


def place(error: BaseException) -> str:
    """Return the innermost line of the user's code in an exception, as "model.py:24"; "" if none."""
    return "".join(f"{Path(f.filename).name}:{f.lineno}" for f in _frames(error)[-1:])


def one_line(error: BaseException) -> str:
    """Return an exception in one line: type, message and notes; those of the worker process if it has one."""
    text = _of_worker(error).rpartition("\n")[2] or f"{type(error).__name__}: {error}"
    return "; ".join([text, *_notes(error)])


def _notes(error: BaseException) -> list[str]:
    return [str(note) for note in getattr(error, "__notes__", ())]


def users_traceback(error: BaseException, *, debug: bool = False) -> str:
    """Format an exception with the frames of the user's code only; with all if there are none, or with `debug`."""
    frames = _frames(error)
    old_python = sys.version_info < (3, 11)  # does not print notes
    notes = "".join(f"{note}\n" for note in _notes(error)) if old_python else ""
    if debug or not frames:
        return "".join(traceback.format_exception(error)) + notes
    text = f"{worker}\n" if (worker := _of_worker(error)) else "".join(traceback.format_exception_only(error))
    return f"Traceback of your code (--debug shows all of it):\n{''.join(traceback.format_list(frames))}{text}{notes}"
