"""Observe the steps of all optimizers of the process, and refuse those that an engine takes itself.

A module does not know its optimizer, so torch's one hook for all is set with the first observer. It changes no step,
and does nothing while no observer lives. While one of torch's optimizers steps, parts act as plain tensors
(shardc.runtime.checks.tensor_parts): the optimizer was tried on parts before, and a step looks up a parameter some 20
times.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardc.errors import ShardcError
from shardc.runtime.checks import tensor_parts
from shardc.runtime.mesh.step_context import changed
from shardc.runtime.zero.several_optimizers import members_of


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


class SteppedOnce:
    """An engine's optimizer and schedulers, which the engine steps: a line of a plain loop would update twice.

    Step the optimizer inside `engine_step()`; call `check` before a step, and `note` after the engine stepped or
    loaded its schedulers. The user's own scheduler of the same optimizer is not the engine's, and is not checked.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._members = members_of(optimizer) if optimizer is not None else ()
        self._allowed = False
        self._schedulers: tuple[LRScheduler, ...] = ()
        self._counts: tuple[int, ...] = ()
        for member in {optimizer, *self._members} - {None}:
            member.add_param_group = _refuse_group  # type: ignore[union-attr, method-assign]
        observe(self)

    def stepping(self, optimizer: Optimizer) -> None:
        """Raise ShardcError for a step of the engine's optimizer that the engine does not take."""
        if optimizer in self._members and not self._allowed:
            fault = "the engine steps its optimizer itself: this would update a second time, or before the other "
            fault += "ranks' parts arrive"
            fix = "remove it: engine.step(batch) does a whole step, engine.backward(batch) and engine.update()"
            fix += " are its halves; program.module(model) is for a loop that steps the optimizer"
            raise ShardcError(fault, where=f"{type(optimizer).__name__}.step()", fix=fix)

    def engine_step(self) -> AbstractContextManager[None]:
        return changed(self, _allowed=True)

    def note(self, schedulers: Sequence[LRScheduler]) -> None:
        """Record the step counts of the engine's schedulers."""
        self._schedulers, self._counts = tuple(schedulers), tuple(map(_count, schedulers))

    def check(self) -> None:
        """Raise ShardcError if somebody stepped the engine's scheduler once more; loading it is allowed."""
        for scheduler, count in zip(self._schedulers, self._counts, strict=True):
            if _count(scheduler) == count + 1:
                fault = "the loop steps it, and the engine also steps it in every update: the learning rate"
                fault += " would run ahead"
                fix = "remove the call; or remove `scheduler=`, make it from engine.optimizer, and step it yourself"
                raise ShardcError(fault, where=f"{type(scheduler).__name__}.step()", fix=fix)


def _count(scheduler: LRScheduler) -> int:
    """Return how often a scheduler was stepped."""
    return int(getattr(scheduler, "_step_count", 0))


def _refuse_group(*_: Any, **__: Any) -> NoReturn:
    """Refuse a new group of an engine's optimizer: nothing would compare it, or know its parameters."""
    fault = "the groups of an engine's optimizer cannot change"
    fix = "make all groups in the function passed as optimizer=, with lr=0.0 for parameters that train "
    fix += "later, and set that group's lr then; frozen parameters (requires_grad=False) train after compiling again"
    raise ShardcError(fault, where="engine.optimizer.add_param_group", fix=fix)
