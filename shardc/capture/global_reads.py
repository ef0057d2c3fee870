"""Numbers and texts that forward and the loss read of the Python modules that their code stands in, of functions around
them, of a loss that is an object, and of the environment: a program has their values of capture.

    SCALE = 1.0
    CONFIG = {"rate": 0.5}

    def forward(self, x):
        return self.up(x) * SCALE * CONFIG["rate"]     a later `SCALE = 2.0` would change nothing: it is told

Found in the bytecode of forward, and of the functions and methods of the user's that it names. What they set themselves
changes with every call of the model: a number of those is a counter, which is told when the model is compiled. Plain
attributes of the model's modules are seen when they are read (attribute_reads); of theirs, only lists and dicts count
here.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any
from unittest import mock

from torch import nn

from shardc.ir import source
from shardc.runtime.step.user_changes import GlobalRead

#: Values that are compared by what they are; so are those of them that a dict has.
PLAIN = (bool, int, float, str, type(None))
#: Entries of a dict or a list that are looked at.
MOST = 64
OF_SELF, SET_OF_SELF = "attribute of the first argument", "it is set"
#: The files of os.environ's own methods.
_OF_ENVIRON = (os.__file__, sys.modules[Mapping.__module__].__file__, Mapping.get.__code__.co_filename)
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


class _Attributes(Mapping[str, Any]):
    """The attributes of an object and of its classes, as they are now. It does not keep the object alive, if that can
    be told; there are none of one that is gone.
    """

    def __init__(self, thing: Any) -> None:
        try:
            self._thing: Callable[[], Any] = weakref.ref(thing)
        except TypeError:
            self._thing = lambda: thing

    def __getitem__(self, name: str) -> Any:
        thing = self._thing()
        for space in (getattr(thing, "__dict__", {}), *map(vars, type(thing).__mro__)):
            if name in space:
                return space[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(getattr(self._thing(), "__dict__", {}))

    def __len__(self) -> int:
        return len(getattr(self._thing(), "__dict__", {}))


def of(model: nn.Module, *functions: Any) -> list[GlobalRead]:
    """What the forwards of a model's modules, and these functions, name: perhaps in branches that never run."""
    walk = _Walk()
    for kind in dict.fromkeys(type(m) for m in model.modules()):
        walk.method(kind, "forward")
    for function in functions:
        walk.function(function, None)
    found = {(id(space), name): (space, name) for space, name in walk.read}
    reads = [
        read
        for key, (space, name) in found.items()
        if name in space
        for read in _reads(space, name, sets=key in walk.written)
    ]
    modules = {id(m): (path, m) for path, m in model.named_modules()}
    objects = {id(x): (None, x) for x in walk.objects}
    for path, thing in {**objects, **modules}.values():
        own = _Attributes(thing)
        owner = f"{type(thing).__name__}()" if path is None else path or "the model"
        for name in walk.attributes.get(type(thing), {}):
            if name in own:
                sets = name in walk.attributes_written.get(type(thing), ())
                reads += [r for r in _reads(own, name, sets=sets, owner=owner) if r.key or path is None]
    return reads


def _reads(space: Mapping[str, Any], name: str, *, sets: bool, owner: str = "") -> Iterator[GlobalRead]:
    value = space[name]
    if type(value) in PLAIN:
        yield GlobalRead(space, name, value, (), sets, owner)
    elif type(value) in (dict, list, tuple) and len(value) <= MOST:
        for key, entry in value.items() if type(value) is dict else enumerate(value):
            if type(key) in PLAIN and type(entry) in PLAIN:
                yield GlobalRead(space, name, entry, (key,), sets, owner)


@contextmanager
def of_environment() -> Iterator[list[GlobalRead]]:
    """While open, what the user's code reads of os.environ; None for what is not in it."""
    found: dict[str, GlobalRead] = {}
    environ = type(os.environ)
    plain = environ.__getitem__

    def read(self: Any, name: str) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename in _OF_ENVIRON:
            frame = frame.f_back
        try:
            value = plain(self, name)
        except KeyError:
            value = None
        if source.is_users(frame.f_code.co_filename):
            found.setdefault(name, GlobalRead(os.environ, name, value, owner="the environment"))
        return plain(self, name)

    reads: list[GlobalRead] = []
    with mock.patch.object(environ, "__getitem__", read):
        yield reads
    reads += found.values()


@dataclass
class _Walk:
    """The user's code that forward reaches, by the names in it."""

    read: list[tuple[Mapping[str, Any], str]] = field(default_factory=list)
    written: set[tuple[int, str]] = field(default_factory=set)
    objects: list[Any] = field(default_factory=list)
    attributes: dict[type, dict[str, None]] = field(default_factory=dict)
    attributes_written: dict[type, set[str]] = field(default_factory=dict)
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
        if issubclass(type(function), MethodType):
            self.objects.append(function.__self__)
            function, kind = function.__func__, type(function.__self__)
        if not issubclass(type(function), _WRAPPERS):
            if source.is_users(getattr(sys.modules.get(type(function).__module__), "__file__", None) or "<none>"):
                self.objects.append(function)
                for name in ("forward", "__call__"):
                    self.method(type(function), name)
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
                self.attributes.setdefault(kind, {})[name] = None
                self.method(kind, name)
            elif kind is not None and op == SET_OF_SELF:
                self.attributes_written.setdefault(kind, set()).add(name)


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
            kind = {"LOAD_ATTR": OF_SELF, "LOAD_METHOD": OF_SELF, "STORE_ATTR": SET_OF_SELF}.get(i.opname)
            yield kind if of_self and kind is not None else i.opname, i.argval
        loaded = i.argval[-1] if isinstance(i.argval, tuple) and i.argval else i.argval  # two loads in one op
        of_self = i.opname.startswith(loads) and bool(first) and loaded == first
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant, first, inside=True)
