"""Hook the steps of all optimizers of the process, as a module does not know its own.

torch has one hook for all, set with the first observer. It changes no step, and does nothing while no observer lives.
While one of torch's optimizers steps, parts act as plain tensors (shardc.runtime.checks.tensor_parts): the optimizer
was tried on parts before, and a step looks up a parameter some 20 times.
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
        """Observe an optimizer that is about to step. It may have nothing to do with the observer."""


_observers: tuple[weakref.ref[Observer], ...] = ()  # replaced, never changed: ranks may be threads
_registering = threading.Lock()
_hooked = False


def observe(observer: Observer) -> None:
    """Add an observer. It stays as long as something else refers to it."""
    global _observers, _hooked
    with _registering:
        _observers = (*(ref for ref in _observers if ref() is not None), weakref.ref(observer))
        if not _hooked:
            _hooked = True
            untraced: Any = torch.compiler.disable
            before, after = untraced(_before), untraced(_after)  # compiled steps call them, too
            # so an engine may still step in parts (shardc.torch_private.step_hooks)
            before.looks_only = after.looks_only = True
            register_optimizer_step_pre_hook(before)
            register_optimizer_step_post_hook(after)


def observers() -> list[Observer]:
    return [x for ref in _observers if (x := ref()) is not None]


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    registered = observers()
    for observer in registered:
        observer.stepping(optimizer)
    without_closure = len(args) + len(kwargs) <= 1  # the optimizer itself
    if registered and without_closure and type(optimizer).step.__module__.startswith("torch.optim."):
        tensor_parts.begin_plain()


def _after(*_: Any) -> None:
    tensor_parts.end_plain()
