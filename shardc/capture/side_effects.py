"""Detect and undo side effects of forward: a program runs Python once, at capture.

np.random.rand(), random.random()   refused: every step would use the numbers that were drawn while tracing
self.count += 1; y * self.count     every step would see the first value: undone, and refused or noted where it shows
loss * temperature                  a parameter that is not the model's: a constant, noted
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir.source import Source
from shardc.torch_private import FakeTensor

_HELD = ("_parameters", "_buffers", "_modules")


# --- attributes of modules --------------------------------------------------------------------------------------------


@dataclass
class Changes:
    """Attributes that a forward set, by their full name, and where.

    created: parameters, buffers and modules that it added. written: all that it assigned so far, even an equal value;
    numbers: those that were a number; assigned: how often, also to objects that modules hold.
    """

    written: set[str] = field(default_factory=set)
    numbers: set[str] = field(default_factory=set)
    set: dict[str, Source] = field(default_factory=dict)
    created: dict[str, Source] = field(default_factory=dict)
    assigned: int = 0

    def refuse_created(self) -> None:
        """Raise ShardcError for parameters, buffers and modules that exist only after the first forward."""
        for name, place in self.created.items():
            fault = f"the forward pass creates {name!r}, which does not exist before the first call"
            raise ShardcError(
                fault, where=place.line, fix="create it in __init__, or run the model once before you compile it"
            )


def identity(module: nn.Module) -> int:
    """Return the id of a module's `__dict__`, which copies that export makes of a repeated module share."""
    return id(object.__getattribute__(module, "__dict__"))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[Changes]:
    """Record what forward sets on the model's modules inside the block, and restore everything after it."""
    modules = list(model.named_modules())
    names = {identity(m): name for name, m in modules}
    before: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = [  # with copies of the lists, dicts and sets
        (m, dict(m.__dict__), {n: x.copy() for n, x in m.__dict__.items() if isinstance(x, (list, dict, set))})
        for _, m in modules
    ]
    lines: dict[tuple[int, str], Source] = {}
    original = nn.Module.__setattr__
    changes = Changes()

    def setattr_(self: nn.Module, name: str, value: Any) -> None:
        old = self.__dict__.get("_buffers", {}).get(name)
        if (
            isinstance(value, FakeTensor)
            and isinstance(old, FakeTensor)
            and (value.shape, value.dtype) == (old.shape, old.dtype)
        ):
            old.copy_(value)  # a traced `self.mean = 0.9 * self.mean + m`, which export would drop
            return
        place = lines[identity(self), name] = source.of_call()
        registered = any(name in self.__dict__.get(h, ()) for h in _HELD)
        if identity(self) in names:
            full = _join(names[identity(self)], name)
            changes.assigned += 1
            changes.written.add(full)
            if type(value) in (int, float):
                changes.numbers.add(full)
            if not registered and self.__dict__.get(name, changes) is not value:  # export itself may set it back
                changes.set[full] = place
        original(self, name, value)

    try:
        with mock.patch.object(nn.Module, "__setattr__", setattr_):
            yield changes
    finally:
        for module, attributes, contents in before:
            path = names[identity(module)]
            for name in module.__dict__.keys() | attributes.keys():
                inside = contents.get(name)
                now, then = module.__dict__.get(name, changes), attributes.get(name, changes)
                if name in _HELD and inside is not None:
                    for key in module.__dict__[name].keys() - inside.keys():
                        changes.created[_join(path, key)] = lines.get((identity(module), key), Source())
                elif not (
                    _same(now, then) if inside is None else type(now) is type(inside) and _same_items(now, inside)
                ):
                    changes.set.setdefault(_join(path, name), lines.get((identity(module), name), Source()))
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, inside in contents.items():
                if not _same_items(attributes[name], inside):
                    _refill(attributes[name], inside)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _same_items(now: Any, then: Any) -> bool:
    if not now and not then:
        return True
    if isinstance(now, set):
        return {id(x) for x in now} == {id(x) for x in then}
    one, other = (list(x.items()) if isinstance(x, Mapping) else list(enumerate(x)) for x in (now, then))
    return len(one) == len(other) and all(k == j and _same(x, y) for (k, x), (j, y) in zip(one, other, strict=True))


def _same(now: Any, then: Any) -> bool:
    """Return whether it is one object, or an equal plain value: assigning an equal value is no change."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, (list, tuple, dict)):
        return _same_items(now, then)
    return isinstance(now, (str, int, float, bool)) and now == then


def _refill(container: Any, items: Any) -> None:
    container.clear()
    container.extend(items) if isinstance(container, list) else container.update(items)


# --- random numbers that are not torch's ------------------------------------------------------------------------------


def random_state() -> tuple[Any, ...]:
    """Return the state of Python's and numpy's global generators."""
    numpy = sys.modules.get("numpy")
    legacy = () if numpy is None else numpy.random.get_state()
    return random.getstate(), *(x.tobytes() if hasattr(x, "tobytes") else x for x in legacy)


def line_that_changes(state: Callable[[], Any], run: Callable[[], Any]) -> tuple[Source, str] | None:
    """Find the user's innermost line, and its function, that changes `state()` while `run()` runs.

    Return None if only functions made by CHECKERS change it. Exceptions of `run` are ignored.
    """
    lines: list[tuple[Source, str]] = []
    known, active, checked = state(), (sys._getframe(), 0), False  # the line that runs now

    def watched(frame: FrameType) -> bool:
        return source.is_models(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(CHECKERS)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal known, active, checked
        if not watched(frame):
            return None
        if (now := state()) != known:
            known, (changed, line) = now, active
            if changed.f_code.co_filename.startswith(CHECKERS):
                checked = True
            elif watched(changed):
                lines.append((source.of_frame(changed, line), changed.f_code.co_name))
        caller: FrameType | None = frame.f_back if event == "return" else frame
        while caller is not None and not watched(caller):
            caller = caller.f_back
        active = (caller, caller.f_lineno) if caller is not None else active
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except Exception:  # the user's code, which has run before: only the line counts
        pass
    finally:
        sys.settrace(old)
    return lines[0] if lines else None if checked else (Source(), "")


#: Files of functions that check types of arguments, and draw which item of a list they look at (beartype).
CHECKERS = "<@beartype"
#: Functions of libraries that draw with numpy -> the way out.
KNOWN = {
    "_compute_mask_indices": (
        "config.apply_spec_augment = False (SpecAugment's masks), or give the masks with the batch (mask_time_indices)"
    )
}


def refuse_random(place: Source, function: str) -> ShardcError:
    """Return the error for a forward that draws random numbers from Python or numpy."""
    code = f" ({place.shown})" if place.code else ""
    fix = KNOWN.get(
        function,
        "draw with torch (torch.rand, torch.randint, torch.randn), or in the data, and pass it in with the batch",
    )
    fault = f"the model draws random numbers from Python or numpy: every step would use the same{code}"
    return ShardcError(fault, where=place.line, fix=fix)


# --- parameters that are not the model's ------------------------------------------------------------------------------


class ForeignParameters(TorchFunctionMode):
    """A mode for tracing that finds parameters which are not the model's: real ones, as the model's own are fake.

    A program has them (a temperature of the loss) as constants, and nothing trains them: a note says so. The model's
    own, if forward holds them outside of their module (a function's closure), are refused: they would stay untrained.
    own: the names of the model's real parameters, by id. found: id -> the tensor, so that no other one gets its id, and
    the first line that uses it where gradients count.
    """

    def __init__(self, own: Mapping[int, str]) -> None:
        super().__init__()
        self.own = own
        self.found: dict[int, tuple[Tensor, str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and getattr(func, "__name__", "") not in ("__get__", "__set__", "detach"):
            for x in (*args, *kwargs.values()):
                if type(x) in (nn.Parameter, Tensor) and x.requires_grad and x.is_leaf:
                    if (name := self.own.get(id(x))) is not None:
                        raise source.of_call().error(
                            f"forward reads the parameter {name!r} from an object other than its module, such as a"
                            " closure: a program would use its first value and not train it",
                            "read it from the module at each use: self.weight in the function, not weight ="
                            " self.weight before it",
                        )
                    self.found.setdefault(id(x), (x, source.of_call().line))
        return func(*args, **kwargs)

    def notes(self) -> tuple[str, ...]:
        """Return one note for each line, with the number of parameters."""
        lines: dict[str, list[Tensor]] = {}
        for x, line in self.found.values():
            lines.setdefault(line, []).append(x)
        return tuple(
            f"{line}: {_describe(every)} not a parameter of the compiled model: the program keeps it as a constant and "
            "does not train it. To train it, make it a part of the model; else call requires_grad_(False)"
            for line, every in lines.items()
        )


def _describe(every: list[Tensor]) -> str:
    shapes = ", ".join(str(list(x.shape)) for x in every[:3]) + (", ..." if len(every) > 3 else "")
    if len(every) == 1:
        return f"a tensor of shape {shapes} requires a gradient and is"
    return f"{len(every)} tensors of shapes {shapes} require gradients, and each is"
