"""A pre-step hook of every optimizer of the process: a module is not given its optimizer, as an engine is.

One hook of torch's for all, made with the first observer. It only looks, and does nothing while no observer lives.
While an optimizer of torch's own steps, parts are the plain tensors that they are (shardc.runtime.checks.tensor_parts):
it was tried on parts before, and looks up a parameter some 20 times.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardc.runtime.checks import tensor_parts


class Observer(Protocol):
    def stepping(self, optimizer: Optimizer) -> None:
        """This optimizer is about to step. It may be one that has nothing to do with the observer."""


_observers: tuple[weakref.ref[Observer], ...] = ()  # replaced, never changed: ranks may be threads
_registering = threading.Lock()
_hooked = False


def observe(observer: Observer) -> None:
    """From now on, and as long as somebody else refers to it."""
    global _observers, _hooked
    with _registering:
        _observers = (*(ref for ref in _observers if ref() is not None), weakref.ref(observer))
        if not _hooked:
            _hooked = True
            untraced: Any = torch.compiler.disable
            before, after = untraced(_before), untraced(_after)  # steps that users compile call them, too
            # an engine's step may be done in parts (shardc.torch_private.step_hooks)
            before.looks_only = after.looks_only = True
            register_optimizer_step_pre_hook(before)
            register_optimizer_step_post_hook(after)


def observers() -> list[Observer]:
    return [x for ref in _observers if (x := ref()) is not None]


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    found = observers()
    for observer in found:
        observer.stepping(optimizer)
    without_closure = len(args) + len(kwargs) <= 1  # the optimizer itself
    if found and without_closure and type(optimizer).step.__module__.startswith("torch.optim."):
        tensor_parts.begin_plain()


def _after(*_: Any) -> None:
    tensor_parts.end_plain()
