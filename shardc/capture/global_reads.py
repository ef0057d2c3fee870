"""Numbers and texts that forward reads of the modules that its code stands in: a program has their values of capture.

    SCALE = 1.0
    CONFIG = {"rate": 0.5}

    def forward(self, x):
        return self.up(x) * SCALE * CONFIG["rate"]     a later `SCALE = 2.0` would change nothing: it is noticed

Found in the bytecode of forward, and of the functions and methods of the user's that it names; what they set themselves
changes with every call of the model, and does not count.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from shardc.ir import source
from shardc.runtime.step.user_changes import GlobalRead

#: Values that are compared by what they are; so are lists, tuples and dicts of up to MOST of them.
PLAIN = (bool, int, float, str, type(None))
MOST = 64


def of(model: nn.Module, *functions: Any) -> list[GlobalRead]:
    """What the forwards of a model's modules, and these functions, read."""
    walk = _Walk()
    for kind in dict.fromkeys(type(m) for m in model.modules()):
        walk.method(kind, "forward")
    for function in functions:
        walk.function(function, None)
    found = {(id(space), name): (space, name) for space, name in walk.read}
    return [
        GlobalRead(space, name, copied(space[name]))
        for key, (space, name) in found.items()
        if key not in walk.written and name in space and _is_plain(space[name])
    ]


def copied(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, tuple, dict) else value


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        value = [*value, *value.values()]
    if type(value) in (list, tuple):
        return len(value) <= MOST and all(type(x) in PLAIN for x in value)
    return type(value) in PLAIN


@dataclass
class _Walk:
    """The user's code that forward reaches, by the names in it."""

    read: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    written: set[tuple[int, str]] = field(default_factory=set)
    _seen: set[tuple[CodeType, type | None]] = field(default_factory=set)

    def method(self, kind: type, name: str) -> None:
        for base in kind.__mro__:
            if name in vars(base):
                self.function(vars(base)[name], kind)
                return

    def function(self, function: Any, kind: type | None) -> None:
        """kind: of `self`, if it is a method."""
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, FunctionType) or not source.is_users(function.__code__.co_filename):
            return
        if "site-packages" in function.__code__.co_filename or (function.__code__, kind) in self._seen:
            return
        self._seen.add((function.__code__, kind))
        space = function.__globals__
        for op, name in _names(function.__code__):
            if op in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                self.written.add((id(space), name))
            elif op == "LOAD_GLOBAL" and name in space:
                self.read.append((space, name))
                self.function(space[name], None)
            elif kind is not None and op in ("LOAD_ATTR", "LOAD_METHOD"):
                self.method(kind, name)


def _names(code: CodeType) -> Iterator[tuple[str, str]]:
    """(op, name) of a function's code, and of the functions inside of it."""
    for i in dis.get_instructions(code):
        if isinstance(i.argval, str):
            yield i.opname, i.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
