"""Reduce a traceback to the frames of the user's code."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

from shardc.ir.source import is_users

#: A frame in a traceback's text. torch's DataLoader puts a worker's traceback into the message of a new exception.
_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+), in .*\n(?:    .*\n)*', re.MULTILINE)
_OF_WORKER = re.compile(r"^Caught \w+ (in \w+ worker process \d+)\.\nOriginal Traceback \(most recent call last\):\n")


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code, outermost first; those of its worker process are the last."""
    frames = list(traceback.extract_tb(error.__traceback__))
    frames += [
        traceback.FrameSummary(file, line, name, line=code)
        for file, line, name, code in getattr(error.__cause__, "frames", ())
    ]
    return [f for f in frames if is_users(f.filename)]


def _in_message(error: BaseException) -> list[tuple[str, int]]:
    """Return (file, line) of the user's frames in a message that is the traceback of a worker process."""
    text = _message(error)
    frames = _FRAME.findall(text) if _OF_WORKER.match(text) else []
    return [(file, int(line)) for file, line in frames if is_users(file)]


def _message(error: BaseException) -> str:
    """Return the message of an exception. str() of a KeyError has quotes and escaped line ends."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def place(error: BaseException) -> str:
    """Return the innermost line of the user's code in an exception, as "model.py:24"; "" if none."""
    frames = [(f.filename, f.lineno) for f in _frames(error)] + _in_message(error)
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""


def one_line(error: BaseException) -> str:
    """Return an exception in one line: type, message and notes; those of the worker process if it has one."""
    text = f"{type(error).__name__}: {error}"
    if of_worker := _OF_WORKER.match(message := _message(error)):
        text = f"{message.strip().splitlines()[-1]} ({of_worker[1]})"
    return "; ".join([text, *_notes(error)])


def _notes(error: BaseException) -> list[str]:
    return [str(note) for note in getattr(error, "__notes__", ())]


def users_traceback(error: BaseException, *, debug: bool = False) -> str:
    """Format an exception with the frames of the user's code only; with all if there are none, or with `debug`."""
    frames, inner = _frames(error), _in_message(error)
    if debug:
        return "".join(traceback.format_exception(error))
    if not frames and not inner:
        return "".join(traceback.format_exception(error)) + _notes_of_old_python(error)
    text = "".join(traceback.format_exception_only(error)) + _notes_of_old_python(error)
    if inner:
        text = _FRAME.sub(lambda frame: frame[0] if is_users(frame[1]) else "", text)
    return f"Traceback of your code (--debug shows all of it):\n{''.join(traceback.format_list(frames))}{text}"


def _notes_of_old_python(error: BaseException) -> str:
    """Return the notes as lines on Python 3.10, which does not print them; "" on later versions."""
    return "" if sys.version_info >= (3, 11) else "".join(f"{note}\n" for note in _notes(error))
