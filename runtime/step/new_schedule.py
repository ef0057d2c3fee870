"""The schedule that a run was given, in place of the one that its checkpoint has: `engine.load(folder,
new_schedule=True)`, `--new-schedule`.

The optimizer's state stays the checkpoint's. Learning rates, and what else schedules move, are those that the functions
of today give, at the step where training stands: as if the schedule had been this one from the first step on. So one
that was too short is made longer, and a learning rate becomes another.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardc.runtime.step.lr import SchedulerOf, Schedulers

#: Of a parameter group, what schedules move.
MOVED = ("lr", "momentum", "betas")


class NewSchedule:
    """optimizer: as it was made, before any scheduler. scheduler: the user's function."""

    def __init__(self, optimizer: Optimizer, scheduler: SchedulerOf | None) -> None:
        self._scheduler = scheduler
        self._made = [{k: _copy(x) for k, x in g.items() if k != "params"} for g in optimizer.param_groups]

    def begin(self, optimizer: Optimizer, steps: int) -> Schedulers | None:
        """After a checkpoint's state was loaded into the optimizer. steps: that the schedule has behind it. Returns the
        new schedulers; `Schedulers.check_end` has to have been asked whether they go so far.
        """
        for group, made in zip(optimizer.param_groups, self._made, strict=True):
            group |= {k: _copy(made[k]) for k in MOVED if k in made}
            for key in group.keys() - made.keys() - {"params", "param_names"}:
                del group[key]  # a scheduler's own: initial_lr, max_lr, ...
        if self._scheduler is None:
            return None
        schedulers = Schedulers.make(self._scheduler, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: that it is stepped before the optimizer
            for _ in range(steps):
                schedulers.step()
        return schedulers


def steps_of(extra: Mapping[str, Any]) -> int:
    """How many steps a checkpoint's schedule has behind it: steps that were skipped are none for it."""
    step, saved = int(extra["step"]), extra.get("scheduler")
    first = saved[0] if isinstance(saved, list) and saved else saved
    done = first["state"].get("last_epoch") if isinstance(first, Mapping) else None
    return done if type(done) is int and 0 <= done <= step else step


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x
