"""Report what differs in a run that continues from a checkpoint.

The checkpoint replaces settings of the optimizer and of schedules: as in torch, the saved ones are used. That
surprises a user who set another learning rate or a longer schedule, so a note says it. It cannot replace code:
forward, loss, and the batch's sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardc.ir.forward_record import ForwardRecord
from shardc.ir.program import Program
from shardc.runtime.state.checkpoint_index import plain
from shardc.runtime.step.schedulers import MOVED, Schedulers, with_inner

#: Settings by what has them: {"lr of group 1": 0.1, "T_max of CosineAnnealingLR": 100}.
Settings = dict[str, Any]


def settings(optimizer: torch.optim.Optimizer | None, schedulers: Schedulers | None) -> Settings:
    """Return the settings of an optimizer and its schedulers, without those that they change themselves."""
    values: Settings = {}
    groups = optimizer.param_groups if optimizer is not None else []
    moved = _scheduled(schedulers)
    for i, group in enumerate(groups):
        of = f" of group {i}" if len(groups) > 1 else ""
        values |= {f"{name}{of}": plain(x) for name, x in group.items() if name not in ("params", *moved)}
    for scheduler in schedulers.members if schedulers is not None else ():
        for name, value in _of_scheduler(scheduler):
            values.setdefault(name, value)
    return values


def _scheduled(schedulers: Schedulers | None) -> tuple[str, ...]:
    """Return the group settings that schedulers move: learning rates, and momentum if they cycle it."""
    if schedulers is None:
        return ("initial_lr",)
    if any(getattr(s, "cycle_momentum", False) for s in with_inner(schedulers.members)):
        return MOVED
    return ("lr",)


def replaced(before: Settings, after: Settings, *, schedule: bool = True) -> Iterator[str]:
    """Yield a line per changed setting, and one with the fix for schedules, if they are the checkpoint's."""
    others = {name: value for name, value in after.items() if name in before and before[name] != value}
    scheduled = {name for name in others if name.startswith((*MOVED, "initial_lr")) or "LR" in name}
    for name, value in others.items():
        if schedule or name not in scheduled:
            yield f"{name}: the checkpoint's {_text(value)} is used, not {_text(before[name])}"
    if schedule and scheduled:
        yield "learning rates of today: load(folder, new_schedule=True), run: --new-schedule"


def record(program: Program) -> dict[str, Any]:
    """Return what a checkpoint keeps of the forward that was trained."""
    return {"forward": program.record.to_json()} if program.record is not None else {}


def changed(program: Program, extra: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line per difference between this program's forward and the checkpoint's, if recorded."""
    then = ForwardRecord.read(extra.get("forward"))
    if then is not None and program.record is not None:
        yield from then.differences(program.record)


def _of_scheduler(scheduler: Any) -> Iterator[tuple[str, Any]]:
    """Yield a scheduler's constructor arguments that it keeps as attributes, without its position."""
    kind = type(scheduler)
    for name in inspect.signature(kind).parameters:
        value = getattr(scheduler, name, None)
        if name != "last_epoch" and isinstance(value, (int, float, str, list, tuple, Mapping)):
            yield f"{name} of {kind.__name__}", plain(value)
    for i, member in enumerate(getattr(scheduler, "_schedulers", ())):  # of a SequentialLR, a ChainedScheduler
        yield from ((f"{name}, number {i} of {kind.__name__}", value) for name, value in _of_scheduler(member))


def _text(x: Any) -> str:
    return f"{x:.3g}" if isinstance(x, float) else str(x)
