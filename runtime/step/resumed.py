"""What a checkpoint replaced that the engine had been made with: settings of the optimizer and of schedulers.

As in torch, what was saved wins. That is right for a run that goes on, and a surprise for one that was to go on with
another learning rate or a longer schedule: so it is said.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.step.lr import Schedulers

#: Settings by what has them: {"lr of group 1": 0.1, "T_max of CosineAnnealingLR": 100}.
Settings = dict[str, Any]
#: Of a parameter group, what schedulers change as they go.
_MOVED = ("lr", "betas", "momentum")


def settings(optimizer: torch.optim.Optimizer | None, schedulers: Schedulers | None) -> Settings:
    """Of an optimizer and its schedulers; without what they change themselves."""
    found: Settings = {}
    groups = optimizer.param_groups if optimizer is not None else []
    for i, group in enumerate(groups):
        of = f" of group {i}" if len(groups) > 1 else ""
        moved = _MOVED if schedulers is not None else ("initial_lr",)
        found |= {f"{name}{of}": _value(x) for name, x in group.items() if name not in ("params", *moved)}
    for scheduler in schedulers.members if schedulers is not None else ():
        for name, value in _of_scheduler(scheduler):
            found.setdefault(name, value)
    return found


def replaced(before: Settings, after: Settings) -> Iterator[str]:
    """One line for each that is another now."""
    for name, value in after.items():
        if name in before and before[name] != value:
            yield f"{name}: the checkpoint's {_text(value)} is used, not {_text(before[name])}"


def _of_scheduler(scheduler: Any) -> Iterator[tuple[str, Any]]:
    """What it was made with, as far as it keeps that under its argument's name; where it stands is no setting."""
    kind = type(scheduler)
    for name in inspect.signature(kind).parameters:
        value = getattr(scheduler, name, None)
        if name != "last_epoch" and isinstance(value, (int, float, str, list, tuple, Mapping)):
            yield f"{name} of {kind.__name__}", _value(value)
    for i, member in enumerate(getattr(scheduler, "_schedulers", ())):  # of a SequentialLR, a ChainedScheduler
        yield from ((f"{name}, number {i} of {kind.__name__}", value) for name, value in _of_scheduler(member))


def _value(x: Any) -> Any:
    """As a value that can be compared: JSON has no tuples."""
    if isinstance(x, Tensor):
        return x.tolist()
    if isinstance(x, Mapping):
        return sorted((str(k), _value(v)) for k, v in x.items())
    return [_value(v) for v in x] if isinstance(x, (list, tuple)) else x


def _text(x: Any) -> str:
    return f"{x:.3g}" if isinstance(x, float) else str(x)
