"""Where in the model's code something came from: of a traced node, of a raised exception, of the call being made.

The model's code is any outside of torch and shardc themselves: libraries such as transformers define models, too. What
is no installed package's is the user's own.
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
#: Of a line of the model so many characters are shown in a message.
_SHOWN = 100


@dataclass(frozen=True)
class Source:
    """Where an op came from. module: FQN in the user's model ("" = the root); line: "file.py:31"; code: that line's
    text.

    calls: "FQN@n" for every module on the way that had been called n times before (not in the program's text).
    """

    module: str = ""
    line: str = ""
    code: str = ""
    calls: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return " ".join(p for p in (self.module, f"({self.line})" if self.line else "") if p)

    @property
    def shown(self) -> str:
        """The line's text for a message: the beginning of a long one."""
        return self.code if len(self.code) <= _SHOWN else f"{self.code[: _SHOWN - 4].rstrip()} ..."


@cache
def is_models(filename: str) -> bool:
    """Is this file neither torch's, nor shardc's, nor the interpreter's own?"""
    if filename.startswith("<") or filename.startswith(_OURS):
        return False
    return not (filename.startswith(_STDLIB) and _PACKAGES.isdisjoint(Path(filename).parts))


@cache
def is_users(filename: str) -> bool:
    """Is it also of no installed package?"""
    return is_models(filename) and _PACKAGES.isdisjoint(Path(filename).parts)


def _calls(filename: str, function: str) -> bool:
    """Does this frame call ops for the model? A mode or subclass of tensors that looks at each call of an op is the
    user's too, but stands between the line and the op."""
    return function not in _LOOK_AT_CALLS and is_models(filename)


def of_node(node: fx.Node, prefix: str = "model") -> Source:
    """Module and line of an exported node. prefix: name under which the capture's wrapper module holds the user's
    model.
    """
    module, calls = "", tuple[str, ...]()
    stack = node.meta.get("nn_module_stack")
    if stack:
        module = _bare(next(reversed(stack.values())), prefix)
        calls = tuple(f"{_bare(v, prefix)}@{k.rpartition('@')[2]}" for k, v in stack.items() if "@" in str(k))
    return replace(_quoted(node.meta.get("stack_trace") or ""), module=module, calls=calls)


@functools.lru_cache(maxsize=4096)  # equal layers have equal texts
def _quoted(text: str) -> Source:
    """The innermost of the model's lines in a text, such as a message of torch's, that quotes them as Python does."""
    for filename, line, function, code in reversed(_FRAME.findall(text)):
        if _calls(filename, function):
            return Source("", f"{Path(filename).name}:{line}", code.strip())
    return Source()


def _bare(entry: tuple[Any, ...], prefix: str) -> str:
    """The model's name of a module on the stack."""
    return str(entry[0]).partition("@")[0].removeprefix(prefix).removeprefix(".")


def where(source: Source) -> str:
    """The place for an error: "h.0.attn (gpt.py:31)", or "gpt.py:31" in the root module."""
    return str(source) if source.module else source.line


def place(node: fx.Node) -> str:
    """The place of an exported node, for an error."""
    return where(of_node(node))


def of_exception(error: BaseException) -> Source:
    """The innermost user's line on the way to `error`, or to what caused it."""
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
    """Did torch's code raise this? Its C++ code, whose frames Python does not see, raises RuntimeErrors."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    name = tb.tb_frame.f_code.co_filename if tb is not None else ""
    return name.startswith(_OURS[0]) or isinstance(error, RuntimeError)  # of which NotImplementedError is one


def _in_package(filename: str) -> str:
    """peft/tuners/loha/layer.py of an installed package; the name alone of a file of the user's."""
    parts = Path(filename).parts
    begin = max((i + 1 for i, part in enumerate(parts) if part in _PACKAGES), default=len(parts) - 1)
    return "/".join(parts[begin:])


def loops_of_node(node: fx.Node) -> str:
    """The headers of the `for` statements around the line of an exported node, innermost first."""
    for filename, line, function, _ in reversed(_FRAME.findall(node.meta.get("stack_trace") or "")):
        if _calls(filename, function):
            return _loops(filename, int(line))
    return ""


def loops_of_exception(error: BaseException) -> str:
    """The headers of the `for` statements around the lines of the user's on the way to an error, innermost first."""
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
    """The innermost user's line of the calls now in progress."""
    frame = _users_frame()
    return Source() if frame is None else of_frame(frame, frame.f_lineno)


def trace_of_call() -> str | None:
    """The same as Python prints it, which `of_node` reads again."""
    if (frame := _users_frame()) is None:
        return None
    name = frame.f_code.co_filename
    return (
        f'File "{name}", line {frame.f_lineno}, in {frame.f_code.co_name}\n   '
        f" {linecache.getline(name, frame.f_lineno).strip()}"
    )


def _users_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not _calls(frame.f_code.co_filename, frame.f_code.co_name):
        frame = frame.f_back
    return frame


def of_function(function: Any) -> Source:
    """Where a function is defined; nowhere, if it is not Python's."""
    function = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    code = getattr(function, "__code__", None)
    if code is None:
        return Source()
    name, line = code.co_filename, code.co_firstlineno
    return Source("", f"{Path(name).name}:{line}", linecache.getline(name, line).strip())


def of_frame(frame: FrameType, line: int) -> Source:
    """A line of a frame."""
    name = frame.f_code.co_filename
    return Source("", f"{Path(name).name}:{line}", linecache.getline(name, line).strip())
