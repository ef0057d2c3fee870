"""The optimizer of a user's own loop around a module: refused where it does something else on what this rank has than
on the whole model.

An engine is given its optimizer; a module is not. So it looks for it in its first forwards, and when its parameters
have changed, until it is found, by who refers to them (0.1 s for a million objects). A hook of torch's on all
optimizers would see it before its first step, but stand in the way of every other one in the process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.zero.flat_partition import Run
from shardc.runtime.zero.optimizer_check import check_sharded


class OptimizerWatch:
    """params: what optimizers work on, by placeholder name; runs: which stretch of a parameter that is, of those that
    are flat here (ZeRO). model: what the weights came from.
    """

    LOOKS = 3  # there may be no optimizer yet at the first forward, and parameters may have been loaded before there is

    def __init__(
        self, program: Program, params: Mapping[str, nn.Parameter], runs: Mapping[str, Run], model: Any
    ) -> None:
        self._program, self._params, self._runs, self._model = program, params, runs, model
        self._names = {id(p): name for name, p in params.items()}
        self._first = self._changes = self.LOOKS

    def look(self, *, changed: bool) -> None:
        """At a forward that trains. changed: have parameters, since the last one? Raises ShardcError for an optimizer
        that may not step what this rank has, and for one that steps the plain model where nothing steps the module.
        """
        first, changes = self._first, self._changes
        self._first, self._changes = max(first - 1, 0), max(changes - changed, 0)
        if not first and not (changed and changes):
            return
        plain = self._model.parameters() if isinstance(self._model, nn.Module) else ()
        optimizers = _optimizers_of([*self._params.values(), *plain])
        for x in optimizers:
            if any(id(p) in self._names for g in x.param_groups for p in g["params"]):
                self._first = self._changes = 0
                self._check_groups([[self._names.get(id(p), "") for p in g["params"]] for g in x.param_groups])
                check_sharded(self._program, x, self._params, self._runs)
        if first == 1 and changes == self.LOOKS and not changed:
            self._check_model(optimizers)

    def _check_model(self, optimizers: Iterable[Optimizer]) -> None:
        """After some forwards without a change."""
        plain = {id(p) for p in self._model.parameters()} if isinstance(self._model, nn.Module) else set()
        for x in optimizers:
            if any(id(p) in plain for g in x.param_groups for p in g["params"]):
                raise ShardcError(
                    "it has the parameters of the plain model, and no optimizer has those of the module: nothing would"
                    " train",
                    where=f"the optimizer {type(x).__name__}",
                    fix=f"make it of the module's: torch.optim.{type(x).__name__}(module.parameters(), ...)",
                )

    def _check_groups(self, groups: list[list[str]]) -> None:
        """Raises ShardcError for groups that were made by the parameters' dims, where all are flat."""
        filled = [names for names in groups if names]
        if len(filled) == len(groups) or len(filled) > 1:
            return
        dims = {len(self._program.param(name).shape) > 1 for name in filled[0] if name in self._runs}
        if len(dims) > 1:
            zero = max(b.zero for b in self._program.buckets)
            raise ShardcError(
                f"one group has all parameters, and another none: at ZeRO {zero} those of a module are flat stretches,"
                " whose `p.ndim` is 1 whatever the model's is",
                where="the optimizer's groups",
                fix='group by name: shardc.groups(module.named_parameters(), {"*.bias": {"weight_decay": 0.0}})',
            )


def _optimizers_of(params: Iterable[nn.Parameter]) -> list[Optimizer]:
    """Those of this process that hold one of these: parameter <- list <- group <- groups <- optimizer.

    Who refers to what is asked step by step. (To look through all objects would take a second reference to each: a
    thread that is in the middle of `tuple(...)` then fails with SystemError, bpo-15108.)
    """
    found: list[Any] = list(params)
    for kind in (list, dict, list):
        found = [x for x in gc.get_referrers(*found) if type(x) is kind]
    holders = gc.get_referrers(*found)  # the optimizers; or their attributes, where these are a dict
    attributes = [x for x in holders if type(x) is dict]
    holders += gc.get_referrers(*attributes) if attributes else []
    return list({id(x): x for x in holders if issubclass(type(x), Optimizer)}.values())
