"""Text where an optimizer or a schedule wants a number: `AdamW(params, lr="1e-3")`.

It mostly comes from a file of settings: JSON strings, command lines, or YAML 1.1 (PyYAML), which reads `1e-3` without a
dot as text. Torch compares it with a number and says so in terms of its own code; or, in a parameter group, stumbles
over it in the first step.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardc.errors import ShardcError
from shardc.ir.source import is_users

FIX = "pass a number, float({value}); PyYAML reads 1e-3 as text: write 1.0e-3 there"


@contextlib.contextmanager
def refused(where: str) -> Iterator[None]:
    """Raises ShardcError, with the user's line, where the constructor of an optimizer or a schedule fails over text for
    a number.
    """
    try:
        yield
    except TypeError as e:
        frames = [frame for frame, _ in traceback.walk_tb(e.__traceback__)]
        at = next((i for i, f in enumerate(frames) if _constructs(f)), None)
        if at is None:
            raise
        # where a class calls that of its base, the outermost has what the user wrote
        given = [(n, x) for f in frames[at:] if _constructs(f) for n, x in _arguments(f) if of(x) is not None]
        if not given:
            raise
        name, value = given[0]
        kind = type(frames[at].f_locals["self"]).__name__
        lines = [f for f in traceback.extract_tb(e.__traceback__) if is_users(f.filename)]
        place = f"{where}, {lines[-1].filename.rpartition('/')[2]}:{lines[-1].lineno}" if lines else where
        what = f"{kind} is given {name}={value!r}, text where a number is wanted"
        raise ShardcError(what, where=place, fix=FIX.format(value=of(value))) from e


def of(value: Any) -> str | None:
    """The text in a setting that stands for a number, quoted; None: there is none."""
    for x in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(x, str):
            with contextlib.suppress(ValueError):
                float(x)
                return repr(x)
    return None


def _constructs(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), (Optimizer, LRScheduler))


def _arguments(frame: FrameType) -> Iterator[tuple[str, Any]]:
    code = frame.f_code
    for name in code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]:
        yield name, frame.f_locals.get(name)
