"""Record the modules' attributes that forward reads during capture: a program keeps these values.

`if self.training:` in the model    the program has the branch of training; compare_eager checks whether evaluating
                                    needs another program
`y * self.scale`                    a later `model.scale = 2.0` would change nothing: it is detected
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

#: Types that are compared by value.
PLAIN = (bool, int, float, str, type(None))
#: Instead of a module's name, for a loss that is an object.
LOSS = "<loss>"
#: Torch's modules that pass `self.training` to ops which `evaluate` switches (compare_eager.SWITCHED): unless their
#: dropout rate (`p`, or `dropout`) is 0, they differ in training mode. No op switches what the other modules do
#: with it: alpha dropouts, instance norms, RReLU, spectral norm.
_SWITCHED = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.RNNBase, nn.MultiheadAttention),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)
#: They read `training` only to choose a faster way to the same numbers.
_ALIKE = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer)
_WRITTEN_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE: its attributes can be replaced
_OF_EVERY_MODULE = frozenset({*vars(nn.Module), *vars(nn.Module())})
#: Attributes that every walk over modules and every call reads: not recorded.
_OF_TORCH = _OF_EVERY_MODULE - {"training", "__dict__"}


@dataclass
class Reads:
    """What forward read.

    training: lines that read `.training`, or call a torch module that does, except modules whose ops are switched; own:
    one of these lines is in no library, or in such a module; reading: modules whose `.training` those read. values:
    module name -> attributes that were read, with their values; of_loss: those of a loss object. touched: everything
    that was read: (id of a module or held object, attribute or "__dict__") -> its owner. missing: what a module did not
    have when it was read: `getattr(self, "count", 0)`.
    """

    training: dict[str, Source] = field(default_factory=dict)
    own: bool = False
    reading: set[str] = field(default_factory=set)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    of_loss: dict[str, Any] = field(default_factory=dict)
    touched: dict[tuple[int, str], Any] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)

    def again(self, module: nn.Module, name: str) -> None:
        """Record a plain attribute as if forward had read it; no property runs."""
        attributes = object.__getattribute__(module, "__dict__")
        if name in attributes or any(type(vars(c).get(name)) in PLAIN for c in type(module).__mro__ if name in vars(c)):
            getattr(module, name)

    def acts_otherwise(self, model: nn.Module) -> bool:
        """Return whether the model may compute something else in training mode than in eval mode.

        Where only a library reads `self.training`, dropout rates decide: most such reads are about caches.
        """
        rates = (v for values in self.values.values() for n, v in values.items() if "drop" in n)
        return self.own or any(type(v) is float and v > 0 for v in rates) or any(map(_switched, model.modules()))

    def still(self, model: nn.Module) -> tuple[str, ...]:
        """Return the frozen parts: eval-mode submodules of a training model that differ in training mode.

        Example: `model.encoder.eval()`. A part also counts if a module inside it would differ.
        """
        if not any(m.training for m in model.modules()):
            return ()
        resting = {name: m for name, m in model.named_modules() if name and not m.training}
        acting = [f"{name}." for name, m in resting.items() if name in self.reading or _switched(m)]
        return tuple(name for name in resting if any(a.startswith(f"{name}.") for a in acting))

    def set_too(self, changes: Changes) -> dict[str, Source]:
        """Return the numbers that forward reads and then changes, with the line; remove these from `values`."""
        sources = {name: changes.set[name] for name in self.missing & changes.numbers & changes.set.keys()}
        for path, values in self.values.items():
            for name in [n for n in values if (f"{path}.{n}" if path else n) in changes.set]:
                full = f"{path}.{name}" if path else name
                if type(values.pop(name)) in (int, float):
                    sources[full] = changes.set[full]
        return sources


def _switched(m: nn.Module) -> bool:
    """Return whether a torch module differs in training mode through ops that are switched."""
    return isinstance(m, _SWITCHED) and getattr(m, "p", getattr(m, "dropout", 1)) != 0


def _torch_reads_its_own(m: nn.Module, frame: FrameType) -> bool:
    """Return whether a torch module's code reads `.training` for something that no op switches."""
    if frame.f_locals.get("self") is not m or source.is_models(frame.f_code.co_filename):
        return False
    return not isinstance(m, (*_SWITCHED, *_ALIKE)) and getattr(m, "p", 1) != 0


@contextmanager
def recorded(model: nn.Module, changes: Changes, loss: Any = None) -> Iterator[Reads]:
    """Record, inside the block, what is read of modules, of objects they hold (a config), and of the loss.

    changes: what forward has written so far; earlier values of those do not count.
    """
    reads = Reads()
    names = {identity(m): name for name, m in model.named_modules()}
    held_objects = _HeldObjects(reads, changes)
    if (owner := loss_object(loss)) is not None:
        reads.values[LOSS] = reads.of_loss
        held_objects.watch(owner, LOSS, "")

    def read(self: nn.Module, name: str) -> Any:
        try:
            value = super(nn.Module, self).__getattribute__(name)
        except AttributeError:
            if (path := names.get(identity(self))) is not None:
                reads.missing.add(f"{path}.{name}" if path else name)
            raise
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
                attributes = super(nn.Module, self).__getattribute__("__dict__")
                if name in attributes or any(vars(c).get(name) is value for c in type(self).__mro__ if name in vars(c)):
                    reads.values.setdefault(path, {}).setdefault(name, value)
        elif identity(self) in names and name not in _OF_EVERY_MODULE:
            held_objects.watch(value, names[identity(self)], name)
        return value

    with held_objects.patches, mock.patch.object(nn.Module, "__getattribute__", read):
        yield reads


def loss_object(loss: Any) -> Any:
    """Return the object whose settings a loss may read, such as a method's object; None for a function."""
    owner = getattr(loss, "__self__", loss)
    return owner if hasattr(owner, "__dict__") and not isinstance(owner, (FunctionType, ModuleType)) else None


class _HeldObjects:
    """Records reads of plain attributes of objects that modules hold, except those that forward sets."""

    def __init__(self, reads: Reads, changes: Changes) -> None:
        self.patches = ExitStack()
        self._reads, self._changes = reads, changes
        #: {id: (object, module, attribute)}; objects stay alive, so that no two have one id.
        self._watched: dict[int, tuple[Any, str, str]] = {}
        self._classes: set[type] = set()
        self._set: set[tuple[int, str]] = set()

    def watch(self, value: Any, path: str, name: str) -> None:
        """Watch an object that was read of a module. Notes use the first name that it has."""
        kind = type(value)
        if id(value) in self._watched or not _has_own_attributes(value, called=path == LOSS):
            return
        self._watched[id(value)] = value, path, f"{name}." if name else ""
        if kind not in self._classes:
            self._classes.add(kind)
            self._patch(kind)

    def _patch(self, kind: type) -> None:
        get: Any = kind.__getattribute__  # the class's functions, not bound to an object
        put: Any = kind.__setattr__

        def read(this: Any, name: str) -> Any:
            value = get(this, name)
            known = self._watched.get(id(this))
            if known is not None and type(value) in PLAIN and not name.startswith("__"):
                _, path, prefix = known
                self._reads.touched[id(this), name] = this
                if (id(this), name) not in self._set:
                    self._reads.values.setdefault(path, {}).setdefault(f"{prefix}{name}", value)
            return value

        def write(this: Any, name: str, value: Any) -> None:
            known = self._watched.get(id(this))
            if known is not None:
                _, path, prefix = known
                self._changes.assigned += 1
                self._set.add((id(this), name))
                self._reads.values.get(path, {}).pop(f"{prefix}{name}", None)
            put(this, name, value)

        with contextlib.suppress(TypeError, AttributeError):  # a metaclass may refuse: the class is not watched
            self.patches.enter_context(mock.patch.object(kind, "__setattr__", write))
            self.patches.enter_context(mock.patch.object(kind, "__getattribute__", read))


def _has_own_attributes(value: Any, *, called: bool) -> bool:
    """Return whether it is an object with settings, of a Python class that is not torch's.

    Functions (unless it is the loss), modules, classes and containers do not count.
    """
    kind = type(value)
    return (
        bool(kind.__flags__ & _WRITTEN_IN_PYTHON)
        and hasattr(value, "__dict__")
        and (called or not callable(value))
        and not isinstance(value, (list, tuple, dict, set, frozenset, str, torch.Tensor, Enum, ModuleType))
        and not kind.__module__.startswith("torch.")
    )
