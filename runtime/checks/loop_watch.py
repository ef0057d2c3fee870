"""Compare over ranks what a custom loop around a module does between two forwards.

    loss = module(**part); (loss * weight).backward()      the loss is the whole batch's: so is its gradient
    optimizer.step()                                       replicas stay the same by equal learning rates

Both are recorded as they happen, and compared in the next forward, by the sum that compares the batch; after the last
one, when the module is saved. An optimizer may also step parameters of no module, such as those of a probe on
`module.local(batch)`: nobody sums their gradients over ranks. They are checked once, after the first step: if they were
equal on all ranks before it and differ after it, they drift.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardc.runtime.checks.every_optimizer import observe, observers
from shardc.runtime.checks.shared_facts import plain_settings
from shardc.runtime.mesh.agreement import SAME_OPTIMIZER, DisagreementError, Fact, fingerprint, hashed
from shardc.runtime.zero.optimizer_list import class_of, rates_text

_SAME_LOSS = (
    "the module returns the loss of the whole batch, the same on all ranks: a factor or term computed from this rank's "
    "part of the batch belongs in the loss function, shardc.compile(model, batch, spec,"
    " loss=lambda output, batch: ...), which sees the whole batch"
)
_OTHERS_FIX = (
    "make them part of the compiled model; or average their gradients before each step:"
    " torch.distributed.all_reduce(p.grad, torch.distributed.ReduceOp.AVG)"
)


class LoopWatch:
    """Records gradients of the loss and optimizer settings. params: the module's. noting: whether it records."""

    def __init__(self, params: Iterable[Tensor], *, noting: bool) -> None:
        self._noting = noting
        self.ids = frozenset(map(id, params))
        self._gradients: list[tuple[Tensor, Any]] = []  # host copies, with the event of a pending copy
        self._rates: list[float | None] = []
        self._settings: list[object] = []
        self._others: list[tuple[str, list[Tensor], int]] = []  # (optimizer, its parameters of no module, their hash)
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        observe(self)

    def note_gradient(self, g: Tensor) -> None:
        """Record the gradient of the loss, 0-dim, in a backward. Does not wait for a device."""
        if not self._noting:
            return
        copy = g.detach().to("cpu", non_blocking=True, copy=True)
        event = torch.cuda.Event() if g.is_cuda else None  # type: ignore[no-untyped-call]
        if event is not None:
            event.record()
        self._gradients.append((copy, event))

    def stepping(self, optimizer: Optimizer) -> None:
        """Record an optimizer that is about to step. It may be none of the module's."""
        groups = optimizer.param_groups
        if not self._noting or not any(id(p) in self.ids for g in groups for p in g["params"]):
            return
        self._rates += [_number(g.get("lr", 0.0)) for g in groups]
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            known = frozenset[int]().union(*(w.ids for w in observers() if isinstance(w, LoopWatch)))
            others = [p for g in groups for p in g["params"] if id(p) not in known]
            if others:
                self._others.append((type(optimizer).__name__, others, fingerprint(others)))
        self._settings.append((class_of(optimizer), plain_settings(optimizer), len(self._others)))

    def facts(self, *, last: bool = False) -> list[Fact]:
        """Return facts about what was done since the last call. Collective: all ranks have done the same.

        last: no forward may follow, so wait for the device.
        """
        ready = self._gradients
        if not last and ready and ready[-1][1] is not None:  # its copy may be pending: compared one forward later
            ready = ready[:-1]
        self._gradients = self._gradients[len(ready) :]
        for _, event in ready:
            if event is not None:
                event.synchronize()
        values = [float(x) for x, _ in ready]
        rates, settings, self._rates, self._settings = self._rates, self._settings, [], []
        return [
            Fact(
                "the gradient of the loss in backward", hashed(values), (), "loss.backward()", _SAME_LOSS, _text(values)
            ),
            Fact("the learning rate", hashed(rates), (), "optimizer.step()", SAME_OPTIMIZER, rates_text(rates, "g")),
            Fact("the setting of the optimizer", hashed(settings), (), "optimizer.step()", SAME_OPTIMIZER),
        ]

    def check_others(self, mesh: Any) -> None:
        """Raise DisagreementError, on all ranks, if a step made foreign parameters differ. Collective.

        Foreign: of no module. They were equal on all ranks before.
        """
        numbers = [len(self._others)]
        others, self._others = self._others, []
        for _, params, before in others:
            after = fingerprint(params)
            numbers += [before, before**2, after, after**2]
        n = mesh.layout.world
        _, *sums = mesh.sum_on_host(numbers)
        for i, (name, params, _) in enumerate(others):
            before, squares, after, squares_after = sums[4 * i : 4 * i + 4]
            if n * squares == before**2 and n * squares_after != after**2:
                raise DisagreementError(
                    f"it also steps parameters that are not the module's ({len(params)}), and their gradients are "
                    "not summed over ranks: they were the same on all ranks before its first step, and differ after it",
                    where=f"the optimizer {name}",
                    fix=_OTHERS_FIX,
                )

    @property
    def others(self) -> bool:
        """Whether `check_others` has work. The same on all ranks whose facts agree."""
        return bool(self._others)


def _number(x: Any) -> float | None:
    """Return a learning rate; None if the optimizer sets its own, -1 if it is on a device."""
    if x is None:
        return None
    return float(x) if not isinstance(x, Tensor) or x.device.type == "cpu" else -1.0


def _text(values: list[float]) -> str:
    return ", ".join(f"{x:g}" for x in dict.fromkeys(values))
