"""Check a custom loop's optimizer before its first step: it must do on parts what it does on wholes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.checks.every_optimizer import observe
from shardc.runtime.checks.optimizer_marks import OptimizerMarks
from shardc.runtime.zero.flat_partition import FlatShard
from shardc.runtime.zero.optimizer_check import check_sharded


class OptimizerWatch:
    """Watches optimizers of a custom loop. params: by placeholder name; shards: their flat shards (ZeRO).

    model: source of the weights.
    """

    FORWARDS = 3  # training forwards after which it is an error that only the plain model was stepped

    def __init__(
        self, program: Program, params: Mapping[str, nn.Parameter], shards: dict[str, FlatShard], model: Any, mesh: Any
    ) -> None:
        self._program, self._params, self._shards, self._model, self._mesh = program, params, shards, model, mesh
        self._names = {id(p): name for name, p in params.items()}
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # number of params
        self._forwards: int | None = 0  # so far; None: the module's parameters are trained, so there is no error
        self._plain_class = ""  # the class of the optimizer that stepped the plain model
        fix = "save with module.save(folder, optimizer) on all ranks, and load with module.load(folder, optimizer)"
        self._marks = OptimizerMarks(program, mesh, params, shards, fix)
        observe(self)

    def stepping(self, optimizer: Optimizer) -> None:
        """Raise ShardcError for an optimizer that must not step this rank's parts."""
        count = sum(len(g["params"]) for g in optimizer.param_groups)
        if self._seen.get(optimizer) == count:
            return
        ids = {id(p) for g in optimizer.param_groups for p in g["params"]}
        if not ids.isdisjoint(self._names):
            with self._mesh.together("the first step of the optimizer"):
                self._marks.check_loaded(optimizer)
                if optimizer not in self._seen:
                    self._marks.guard(optimizer)
                self._check_groups([[self._names.get(id(p), "") for p in g["params"]] for g in optimizer.param_groups])
                check_sharded(self._program, optimizer, self._params, self._shards)
            self._forwards = None
        elif isinstance(self._model, nn.Module) and not ids.isdisjoint(map(id, self._model.parameters())):
            self._plain_class = type(optimizer).__name__
        self._seen[optimizer] = count

    def check_model(self, *, changed: bool) -> None:
        """Raise ShardcError, at a training forward, if only the plain model is stepped, and not the module.

        changed: parameters changed since the last forward.
        """
        if changed or self._forwards is None:
            self._forwards = None
            return
        self._forwards += 1
        if self._plain_class and self._forwards >= self.FORWARDS:
            raise ShardcError(
                "it has the parameters of the plain model, and no optimizer has the module's parameters: nothing "
                "would train",
                where=f"the optimizer {self._plain_class}",
                fix=f"make it from the module's parameters: torch.optim.{self._plain_class}(module.parameters(), ...)",
            )

    def _check_groups(self, groups: list[list[str]]) -> None:
        """Raise ShardcError for groups made by the parameters' dims, if all are flat."""
        filled = [names for names in groups if names]
        if len(filled) == len(groups) or len(filled) > 1:
            return
        dims = {len(self._program.param(name).shape) > 1 for name in filled[0] if name in self._shards}
        if len(dims) > 1:
            zero = max(b.zero for b in self._program.buckets)
            raise ShardcError(
                f"one group has all parameters, and another has none: at ZeRO {zero} those of a module are flat "
                "stretches,"
                " whose `p.ndim` is 1 whatever the model's is",
                where="the optimizer's groups",
                fix='group by name: shardc.groups(module.named_parameters(), {"*.bias": {"weight_decay": 0.0}})',
            )
