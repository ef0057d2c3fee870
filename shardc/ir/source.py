"""Find where in the model's code something came from: a traced node, an exception, a call in progress.

The model's code is any code outside of torch and shardc: libraries such as transformers define models, too. Code
outside of installed packages is the user's own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import re
import sys
import sysconfig
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx

from shardc import errors

_FRAME = re.compile(r'File "(.*)", line (\d+), in (.*)(?:\n\s*(.*))?')
_OURS = tuple(f"{Path(f).parent}/" for f in (torch.__file__, errors.__file__))
_STDLIB = tuple(
    {f"{Path(contextlib.__file__).parent}/", *(f"{sysconfig.get_path(n)}/" for n in ("stdlib", "platstdlib"))}
)
_PACKAGES = {"site-packages", "dist-packages"}
_LOOK_AT_CALLS = {"__torch_function__", "__torch_dispatch__"}
#: The most characters of a model's line that a message shows.
_SHOWN = 100


@dataclass(frozen=True)
class Source:
    """Where an op came from. module: FQN in the user's model ("" = the root); line: "file.py:31".

    code: the line's text. calls: "FQN@n" for every enclosing module that had been called n times before (not in the
    program's text).
    """

    module: str = ""
    line: str = ""
    code: str = ""
    calls: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return " ".join(p for p in (self.module, f"({self.line})" if self.line else "") if p)

    @property
    def shown(self) -> str:
        """The line's text for a message; a long one is shortened."""
        return self.code if len(self.code) <= _SHOWN else f"{self.code[: _SHOWN - 4].rstrip()} ..."

    def error(self, fault: str, fix: str) -> errors.ShardcError:
        """Return an error at this line, which it quotes."""
        return errors.ShardcError(f"{fault} ({self.shown})" if self.code else fault, where=self.line, fix=fix)


@cache
def is_models(filename: str) -> bool:
    """Return whether a file belongs neither to torch, nor to shardc, nor to the standard library."""
    if filename.startswith("<") or filename.startswith(_OURS):
        return False
    return not (filename.startswith(_STDLIB) and _PACKAGES.isdisjoint(Path(filename).parts))


@cache
def is_users(filename: str) -> bool:
    """Return whether a file is the model's and not part of an installed package."""
    return is_models(filename) and _PACKAGES.isdisjoint(Path(filename).parts)


def _calls(filename: str, function: str) -> bool:
    """Return whether this frame calls ops for the model.

    A user's torch function or dispatch mode, or tensor subclass, does not count: it comes between the line and the op.
    """
    return function not in _LOOK_AT_CALLS and is_models(filename)


def of_node(node: fx.Node, prefix: str = "model") -> Source:
    """Return module and line of an exported node. prefix: the user's model in capture's wrapper module."""
    module, calls = "", tuple[str, ...]()
    stack = node.meta.get("nn_module_stack")
    if stack:
        module = _bare(next(reversed(stack.values())), prefix)
        calls = tuple(f"{_bare(v, prefix)}@{k.rpartition('@')[2]}" for k, v in stack.items() if "@" in str(k))
    return replace(_quoted(node.meta.get("stack_trace") or ""), module=module, calls=calls)


@functools.lru_cache(maxsize=4096)  # equal layers have equal texts
def _quoted(text: str) -> Source:
    """Return the innermost of the model's lines in a text that quotes them as Python's tracebacks do."""
    for filename, line, function, code in reversed(_FRAME.findall(text)):
        if _calls(filename, function):
            return Source("", f"{Path(filename).name}:{line}", code.strip())
    return Source()


def _bare(entry: tuple[Any, ...], prefix: str) -> str:
    """Return the model's name of a module on the stack."""
    return str(entry[0]).partition("@")[0].removeprefix(prefix).removeprefix(".")


def where(source: Source) -> str:
    """Return the place for an error: "h.0.attn (gpt.py:31)", or "gpt.py:31" in the root module."""
    return str(source) if source.module else source.line


def place(node: fx.Node) -> str:
    """Return the place of an exported node, for an error."""
    return where(of_node(node))


def of_exception(error: BaseException) -> Source:
    """Return the model's innermost line in the traceback of `error`, or of its cause."""
    seen: set[int] = set()
    chain: list[BaseException] = []
    e: BaseException | None = error
    while e is not None and id(e) not in seen:
        seen.add(id(e))
        chain.append(e)
        e = e.__cause__ or e.__context__
    for e in reversed(chain):
        place = Source()
        tb = e.__traceback__
        while tb is not None:
            if _calls(name := tb.tb_frame.f_code.co_filename, tb.tb_frame.f_code.co_name):
                place = replace(of_frame(tb.tb_frame, tb.tb_lineno), line=f"{_in_package(name)}:{tb.tb_lineno}")
            tb = tb.tb_next
        if place.line:
            return place
    return next((place for e in reversed(chain) if (place := _quoted(str(e))).line), Source())


def is_torchs(error: BaseException) -> bool:
    """Return whether torch's code raised this. A RuntimeError counts: C++ code has no Python frames."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    name = tb.tb_frame.f_code.co_filename if tb is not None else ""
    return name.startswith(_OURS[0]) or isinstance(error, RuntimeError)  # NotImplementedError is a RuntimeError


def _in_package(filename: str) -> str:
    """Return a file's path inside its package (peft/tuners/loha/layer.py); only the name of a user's file."""
    parts = Path(filename).parts
    begin = max((i + 1 for i, part in enumerate(parts) if part in _PACKAGES), default=len(parts) - 1)
    return "/".join(parts[begin:])


def loops_of_node(node: fx.Node) -> str:
    """Return the headers of the `for` statements around the line of an exported node, innermost first."""
    for filename, line, function, _ in reversed(_FRAME.findall(node.meta.get("stack_trace") or "")):
        if _calls(filename, function):
            return _loops(filename, int(line))
    return ""


def loops_of_exception(error: BaseException) -> str:
    """Return the headers of the `for` statements around the model's lines of a traceback, innermost first."""
    loops: list[str] = []
    tb = error.__traceback__
    while tb is not None:
        if is_models(name := tb.tb_frame.f_code.co_filename):
            loops.insert(0, _loops(name, tb.tb_lineno))
        tb = tb.tb_next
    return "\n".join(filter(None, loops))


def _loops(filename: str, line: int) -> str:
    headers: list[str] = []
    depth = len(text := linecache.getline(filename, line)) - len(text.lstrip())
    for number in range(line, 0, -1):
        text = linecache.getline(filename, number)
        inside = len(text) - len(text.lstrip())
        if text.strip() and (inside < depth or number == line):
            depth = min(depth, inside)
            if re.match(r"\s*(async )?for\b", text):
                headers.append(text.strip())
            elif re.match(r"\s*(def|class)\b", text):
                break
    return "\n".join(headers)


def of_call() -> Source:
    """Return the innermost line of the model's code in the current call stack."""
    frame = models_frame(sys._getframe(1))
    return Source() if frame is None else of_frame(frame, frame.f_lineno)


def trace_of_call() -> str | None:
    """Return the line of `of_call` in the format of Python's tracebacks, which `of_node` can read."""
    if (frame := models_frame(sys._getframe(1))) is None:
        return None
    name = frame.f_code.co_filename
    return (
        f'File "{name}", line {frame.f_lineno}, in {frame.f_code.co_name}\n   '
        f" {linecache.getline(name, frame.f_lineno).strip()}"
    )


def models_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the model's code, from `frame` outwards; beyond shardc's commands are typer's."""
    while frame is not None and not _calls(frame.f_code.co_filename, frame.f_code.co_name):
        frame = frame.f_back if not frame.f_globals.get("__name__", "").startswith("shardc.cli.") else None
    return frame


def of_function(function: Any) -> Source:
    """Return where a function is defined; an empty Source if it is not written in Python."""
    function = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    code = getattr(function, "__code__", None)
    if code is None:
        return Source()
    name, line = code.co_filename, code.co_firstlineno
    return Source("", f"{Path(name).name}:{line}", linecache.getline(name, line).strip())


def of_frame(frame: FrameType, line: int) -> Source:
    """Return a line of a frame."""
    name = frame.f_code.co_filename
    return Source("", f"{Path(name).name}:{line}", linecache.getline(name, line).strip())
