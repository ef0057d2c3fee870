"""A traceback of the user's own code alone."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

from shardc.ir.source import is_users

#: A frame in the text of a traceback: torch's DataLoader makes that of a worker process the message of a new exception.
_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+), in .*\n(?:    .*\n)*', re.MULTILINE)
_OF_WORKER = re.compile(r"^Caught \w+ (in \w+ worker process \d+)\.\nOriginal Traceback \(most recent call last\):\n")


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Those of the user's code, outermost first; those in a worker process that it comes from are the last."""
    frames = list(traceback.extract_tb(error.__traceback__))
    frames += [
        traceback.FrameSummary(file, line, name, line=code)
        for file, line, name, code in getattr(error.__cause__, "frames", ())
    ]
    return [f for f in frames if is_users(f.filename)]


def _in_message(error: BaseException) -> list[tuple[str, int]]:
    """Of a message that is the traceback of a worker process: (file, line) of the user's frames."""
    text = _message(error)
    frames = _FRAME.findall(text) if _OF_WORKER.match(text) else []
    return [(file, int(line)) for file, line in frames if is_users(file)]


def _message(error: BaseException) -> str:
    """A KeyError shows a text in quotes, with its line ends spelled out."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def place(error: BaseException) -> str:
    """The innermost line of the user's code on the way to an exception, as "model.py:24"; "" if there is none."""
    frames = [(f.filename, f.lineno) for f in _frames(error)] + _in_message(error)
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""


def said(error: BaseException) -> str:
    """An exception in one line: type, message and notes, of the worker process's where it came from one."""
    text = f"{type(error).__name__}: {error}"
    if of_worker := _OF_WORKER.match(message := _message(error)):
        text = f"{message.strip().splitlines()[-1]} ({of_worker[1]})"
    return "; ".join([text, *_notes(error)])


def _notes(error: BaseException) -> list[str]:
    return [str(note) for note in getattr(error, "__notes__", ())]


def users_traceback(error: BaseException) -> str:
    """What Python prints of an exception, with the frames of the user's code only; all frames where there is none."""
    frames, inner = _frames(error), _in_message(error)
    if not frames and not inner:
        return "".join(traceback.format_exception(error)) + _notes_of_old_python(error)
    text = "".join(traceback.format_exception_only(error)) + _notes_of_old_python(error)
    if inner:
        text = _FRAME.sub(lambda frame: frame[0] if is_users(frame[1]) else "", text)
    return f"Traceback of your code (--debug shows all of it):\n{''.join(traceback.format_list(frames))}{text}"


def _notes_of_old_python(error: BaseException) -> str:
    """Python prints them since 3.11."""
    return "" if sys.version_info >= (3, 11) else "".join(f"{note}\n" for note in _notes(error))


def print_error(error: BaseException, *, debug: bool) -> None:
    """On stderr."""
    text = "".join(traceback.format_exception(error)) if debug else users_traceback(error)
    print(text, end="", file=sys.stderr, flush=True)
