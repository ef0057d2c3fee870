"""The optimizer of a user's own loop around a module: refused where it does something else on what this rank has than
on the whole model.

An engine is given its optimizer; a module is not. So it looks for it, once, when its parameters have changed for the
first time, among the objects of the process (0.1 s for a million). A hook of torch's on all optimizers would see it
before its first step, but stand in the way of every other one in the process.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from itertools import chain, compress, repeat, tee

from torch import nn
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.zero.flat_partition import Run
from shardc.runtime.zero.optimizer_check import check_sharded


class OptimizerWatch:
    """params: what optimizers work on, by placeholder name; runs: which stretch of a parameter that is, of those that
    are flat here (ZeRO).
    """

    LOOKS = 3  # parameters may have been loaded before there is an optimizer

    def __init__(self, program: Program, params: Mapping[str, nn.Parameter], runs: Mapping[str, Run]) -> None:
        self._program, self._params, self._runs = program, params, runs
        self._names = {id(p): name for name, p in params.items()}
        self._left = self.LOOKS

    def look(self) -> None:
        """After parameters have changed. Raises ShardcError for an optimizer that may not step what this rank has."""
        if not self._left:
            return
        self._left -= 1
        for x in _optimizers():
            if any(id(p) in self._names for g in x.param_groups for p in g["params"]):
                self._left = 0
                self._check_groups([[self._names.get(id(p), "") for p in g["params"]] for g in x.param_groups])
                check_sharded(self._program, x, self._params, self._runs)

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


def _optimizers() -> list[Optimizer]:
    """Those of this process. No bytecode runs while all objects are in hand: another thread that is in the middle of
    `tuple(...)` would meet a second owner of its tuple there, and CPython raises SystemError (bpo-15108).
    """
    objects, same = tee(chain.from_iterable(map(gc.get_objects, (None,))))  # asked for as `list` begins
    return list(compress(objects, map(issubclass, map(type, same), repeat(Optimizer))))
