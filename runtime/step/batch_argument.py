"""The one argument of `engine.step(batch)`: a call that spreads a batch out, as one of the model does, is told what to
write.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from shardc.errors import ShardcError
from shardc.ir.program import Program

_Method = TypeVar("_Method", bound=Callable[..., Any])


def one_batch(method: _Method) -> _Method:
    """An engine's method that takes a batch and options. Raises ShardcError where it is called with a batch's entries:
    `step(x, y)`, `step(x=x, y=y)`, `step(**batch)`. A misspelled option stays Python's own TypeError.
    """
    names = set(inspect.signature(method).parameters)

    @functools.wraps(method)
    def call(engine: Any, *args: Any, **options: Any) -> Any:
        unknown = [name for name in options if name not in names]
        program = engine.program
        entries = {path[0] for path in (*dict(program.baked), *(x.path for x in program.inputs)) if path}
        if len(args) > 1 or (unknown and (not args or entries.intersection(unknown))):
            raise _spread(program, method.__name__, len(args), unknown)
        return method(engine, *args, **options)

    return cast(_Method, call)


def _spread(program: Program, method: str, count: int, names: list[str]) -> ShardcError:
    given = [f"{count} arguments" if count > 1 else "one argument"] * bool(count)
    given += [f"{', '.join(names)} by name"] * bool(names)
    heads = list(dict.fromkeys(x.path[0] for x in program.inputs if x.path))
    if heads and isinstance(heads[0], str):
        batch = f"{{{', '.join(f'{str(h)!r}: {h}' for h in heads)}}}"
    else:
        batch = f"({', '.join(f'x{h}' for h in heads)})" if heads else "x"
    return ShardcError(
        f"it takes one batch, and was given {' and '.join(given)}",
        where=f"engine.{method}",
        fix=f"pass the batch itself, as to compile: engine.{method}({batch}), without `*` and `**`",
    )
