"""Check a custom loop around a module: its optimizer before the first step, and over ranks what it does.

The optimizer must do on parts what it does on wholes (shardc.runtime.zero.optimizer_check).

    loss = module(**part); (loss * weight).backward()      all ranks have one loss, so they must pass one gradient to it
    optimizer.step()                                       replicas stay equal only with equal learning rates

Both are recorded as they happen, and compared over ranks in the next forward, in the message that compares the batch;
those of the last step when the module is saved. An optimizer may also step parameters of no module, such as those of a
probe on `module.local(batch)`: nobody sums their gradients over ranks. They are checked once, after the first step: if
they were equal on all ranks before it and differ after it, they drift.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.runtime.checks.hooks import Model
from shardc.runtime.checks.marks import OptimizerMarks
from shardc.runtime.checks.optimizer_steps import observe, observers
from shardc.runtime.checks.shared_facts import plain_settings, rates_fact
from shardc.runtime.mesh import agreement
from shardc.runtime.mesh.agreement import SAME_OPTIMIZER, DisagreementError, Fact, fingerprint, hashed
from shardc.runtime.zero.optimizer_check import check_sharded
from shardc.runtime.zero.several_optimizers import class_of

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
    """Watches the optimizers of a loop, and the gradients of the loss. compares: whether other ranks compare."""

    FORWARDS = 3  # training forwards after which it is an error that only the plain model was stepped

    def __init__(self, model: Model, *, compares: bool) -> None:
        self._program, self._mesh, self._compares = model.program, model.mesh, compares
        self._params, self._shards = model.owned, model.buckets.shards
        self.names = {id(p): name for name, p in model.owned.items()}
        self._gradients: list[tuple[Tensor, Any]] = []  # host copies, with the event of a pending copy
        self._rates: list[float | None] = []
        self._settings: list[object] = []
        self._others: list[tuple[str, list[Tensor], int]] = []  # (optimizer, its parameters of no module, their hash)
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # number of params
        self._forwards: int | None = 0  # in training; None: an optimizer has stepped the module
        fix = "save with module.save(folder, optimizer) on all ranks, and load with module.load(folder, optimizer)"
        self._marks = OptimizerMarks(model, fix)
        observe(self)

    def stepping(self, optimizer: Optimizer) -> None:
        """Check an optimizer that is about to step, and record its settings. It may be none of the module's."""
        params = [p for g in optimizer.param_groups for p in g["params"]]
        if not any(id(p) in self.names for p in params):
            return
        new, self._forwards = optimizer not in self._seen, None
        if self._seen.get(optimizer) != len(params):
            with self._mesh.together("the first step of the optimizer"):
                self._marks.check_loaded(optimizer)
                if new:
                    self._marks.guard(optimizer)
                self._check_groups(optimizer)
                check_sharded(self._program, optimizer, self._params, self._shards)
            self._seen[optimizer] = len(params)
        if not self._compares:
            return
        if new:
            known = {i for w in observers() if isinstance(w, LoopWatch) for i in w.names}
            if others := [p for p in params if id(p) not in known]:
                self._others.append((type(optimizer).__name__, others, fingerprint(others)))
        self._rates += [_number(g.get("lr", 0.0)) for g in optimizer.param_groups]
        self._settings.append((class_of(optimizer), plain_settings(optimizer), len(self._others)))

    def check_model(self, plain_optimizer: str, *, changed: bool) -> None:
        """Raise ShardcError, at a training forward, if only the plain model is stepped, and not the module.

        plain_optimizer: the class of the optimizer that steps the model, or "". changed: parameters changed since the
        last forward.
        """
        if changed or self._forwards is None:
            self._forwards = None
            return
        self._forwards += 1
        if plain_optimizer and self._forwards >= self.FORWARDS:
            fault = "it has the parameters of the plain model, and no optimizer has the module's parameters: nothing "
            fault += "would train"
            fix = f"make it from the module's parameters: torch.optim.{plain_optimizer}(module.parameters(), ...)"
            raise ShardcError(fault, where=f"the optimizer {plain_optimizer}", fix=fix)

    def _check_groups(self, optimizer: Optimizer) -> None:
        """Raise ShardcError for groups made by the parameters' shapes, if all are flat."""
        groups = [[self.names.get(id(p), "") for p in g["params"]] for g in optimizer.param_groups]
        filled = [names for names in groups if names]
        if len(filled) == len(groups) or len(filled) > 1:
            return
        dims = {len(self._program.param(name).shape) > 1 for name in filled[0] if name in self._shards}
        if len(dims) > 1:
            zero = max(b.zero for b in self._program.buckets)
            fault = f"one group has all parameters, and another has none: at ZeRO {zero} those of a module are flat "
            fault += "stretches, and `p.shape` is a stretch's"
            fix = "group by `p.ndim`, which is the whole parameter's"
            raise ShardcError(fault, where="the optimizer's groups", fix=fix)

    def note_gradient(self, g: Tensor) -> None:
        """Record the gradient of the loss, 0-dim, in a backward. Does not wait for a device."""
        if not self._compares:
            return
        copy = g.detach().to("cpu", non_blocking=True, copy=True)
        event = torch.cuda.Event() if g.is_cuda else None  # type: ignore[no-untyped-call]
        if event is not None:
            event.record()
        self._gradients.append((copy, event))

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
        losses = ", ".join(f"{x:g}" for x in dict.fromkeys(values))
        return [
            Fact("the gradient of the loss in backward", hashed(values), (), "loss.backward()", _SAME_LOSS, losses),
            rates_fact(rates, where="optimizer.step()", form="g"),
            Fact("the setting of the optimizer", hashed(settings), (), "optimizer.step()", SAME_OPTIMIZER),
        ]

    def check_others(self, mesh: Any) -> None:
        """Raise DisagreementError, on all ranks, if a step made foreign parameters differ. Collective.

        Foreign: of no module. They were equal on all ranks before.
        """
        others, self._others = self._others, []
        axes = tuple(mesh.layout.names)  # every rank may have its own
        pairs = [
            (Fact("before", before, axes), Fact("after", fingerprint(params), axes)) for _, params, before in others
        ]
        equal = agreement.check(mesh, [fact for pair in pairs for fact in pair], "the first step of the optimizer")
        for (name, params, _), (before, after) in zip(others, pairs, strict=True):
            if before in equal and after not in equal:
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
