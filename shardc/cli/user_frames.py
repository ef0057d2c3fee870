"""Which code is the user's own, and a traceback of it alone."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path


def is_users(file: str | Path) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor shardc's."""
    path = Path(file)
    if not path.is_file():  # "<string>", "<frozen importlib>"
        return False
    path = path.resolve()
    return {"site-packages", "dist-packages"}.isdisjoint(path.parts) and not any(map(path.is_relative_to, _others()))


@cache
def _others() -> list[Path]:
    package = Path(__file__).resolve().parents[1]
    own = package, package.parent / "runtime", package.parent / "passes"  # beside it in a checkout
    return [p.resolve() for p in (*own, Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("platstdlib")))]


def place(error: BaseException) -> str:
    """The innermost line of the user's code on the way to an exception, as "model.py:24"; "" if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def users_traceback(error: BaseException) -> str:
    """What Python prints of an exception, with the frames of the user's code only; all frames where there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    if not frames:
        return "".join(traceback.format_exception(error))
    said = "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)])
    return f"Traceback of your code (--debug shows all of it):\n{said}"


def print_error(error: BaseException, *, debug: bool) -> None:
    """On stderr."""
    text = "".join(traceback.format_exception(error)) if debug else users_traceback(error)
    print(text, end="", file=sys.stderr, flush=True)
