"""Make an engine's learning-rate schedulers, step them after updates, and keep them in checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from shardc.errors import ShardcError
from shardc.runtime.state.checkpoint_index import like, plain
from shardc.runtime.zero.several_optimizers import OptimizerList

#: What `optimizer=` returned (an optimizer, or a list of them) -> a scheduler, or a list of them.
SchedulerOf = Callable[[Any], Any]


class Schedulers:
    """The schedulers of an engine, stepped together. members: at least one. returned: the user's result."""

    def __init__(self, members: Sequence[LRScheduler], returned: Any) -> None:
        self.members, self.returned = tuple(members), returned

    @classmethod
    def make(cls, scheduler: SchedulerOf, optimizer: torch.optim.Optimizer) -> Schedulers:
        """Make the user's schedulers. Raises ShardcError for other types or optimizers."""
        returned = scheduler(optimizer.returned if isinstance(optimizer, OptimizerList) else optimizer)
        several = isinstance(returned, (list, tuple, dict))
        members = list(returned.values() if isinstance(returned, dict) else returned) if several else [returned]
        if wrong := [m for m in members if not isinstance(m, LRScheduler)] or ([] if members else [returned]):
            kind = f"a {type(returned).__name__}" + (f" of {type(wrong[0]).__name__}" if several and members else "")
            raise ShardcError(
                f"scheduler(optimizer) returns {kind}",
                where="scheduler",
                fix=(
                    "return a scheduler of torch.optim.lr_scheduler, e.g. lambda optimizer:"
                    " CosineAnnealingLR(optimizer, 100); for a list of optimizers, a list of schedulers"
                ),
            )
        several_optimizers = optimizer.members if isinstance(optimizer, OptimizerList) else ()
        ids = {id(o) for o in (optimizer, *several_optimizers)}
        for m in with_inner(members):
            if id(getattr(m, "optimizer", optimizer)) not in ids:
                fault = f"{type(m).__name__} was made from another optimizer than the engine's: it would have no "
                fault += "effect here"
                fix = "make it from the function's argument: scheduler=lambda optimizer:"
                fix += f" {type(m).__name__}(optimizer, ...)"
                raise ShardcError(fault, where="scheduler", fix=fix)
        return cls(members, returned)

    def step(self) -> None:
        """Step all that count steps."""
        for m in self.members:
            if not isinstance(m, ReduceLROnPlateau):
                m.step()

    def evaluated(self, loss: float) -> None:
        """Step each ReduceLROnPlateau with a held-out loss."""
        for m in self.members:
            if isinstance(m, ReduceLROnPlateau):
                m.step(loss)

    def refresh(self) -> None:
        """Set the rates of named schedules for the next step, after their number of steps became known."""
        for m in self.members:
            if isinstance(m, NamedLR):
                m.refresh()

    def check_room(self, steps: int = 1, *, evaluates: bool = True) -> None:
        """Raise ShardcError if a schedule with an end (OneCycleLR) ends before so many more steps, or never steps."""
        for m in self.members:
            if isinstance(m, ReduceLROnPlateau) and not evaluates:
                fix = "add --eval-every N, and return held-out data from data('valid')"
                raise ShardcError("ReduceLROnPlateau needs held-out losses", where="scheduler", fix=fix)
            for one, epoch in _at(m, _done(m) + steps):
                more = f"{'another one is' if steps == 1 else f'{steps} more are'} to come"
                self._check_end(one, epoch, f"{max(one.last_epoch, 0)} of which are done, and {more}")

    def check_end(self, steps: int) -> None:
        """Raise ShardcError if a schedule ends before this step, counted from its first."""
        for m in self.members:
            for one, epoch in _at(m, steps):
                self._check_end(one, epoch, f"and {steps} are done")

    def _check_end(self, one: OneCycleLR, epoch: int, why: str) -> None:
        if epoch > one.total_steps:
            inside = "" if one in self.members else f" within {type(self.members[0]).__name__}"
            raise ShardcError(
                f"the schedule OneCycleLR{inside} is made for {one.total_steps} steps, {why}",
                where="scheduler",
                fix=f"make it with total_steps={epoch} or more, or train fewer steps; a loaded checkpoint keeps the "
                "schedule that it was saved with, except with engine.load(folder,"
                " new_schedule=True), --new-schedule",
            )

    def state_dict(self) -> Any:
        """Return classes and states as JSON-able values: a list if the user made several."""
        states = [{"class": type(m).__name__, "state": plain(m.state_dict())} for m in self.members]
        return states[0] if isinstance(self.returned, LRScheduler) else states

    def check(self, saved: Any) -> None:
        """Raise ShardcError if the checkpoint has other schedulers, or another number of them."""
        states = saved if isinstance(saved, list) else [saved]
        if len(states) != len(self.members):
            fault = f"the checkpoint is of {len(states)} schedulers, not {len(self.members)}"
            raise ShardcError(fault, where="scheduler", fix="make the same number, in the same order")
        for m, state in zip(self.members, states, strict=True):
            if state["class"] != type(m).__name__:
                fault = f"the checkpoint is of the scheduler {state['class']}, not {type(m).__name__}"
                fix = f"use {state['class']}, or replace it by the new one: load(folder, new_schedule=True),"
                fix += " --new-schedule"
                raise ShardcError(fault, where="scheduler", fix=fix)

    def load_state_dict(self, saved: Any) -> None:
        """Load what `state_dict` returned and `check` accepted. As in torch, saved settings replace new ones."""
        for m, state in zip(self.members, saved if isinstance(saved, list) else [saved], strict=True):
            m.load_state_dict(like(m.state_dict(), state["state"]))
            _regroup(m)


def _done(scheduler: Any) -> int:
    """Return how many steps a scheduler has taken. A ChainedScheduler steps all of its members, and does not count."""
    return _done(scheduler._schedulers[0]) if isinstance(scheduler, ChainedScheduler) else scheduler.last_epoch


def _at(scheduler: Any, epoch: int) -> Iterator[tuple[OneCycleLR, int]]:
    """Yield each OneCycleLR with its own step when `scheduler` is at step `epoch`."""
    if isinstance(scheduler, OneCycleLR):
        yield scheduler, epoch
    elif isinstance(scheduler, ChainedScheduler):
        for m in scheduler._schedulers:
            yield from _at(m, epoch)
    elif isinstance(scheduler, SequentialLR):  # each member begins at one milestone, and stops at the next
        begins = (0, *scheduler._milestones)
        for m, begin, end in zip(scheduler._schedulers, begins, (*begins[1:], epoch + 1), strict=True):
            if epoch > begin:
                yield from _at(m, min(epoch, end - 1) - begin)


def with_inner(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Yield the schedulers, and those inside a SequentialLR or a ChainedScheduler."""
    for m in schedulers:
        yield m
        yield from with_inner(getattr(m, "_schedulers", ()))


def _regroup(scheduler: LRScheduler) -> None:
    """Reset rates by group if the optimizer had another number of groups when it was saved."""
    groups = scheduler.optimizer.param_groups
    if len(getattr(scheduler, "base_lrs", groups)) != len(groups):
        scheduler.base_lrs = [g.get("initial_lr", g["lr"]) for g in groups]
        scheduler._last_lr = [g["lr"] for g in groups]
    for member in getattr(scheduler, "_schedulers", ()):  # of a SequentialLR, a ChainedScheduler
        _regroup(member)


#: Settings of a parameter group that schedules change.
MOVED = ("lr", "momentum", "betas")


class NewSchedule:
    """Makes schedulers again after a checkpoint is loaded. optimizer: as made, before any scheduler."""

    def __init__(self, optimizer: Optimizer, scheduler: SchedulerOf | None) -> None:
        self._scheduler = scheduler
        self._made = [{k: _copy(x) for k, x in g.items() if k != "params"} for g in optimizer.param_groups]

    def begin(self, optimizer: Optimizer, steps: int) -> Schedulers | None:
        """Return new schedulers, advanced by `steps`. Check `Schedulers.check_end` first.

        Called after a checkpoint's state is loaded into the optimizer.
        """
        for group, original in zip(optimizer.param_groups, self._made, strict=True):
            group |= {k: _copy(original[k]) for k in MOVED if k in original}
            for key in group.keys() - original.keys() - {"params", "param_names"}:
                del group[key]  # a scheduler's own: initial_lr, max_lr, ...
        if self._scheduler is None:
            return None
        schedulers = Schedulers.make(self._scheduler, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it is stepped before the optimizer
            for _ in range(steps):
                schedulers.step()
        return schedulers


def steps_of(extra: Mapping[str, Any]) -> int:
    """Return how many steps a checkpoint's schedule has done: skipped steps do not count."""
    step, saved = int(extra["step"]), extra.get("scheduler")
    several = saved if isinstance(saved, list) else [saved]
    counting = [s for s in several if isinstance(s, Mapping) and s["class"] != ReduceLROnPlateau.__name__]
    first = counting[0] if counting else None
    done = first["state"].get("last_epoch") if isinstance(first, Mapping) else None
    return done if type(done) is int and 0 <= done <= step else step


class NamedLR(LambdaLR):
    """The schedule that the spec's `optimizer: {schedule: ...}` names. A checkpoint keeps its step, not its form.

    total: returns the number of all steps, or None while nobody knows it: then the rate does not fall yet.
    """

    def __init__(self, optimizer: Optimizer, schedule: Any, total: Callable[[], int | None]) -> None:
        super().__init__(optimizer, lambda step: factor(schedule, step, schedule.steps or total()))

    def refresh(self) -> None:
        """Set the rates of the next step, after the number of steps became known."""
        for group, at, base in zip(self.optimizer.param_groups, self.lr_lambdas, self.base_lrs, strict=True):
            group["lr"] = base * at(self.last_epoch)


def factor(s: Any, step: int, total: int | None) -> float:
    """Return the factor of the learning rate at a step, from 0. s: the schedule in the spec."""
    warmup, decay = (n if n >= 1 or total is None else n * total for n in (s.warmup, s.decay))
    if step < warmup:
        return float(min(1.0, (step + 1) / warmup))
    if s.name == "constant" or total is None:
        return 1.0
    begin = max(warmup, total - decay) if s.name == "wsd" else warmup
    done = min(1.0, max(0.0, (step - begin) / max(1.0, total - begin)))
    return float(s.least + (1 - s.least) * ((1 + math.cos(math.pi * done)) / 2 if s.name == "cosine" else 1 - done))


def of_spec(program: Any, total: Callable[[], int | None]) -> SchedulerOf | None:
    """Return the schedule of the spec's section `optimizer`; None if it has none. total: as in NamedLR."""
    schedule = program.spec.optimizer.schedule
    if schedule is None:
        return None

    def make(optimizer: Any) -> Any:
        if isinstance(optimizer, Optimizer):
            return NamedLR(optimizer, schedule, total)
        several = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
        return [NamedLR(o, schedule, total) for o in several]

    return make


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x
