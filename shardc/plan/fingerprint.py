"""A digest of all that decides what a model computes on an example batch, without running it: equal digests, equal
plans.

    modules       classes, numbers, strings and settings in them, shapes and dtypes of parameters and buffers, ties
    code          of the user's classes, of what they reach, and the values of globals in their files; of installed
                  packages the file of each class
    the rest      the batch's sizes, the loss function, versions of torch and Python, shardc's own source

What cannot be told, such as a function that holds an object of a kind that nobody knows, raises `Unknown`: such a model
is not looked up.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardc.artifact import model_source
from shardc.ir.source import is_models, is_users
from shardc.plan.installed import shardc_source
from shardc.torch_private import pytree

#: What an object was hashed to when it was made, as transformers' generation_config keeps it: another number in every
#: process.
_HASHES = ("_original_object_hash",)
#: What holds a module's parts, which are described by themselves, and what torch keeps for hooks.
_PARTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
#: Numbers of a constant tensor that are looked at.
NUMBERS = 1 << 20


class Unknown(Exception):
    """Something whose meaning for the model cannot be told."""


def fingerprint(model: nn.Module, batch: Any, loss: Any) -> tuple[str, frozenset[str]]:
    """The digest, and the paths of the files that decided it. Raises Unknown."""
    found = _Description()
    found.module(model)
    found.function(loss)
    leaves, tree = pytree.tree_flatten(batch)
    found.say("batch", str(tree))
    for x in leaves:
        if isinstance(x, Tensor):
            found.say(tuple(x.shape), x.dtype)
        else:
            found.value(x)
    found.sources(model, loss)
    found.say(torch.__version__, sys.version_info[:2], torch.get_default_dtype(), shardc_source())
    return found.digest.hexdigest(), frozenset(found.files)


class _Description:
    """Adds what it is told to a digest. Objects are followed once; later they are named by their number."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no other object gets the address of one that was seen
        self.files: set[str] = set()

    def say(self, *things: Any) -> None:
        self.digest.update(repr(things).encode() + b"\n")

    def module(self, m: nn.Module) -> None:
        if self._again(m):
            return
        self._class(type(m))
        for name, value in sorted(vars(m).items()):
            if name in _PARTS:
                continue
            if isinstance(value, dict) and not value:
                continue  # no hooks
            self.say(name)
            self.value(value)
        for name, x in (*m._parameters.items(), *m._buffers.items()):
            self.say(name, isinstance(x, nn.Parameter))
            if x is not None and not self._again(x):
                self.say(tuple(x.shape), x.dtype, x.requires_grad)
        for name, child in m._modules.items():
            self.say("module", name)
            if child is not None:
                self.module(child)

    def value(self, x: Any) -> None:
        """Something that a module, a configuration or a closure holds."""
        if isinstance(x, _PLAIN):
            self.say(type(x).__qualname__, x)
        elif isinstance(x, nn.Module):
            self.module(x)
        elif self._again(x):
            return
        elif isinstance(x, Tensor):
            self._tensor(x)
        elif isinstance(x, (list, tuple)):
            self.say(type(x).__qualname__, len(x))
            for each in x:
                self.value(each)
        elif isinstance(x, (set, frozenset)):
            self.say(type(x).__qualname__, sorted(map(repr, x)))
            if not all(isinstance(each, _PLAIN) for each in x):
                raise Unknown(repr(type(x)))
        elif isinstance(x, dict):
            self.say(type(x).__qualname__, len(x))
            for key, each in x.items():
                self.value(key)
                self.value(each)
        elif isinstance(x, type):
            self._class(x)
        elif (callable(x) and not hasattr(x, "__dict__")) or isinstance(
            x, (types.FunctionType, types.MethodType, functools.partial)
        ):
            self.function(x)
        elif type(x).__module__.startswith("torch.") or not hasattr(x, "__dict__"):
            raise Unknown(repr(type(x)))
        else:
            self._class(type(x))
            for name, each in sorted(vars(x).items()):
                if name not in _HASHES:
                    self.say(name)
                    self.value(each)

    def function(self, f: Any) -> None:
        if isinstance(f, functools.partial):
            self.say("partial")
            for each in (f.func, f.args, f.keywords):
                self.value(each)
        elif isinstance(f, types.MethodType):
            self.say(f.__func__.__qualname__)
            self.value(f.__self__)
            self.function(f.__func__)
        elif isinstance(f, types.FunctionType):
            self._function(f)
        elif isinstance(f, (types.BuiltinFunctionType, types.BuiltinMethodType, torch._ops.OpOverload)):
            self.say(str(getattr(f, "__module__", "")), getattr(f, "__qualname__", str(f)))
        elif f is None or isinstance(f, nn.Module):
            self.value(f)
        else:
            raise Unknown(repr(type(f)))

    def _function(self, f: types.FunctionType) -> None:
        if self._again(f):
            return
        self.say(f.__module__, f.__qualname__)
        code = f.__code__
        if not is_models(code.co_filename):
            return  # torch's, shardc's, Python's: by their versions
        self._code(code)
        for each in (f.__defaults__, f.__kwdefaults__):
            self.value(each)
        for cell in f.__closure__ or ():
            try:
                self.value(cell.cell_contents)
            except ValueError:  # it is empty
                self.say("empty")

    def _code(self, code: types.CodeType) -> None:
        self.say(code.co_code, code.co_names, code.co_varnames)
        for each in code.co_consts:
            if isinstance(each, types.CodeType):
                self._code(each)
            else:
                self.say(sorted(map(repr, each)) if isinstance(each, frozenset) else each)

    def _class(self, cls: type) -> None:
        if self._again(cls):
            return
        for each in cls.__mro__:
            self.say(each.__module__, each.__qualname__)
            file = getattr(sys.modules.get(each.__module__), "__file__", None)
            if file is None or not is_models(file):
                if file is None and each.__module__ not in sys.builtin_module_names:
                    raise Unknown(each.__module__)
                continue
            self._file(file)
            if is_users(file):  # what was set on it since
                self.say(sorted((k, x) for k, x in vars(each).items() if isinstance(x, (int, float, str))))
            if "<locals>" in each.__qualname__:  # it may hold what a function was given
                for name, x in sorted(vars(each).items()):
                    x = getattr(x, "__func__", x)
                    if isinstance(x, types.FunctionType):
                        self.say(name)
                        self._function(x)

    def _file(self, file: str) -> None:
        """All of a file that a class of the model's is in, and the plain values in it now."""
        if file in self.files:
            return
        self.files.add(file)
        self.digest.update(Path(file).read_bytes())
        if is_users(file):
            for module in [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file]:
                self.say(sorted((k, x) for k, x in vars(module).items() if isinstance(x, (int, float, str, tuple))))

    def sources(self, model: nn.Module, loss: Any) -> None:
        """The files of the user's that the model's and the loss's code reaches."""
        found = model_source.origins(model, loss)
        if not found:
            return
        main = found[0][0].resolve()
        for relative in model_source.digests(main, found):
            self._file(str((main.parent / relative).resolve() if relative else main))

    def _tensor(self, x: Tensor) -> None:
        self.say(tuple(x.shape), x.dtype, x.device.type)
        if x.device.type != "meta":
            if x.numel() > NUMBERS:
                raise Unknown("a large constant")
            self.digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def _again(self, x: Any) -> bool:
        """Whether it was described before: then it is named by its number."""
        if (number := self._seen.get(id(x))) is not None:
            self.say("again", number)
            return True
        self._seen[id(x)] = len(self._seen)
        self._kept.append(x)
        return False
