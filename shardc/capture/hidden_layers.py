"""Hidden layers: those that are expected to be copies of another one (equal_layers) have no parameters, buffers and
modules while torch exports a model: it makes several objects of each, and walks over all of them dozens of times.

Where the model's own code looks for them, it is traced again, with these layers in sight.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardc.ir import source

_TORCHS = f"{Path(str(torch.__file__)).parent}/nn/"
_EXPORT = str(Path(__file__).with_name("export.py"))
#: What a module holds.
HELD = ("_parameters", "_buffers", "_modules")


class UnlikeError(Exception):
    """Layers that were taken for equal are not: the model is traced whole."""


class HiddenError(UnlikeError):
    """Something looked into hidden layers. paths: those that are to be in sight at the next try."""

    def __init__(self, paths: Iterable[str]) -> None:
        super().__init__("hidden layers are looked at")
        self.paths = frozenset(paths)


class Hidden:
    """The layers of these names. calls: the modules whose calls are in progress; looked_at: why the model is to be
    traced again, if it is (its own code may catch the error).
    """

    def __init__(self, paths: Iterable[str], calls: Sequence[nn.Module]) -> None:
        self.paths, self.calls = frozenset(paths), calls
        self.looked_at: HiddenError | None = None

    def show(self, paths: Iterable[str]) -> HiddenError:
        """The error that has the model traced again with these layers in sight."""
        self.looked_at = self.looked_at or HiddenError(paths)
        return self.looked_at

    def show_all(self) -> None:
        """Raises HiddenError if any layer is hidden."""
        if self.paths:
            raise HiddenError(self.paths)

    def check(self) -> None:
        """Raises HiddenError if anything has looked: the model's code may have caught it."""
        if self.looked_at is not None:
            raise self.looked_at from None

    def look(self, path: str) -> None:
        """Raises HiddenError where the model's code wants to know what this layer holds."""
        if self.calls and _by_model(sys._getframe(2)):
            raise self.show([path])


def _by_model(frame: FrameType | None) -> bool:
    """Is it the model's code that has called torch here, and not export?"""
    while frame is not None and (name := frame.f_code.co_filename) != _EXPORT:
        if source.is_models(name) or (name.startswith(_TORCHS) and frame.f_code.co_name == "forward"):
            return True
        frame = frame.f_back
    return False


class _Nothing(dict[str, Any]):
    """What a hidden layer holds, as long as nobody asks."""

    def __init__(self, hidden: Hidden, path: str) -> None:
        super().__init__()
        self.hidden, self.path = hidden, path


def _asked(name: str) -> Any:
    plain = getattr(dict, name)

    def method(self: _Nothing, *args: Any, **kwargs: Any) -> Any:
        self.hidden.look(self.path)
        return plain(self, *args, **kwargs)

    return method


for _name in (
    *("__getitem__", "__contains__", "__iter__", "__reversed__", "__len__", "__eq__", "__or__", "__ror__"),
    *("keys", "values", "items", "get", "copy", "__setitem__", "__delitem__", "update", "pop", "setdefault"),
):
    setattr(_Nothing, _name, _asked(_name))


@contextmanager
def hidden(layers: Iterable[tuple[str, Sequence[nn.Module]]], calls: Sequence[nn.Module]) -> Iterator[Hidden]:
    """While open, these layers, (name, the modules that it consists of), are hidden. calls: see `Hidden`."""
    layers = list(layers)
    found = Hidden([path for path, _ in layers], calls)
    saved: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
    try:
        for path, modules in layers:
            nothing = _Nothing(found, path)
            for m in modules:
                attributes = m.__dict__
                if not isinstance(attributes["_modules"], _Nothing):  # it is part of a layer that is hidden
                    saved.append((attributes, tuple(attributes[k] for k in HELD)))
                    attributes.update(dict.fromkeys(HELD, nothing))
        yield found
    finally:
        for attributes, held in saved:
            attributes.update(zip(HELD, held, strict=True))
