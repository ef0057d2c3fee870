"""Learning-rate schedulers in an engine: made from its optimizer, stepped once for every step that updates, kept in
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardc.errors import ShardcError

SchedulerOf = Callable[[torch.optim.Optimizer], LRScheduler]
_PAIRS = "pairs of a dict"  # JSON's keys are strings only


def make(scheduler: SchedulerOf, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The user's scheduler. Raises ShardcError for what is none, or needs more than a count of steps."""
    schedule: Any = scheduler(optimizer)
    if isinstance(schedule, ReduceLROnPlateau):
        raise ShardcError(
            "ReduceLROnPlateau needs a measure of yours at every step",
            where="scheduler",
            fix="make it from engine.optimizer, and call its step(measure) in your own loop",
        )
    if not isinstance(schedule, LRScheduler):
        raise ShardcError(
            f"scheduler(optimizer) returns a {type(schedule).__name__}",
            where="scheduler",
            fix=(
                "return a scheduler of torch.optim.lr_scheduler, e.g. lambda optimizer: CosineAnnealingLR(optimizer,"
                " 100)"
            ),
        )
    return schedule


def state_dict(scheduler: LRScheduler) -> dict[str, Any]:
    """Its class and state as JSON-able values."""
    return {"class": type(scheduler).__name__, "state": _plain(scheduler.state_dict())}


def load_state_dict(scheduler: LRScheduler, saved: Mapping[str, Any]) -> None:
    """The inverse of `state_dict`. As in torch, what was saved wins over what the scheduler was made with.

    Raises ShardcError where it was another class's.
    """
    if saved["class"] != type(scheduler).__name__:
        what = f"the checkpoint is of the scheduler {saved['class']}, not {type(scheduler).__name__}"
        raise ShardcError(
            what,
            where="scheduler",
            fix=f"use {saved['class']}, or make the new one from engine.optimizer after loading",
        )
    scheduler.load_state_dict(_like(scheduler.state_dict(), saved["state"]))


def _plain(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.tolist()
    if isinstance(x, Mapping):
        if all(isinstance(k, str) for k in x):
            return {k: _plain(v) for k, v in x.items()}
        return {_PAIRS: [[_plain(k), _plain(v)] for k, v in x.items()]}
    return [_plain(v) for v in x] if isinstance(x, (list, tuple)) else x


def _like(now: Any, saved: Any) -> Any:
    """What `_plain` wrote, as tensors, tuples and dicts (MultiStepLR has a Counter) where
    the scheduler has such now.
    """
    if isinstance(now, Tensor):
        return torch.as_tensor(saved, dtype=now.dtype, device=now.device)
    if isinstance(saved, Mapping):
        if saved.keys() == {_PAIRS}:
            pairs = dict(saved[_PAIRS])
            kind: Any = type(now)
            return kind(pairs) if isinstance(now, Mapping) else pairs
        return {k: _like(now.get(k) if isinstance(now, Mapping) else None, v) for k, v in saved.items()}
    if isinstance(saved, list):
        each = now if isinstance(now, (list, tuple)) and len(now) == len(saved) else [None] * len(saved)
        items = [_like(a, b) for a, b in zip(each, saved, strict=True)]
        return tuple(items) if isinstance(now, tuple) else items
    return saved
