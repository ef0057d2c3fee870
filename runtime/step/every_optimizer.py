"""Who is told before each step of every optimizer of the process: a module is not given its optimizer, as an engine is.

One hook of torch's for all, made when there is somebody to tell. It only looks, and tells no one while nobody lives.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


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
            tell = untraced(_tell)  # steps that users compile tell, too
            tell.looks_only = True  # an engine's step may be done in parts (shardc.torch_private.step_hooks)
            register_optimizer_step_pre_hook(tell)


def observers() -> list[Observer]:
    return [x for ref in _observers if (x := ref()) is not None]


def _tell(optimizer: Optimizer, *_: Any) -> None:
    for observer in observers():
        observer.stepping(optimizer)
