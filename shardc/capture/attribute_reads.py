"""What forward reads of modules' attributes while it is captured: a program has their values of that moment.

`if self.training:` of one's own    the program has the branch of training; compare_eager.evaluates tells whether
                                    evaluating needs another program
`y * self.scale`                    a later `model.scale = 2.0` would change nothing: it is noticed
                                    (shardc.runtime.checks.user_changes)
`y * self.config.scale`             a later `model.config.scale = 2.0` is a note

A loss that is an object is watched as a config is. Names of Python modules, of functions around forward, and of the
environment are not watched.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType, FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from shardc.capture.side_effects import Changes, identity
from shardc.ir import source
from shardc.ir.source import Source

#: Values that are compared by what they are.
PLAIN = (bool, int, float, str, type(None))
#: In the place of a module's name: a loss that is an object.
LOSS = "<loss>"
#: Torch's own modules that hand `self.training` to ops which `evaluate` switches (compare_eager.SWITCHED): unless their
#: rate of dropout (`p`, or `dropout`) is 0, they do something else in training mode. No op switches what its others do
#: with it: alpha dropouts, instance norms, RReLU, spectral norm.
_SWITCHED = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.RNNBase, nn.MultiheadAttention),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)
#: They ask whether they train to choose a faster way to the same numbers.
_ALIKE = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer)
_WRITTEN_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE: its attributes can be replaced
_OF_EVERY_MODULE = frozenset({*vars(nn.Module), *vars(nn.Module())})
#: What every walk over modules and every call of one reads: nobody asks who.
_OF_TORCH = _OF_EVERY_MODULE - {"training", "__dict__"}


@dataclass
class Reads:
    """training: the lines that read `.training`, or call a module of torch's that does, but for those whose ops are
    switched; own: one of them is of no library, or such a module's; reading: the names of the modules that those read
    it of. values: by module's name the plain attributes that were read, as they were; of_loss: those of a loss that is
    an object. touched: of all that was read, (identity of a module, name of an attribute of its own, or "__dict__"), or
    of an object that one holds: whose it is; again: reads an attribute once more.
    """

    training: dict[str, Source] = field(default_factory=dict)
    own: bool = False
    reading: set[str] = field(default_factory=set)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    of_loss: dict[str, Any] = field(default_factory=dict)
    touched: dict[tuple[int, str], Any] = field(default_factory=dict)

    def again(self, module: nn.Module, name: str) -> None:
        """Note a plain attribute as if forward had read it; no property runs."""
        held = object.__getattribute__(module, "__dict__")
        if name in held or any(type(vars(c).get(name)) in PLAIN for c in type(module).__mro__ if name in vars(c)):
            getattr(module, name)

    def acts_otherwise(self, model: nn.Module) -> bool:
        """May the model compute something else in training mode than in eval mode? Where a library reads
        `self.training`, by the rates of dropout that it reads: most of its reads are about caches and checkpoints.
        """
        rates = (v for values in self.values.values() for n, v in values.items() if "drop" in n)
        return self.own or any(type(v) is float and v > 0 for v in rates) or any(map(_switched, model.modules()))

    def still(self, model: nn.Module) -> tuple[str, ...]:
        """The submodules in eval mode of a model of which other parts train, if they, or what is in them, would compute
        something else in training mode: parts that are frozen (`model.encoder.eval()`).
        """
        if not any(m.training for m in model.modules()):
            return ()
        resting = {name: m for name, m in model.named_modules() if name and not m.training}
        acting = [f"{name}." for name, m in resting.items() if name in self.reading or _switched(m)]
        return tuple(name for name in resting if any(a.startswith(f"{name}.") for a in acting))

    def set_too(self, changes: Changes) -> dict[str, Source]:
        """The numbers that forward reads and then sets to others, with the line that does; they are taken out of
        `values`, as every call of the model changes them.
        """
        found = {}
        for path, values in self.values.items():
            for name in [n for n in values if (f"{path}.{n}" if path else n) in changes.set]:
                full = f"{path}.{name}" if path else name
                if type(values.pop(name)) in (int, float):
                    found[full] = changes.set[full]
        return found


def _switched(m: nn.Module) -> bool:
    """Does one of torch's own modules do something else in training mode, by ops that are switched?"""
    return isinstance(m, _SWITCHED) and getattr(m, "p", getattr(m, "dropout", 1)) != 0


def _torch_reads_its_own(m: nn.Module, frame: FrameType) -> bool:
    """Does the code of one of torch's modules ask whether it trains, to do something that no op switches?"""
    if frame.f_locals.get("self") is not m or source.is_models(frame.f_code.co_filename):
        return False
    return not isinstance(m, (*_SWITCHED, *_ALIKE)) and getattr(m, "p", 1) != 0


@contextmanager
def recorded(model: nn.Module, changes: Changes, loss: Any = None) -> Iterator[Reads]:
    """While open, records what is read of the model's modules, of objects that they hold, such as a config, and of a
    loss that is an object. changes: what forward has written so far, whose values before do not count.
    """
    reads = Reads()
    names = {identity(m): name for name, m in model.named_modules()}
    held_objects = _HeldObjects(reads, changes)
    if (thing := loss_object(loss)) is not None:
        reads.values[LOSS] = reads.of_loss
        held_objects.watch(thing, LOSS, "")

    def read(self: nn.Module, name: str) -> Any:
        value = super(nn.Module, self).__getattribute__(name)
        if name in _OF_TORCH:
            return value
        if name not in _OF_EVERY_MODULE or (
            name == "__dict__" and source.is_models(sys._getframe(1).f_code.co_filename)
        ):
            reads.touched[identity(self), name] = self
        if type(value) in PLAIN and (path := names.get(identity(self))) is not None:
            if name == "training":
                frame = sys._getframe(1)
                torchs = _torch_reads_its_own(self, frame)
                if torchs or source.is_models(frame.f_code.co_filename):
                    place = source.of_call() if torchs else source.of_frame(frame, frame.f_lineno)
                    reads.training.setdefault(place.line or path, place)
                    if torchs or source.is_users(frame.f_code.co_filename):
                        reads.own = True
                        reads.reading.add(path)
            elif name not in _OF_EVERY_MODULE and (f"{path}.{name}" if path else name) not in changes.written:
                held = super(nn.Module, self).__getattribute__("__dict__")
                if name in held or any(vars(c).get(name) is value for c in type(self).__mro__ if name in vars(c)):
                    reads.values.setdefault(path, {}).setdefault(name, value)
        elif identity(self) in names and name not in _OF_EVERY_MODULE:
            held_objects.watch(value, names[identity(self)], name)
        return value

    with held_objects.patches, mock.patch.object(nn.Module, "__getattribute__", read):
        yield reads


def loss_object(loss: Any) -> Any:
    """Return the object whose settings a loss may read: itself, or that of a method; None for a plain function."""
    thing = getattr(loss, "__self__", loss)
    return thing if hasattr(thing, "__dict__") and not isinstance(thing, (FunctionType, ModuleType)) else None


class _HeldObjects:
    """Reads of plain attributes of the objects that modules hold. What forward sets on them does not count."""

    def __init__(self, reads: Reads, changes: Changes) -> None:
        self.patches = ExitStack()
        self._reads, self._changes = reads, changes
        self._names: dict[int, tuple[str, str]] = {}  # of an object: module, attribute
        self._alive: list[Any] = []  # so that no two objects have one id
        self._classes: set[type] = set()
        self._set: set[tuple[int, str]] = set()

    def watch(self, value: Any, path: str, name: str) -> None:
        """value: what was read of a module. The first name that it has is used in notes."""
        kind = type(value)
        if id(value) in self._names or not _has_own_attributes(value, called=path == LOSS):
            return
        self._names[id(value)] = path, name
        self._alive.append(value)
        if kind not in self._classes:
            self._classes.add(kind)
            self._patch(kind)

    def _patch(self, kind: type) -> None:
        get: Any = kind.__getattribute__  # the class's functions, not bound to an object
        put: Any = kind.__setattr__

        def read(this: Any, name: str) -> Any:
            value = get(this, name)
            known = self._names.get(id(this))
            if known is not None and type(value) in PLAIN and not name.startswith("__"):
                path, held = known
                self._reads.touched[id(this), name] = this
                if (id(this), name) not in self._set:
                    self._reads.values.setdefault(path, {}).setdefault(f"{held}.{name}".lstrip("."), value)
            return value

        def write(this: Any, name: str, value: Any) -> None:
            known = self._names.get(id(this))
            if known is not None:
                path, held = known
                self._changes.assigned += 1
                self._set.add((id(this), name))
                self._reads.values.get(path, {}).pop(f"{held}.{name}".lstrip("."), None)
            put(this, name, value)

        with contextlib.suppress(TypeError, AttributeError):  # a metaclass may refuse: the class is not watched
            self.patches.enter_context(mock.patch.object(kind, "__setattr__", write))
            self.patches.enter_context(mock.patch.object(kind, "__getattribute__", read))


def _has_own_attributes(value: Any, *, called: bool) -> bool:
    """Is it an object of a class written in Python, other than torch's, that holds settings: no function (unless it is
    the loss), module, class or container?
    """
    kind = type(value)
    return (
        bool(kind.__flags__ & _WRITTEN_IN_PYTHON)
        and hasattr(value, "__dict__")
        and (called or not callable(value))
        and not isinstance(value, (list, tuple, dict, set, frozenset, str, torch.Tensor, Enum, ModuleType))
        and not kind.__module__.startswith("torch.")
    )
