"""Refuse a second step of an engine's optimizer or scheduler.

A line of a plain loop that was left in would update twice. That is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardc.errors import ShardcError
from shardc.runtime.checks.tensor_parts import plain, tensors_in
from shardc.runtime.zero.optimizer_list import members_of


class SteppedOnce:
    """An engine's optimizer and schedulers.

    Step the optimizer inside `engine_step()`; call `check` before a step, and `note` after the engine stepped or
    loaded its schedulers. The user's own scheduler of the same optimizer is not the engine's, and is not checked.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._allowed = False
        self._schedulers: tuple[LRScheduler, ...] = ()
        self._counts: tuple[int, ...] = ()
        for member in members_of(optimizer) if optimizer is not None else ():
            self._guard(member)

    def _guard(self, optimizer: Optimizer) -> None:
        step = optimizer.step

        # a bound method: torch's schedulers replace it again, and look for its function and their mark on it
        @functools.wraps(step)
        def guarded(self_: Optimizer, *args: Any, **options: Any) -> Any:
            if not self._allowed:
                raise ShardcError(
                    "the engine steps its optimizer itself: this would update a second time, or before the other "
                    "ranks' parts arrive",
                    where=f"{type(self_).__name__}.step()",
                    fix="remove it: engine.step(batch) does a whole step, engine.backward(batch) and engine.update()"
                    " are its halves; program.module(model) is for a loop that steps the optimizer",
                )
            return step(*args, **options)

        optimizer.step = MethodType(guarded, optimizer)  # type: ignore[method-assign]

    @contextmanager
    def engine_step(self) -> Iterator[None]:
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False

    def note(self, schedulers: Sequence[LRScheduler]) -> None:
        """Record the step counts of the engine's schedulers."""
        self._schedulers, self._counts = tuple(schedulers), tuple(map(_count, schedulers))

    def check(self) -> None:
        """Raise ShardcError if somebody stepped the engine's scheduler once more; loading it is allowed."""
        for scheduler, count in zip(self._schedulers, self._counts, strict=True):
            if _count(scheduler) == count + 1:
                raise ShardcError(
                    "the loop steps it, and the engine also steps it in every update: the learning rate"
                    " would run ahead",
                    where=f"{type(scheduler).__name__}.step()",
                    fix="remove the call; or remove `scheduler=`, make it from engine.optimizer, and step it yourself",
                )


def _count(scheduler: LRScheduler) -> int:
    """Return how often a scheduler was stepped."""
    return int(getattr(scheduler, "_step_count", 0))


def keep_groups(optimizer: Optimizer) -> None:
    """Refuse new groups in an engine's optimizer: nothing compares them, or knows their parameters."""

    def add_param_group(*_: Any, **__: Any) -> NoReturn:
        raise ShardcError(
            "the groups of an engine's optimizer cannot change",
            where="engine.optimizer.add_param_group",
            fix="make all groups in the function passed as optimizer=, with lr=0.0 for parameters that train "
            "later, and set that group's lr then; frozen parameters (requires_grad=False) train after compiling again",
        )

    for member in (optimizer, *members_of(optimizer)):
        member.add_param_group = add_param_group  # type: ignore[method-assign]


class _Detached(Tensor):
    """A tensor that becomes plain in a file and in a copy."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class SteppedLoss(_Detached):
    """The loss of a step: its backward has run."""

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        fix = "remove .backward(); or write the loop around program.module(model), whose loss has backward()"
        raise ShardcError(
            "the engine has already run backward: this number is detached", where="loss.backward()", fix=fix
        )


class ValueBeside(_Detached):
    """A value beside a module's loss, or derived from it. It has no gradient.

    So a term of the loss with it would change nothing.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with plain():
            if torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in((args, kwargs))):
                raise ShardcError(
                    "a value beside the loss is detached: a term computed from it has no gradient and would train "
                    "nothing",
                    where=f"{name} of a value beside the loss",
                    fix="add the term in the loss function, which may name its value beside the loss, too;"
                    " value.detach() where no gradient is meant",
                )
            result = func(*args, **kwargs)
        if name in ("detach", "as_subclass") or not (type(result) is Tensor and result.is_floating_point()):
            return result
        return result.as_subclass(cls)
