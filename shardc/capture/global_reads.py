"""Numbers and texts that forward and the loss read of the Python modules that their code stands in, and of functions
around them: a program has their values of capture.

    SCALE = 1.0
    CONFIG = {"rate": 0.5}

    def forward(self, x):
        return self.up(x) * SCALE * CONFIG["rate"]     a later `SCALE = 2.0` would change nothing: it is told

Found in the bytecode of forward, and of the functions and methods of the user's that it names; what they set themselves
changes with every call of the model, and does not count.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from shardc.ir import source
from shardc.runtime.step.user_changes import GlobalRead

#: Values that are compared by what they are; so are those of them that a dict has.
PLAIN = (bool, int, float, str, type(None))
#: Entries of a dict that are looked at.
MOST = 64
OF_SELF = "attribute of the first argument"
_WRAPPERS = (FunctionType, staticmethod, classmethod)


class _Closure(Mapping[str, Any]):
    """The names that a function has from around it, with the values that they have now."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._file = function.__code__.co_filename

    def __getitem__(self, name: str) -> Any:
        if name == "__file__":
            return self._file
        try:
            return self._cells[name].cell_contents
        except ValueError as e:  # it has no value yet
            raise KeyError(name) from e

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def of(model: nn.Module, *functions: Any) -> list[GlobalRead]:
    """What the forwards of a model's modules, and these functions, name: perhaps in branches that never run."""
    walk = _Walk()
    for kind in dict.fromkeys(type(m) for m in model.modules()):
        walk.method(kind, "forward")
    for function in functions:
        walk.function(function, None)
    found = {(id(space), name): (space, name) for space, name in walk.read}
    return [
        read
        for key, (space, name) in found.items()
        if key not in walk.written and name in space
        for read in _reads(space, name)
    ]


def _reads(space: Mapping[str, Any], name: str) -> Iterator[GlobalRead]:
    value = space[name]
    if type(value) in PLAIN:
        yield GlobalRead(space, name, value)
    elif type(value) is dict and len(value) <= MOST:
        for key, entry in value.items():
            if type(key) in PLAIN and type(entry) in PLAIN:
                yield GlobalRead(space, name, entry, (key,))


@dataclass
class _Walk:
    """The user's code that forward reaches, by the names in it."""

    read: list[tuple[Mapping[str, Any], str]] = field(default_factory=list)
    written: set[tuple[int, str]] = field(default_factory=set)
    _seen: set[tuple[CodeType, type | None]] = field(default_factory=set)

    def method(self, kind: type, name: str) -> None:
        for base in kind.__mro__:
            if name in vars(base):
                self.function(vars(base)[name], kind)
                return

    def function(self, function: Any, kind: type | None) -> None:
        """kind: of `self`, if it is a method."""
        while issubclass(type(function), functools.partial):
            function = function.func
        # by its type: isinstance would ask a proxy for its __class__
        if not issubclass(type(function), _WRAPPERS):
            return
        kind = None if isinstance(function, staticmethod) else kind
        function = inspect.unwrap(function)
        if not isinstance(function, FunctionType) or not source.is_users(function.__code__.co_filename):
            return
        if (function.__code__, kind) in self._seen:
            return
        self._seen.add((function.__code__, kind))
        space, code = function.__globals__, function.__code__
        closure = _Closure(function)
        for op, name in _names(code, code.co_varnames[0] if code.co_argcount else ""):
            if op in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                self.written.add((id(space), name))
            elif op == "LOAD_GLOBAL" and name in space:
                self.read.append((space, name))
                self.function(space[name], None)
            elif op in ("STORE_DEREF", "LOAD_DEREF") and name in closure:
                if op == "STORE_DEREF":
                    self.written.add((id(closure), name))
                self.read.append((closure, name))
                self.function(closure[name], None)
            elif kind is not None and op == OF_SELF:
                self.method(kind, name)


def _names(code: CodeType, first: str, *, inside: bool = False) -> Iterator[tuple[str, str]]:
    """(op, name) of a function's code, and of the functions inside of it. first: its first argument, whose attributes
    have the op OF_SELF.
    """
    loads = "LOAD_DEREF" if inside else ("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST")
    of_self = False
    for i in dis.get_instructions(code):
        if i.opname in ("EXTENDED_ARG", "CACHE"):
            continue
        if isinstance(i.argval, str):
            yield OF_SELF if of_self and i.opname in ("LOAD_ATTR", "LOAD_METHOD") else i.opname, i.argval
        loaded = i.argval[-1] if isinstance(i.argval, tuple) and i.argval else i.argval  # two loads in one op
        of_self = i.opname.startswith(loads) and bool(first) and loaded == first
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant, first, inside=True)
