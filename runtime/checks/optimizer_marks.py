"""Mark an optimizer's state_dict with its rank's slices, so that another rank does not load it.

`optimizer.state_dict()` of one rank has the state of that rank's parts of the parameters. The checkpoint of every
tutorial (rank 0 saves, all ranks load) would put rank 0's moments beside other ranks' slices: shapes fit, and training
goes wrong. An engine's optimizer is known from the start, the one of a custom loop from its first step. If it loads
before, torch copies the mark into its groups, where the first step finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.checks import parameter_parts, state_dict_marks
from shardc.runtime.zero.flat_partition import FlatShard
from shardc.runtime.zero.optimizer_list import members_of

KEY = "shardc"


class OptimizerMarks:
    """Marks and checks optimizer states. params: the optimizer's, by placeholder name.

    shards: the flat shard of each (ZeRO). fix: how to save and load instead.
    """

    def __init__(
        self, program: Program, mesh: Any, params: Mapping[str, nn.Parameter], shards: Mapping[str, FlatShard], fix: str
    ) -> None:
        self._rank, self._fix = mesh.rank, fix
        slices = state_dict_marks.slices(program, mesh, shards)
        self._here = {
            id(params[x.name]): (x.fqn, slices.get(x.fqn, "the whole"), x.shape, tuple(params[x.name].shape))
            for x in program.params
            if x.name in params
        }

    def guard(self, optimizer: Optimizer) -> None:
        """Mark each state that the optimizer saves, and check each that it loads."""
        for m in members_of(optimizer):
            m.register_state_dict_post_hook(self._mark)
            m.register_load_state_dict_pre_hook(self._check)
            m.register_load_state_dict_post_hook(self._check_shapes)

    def check_loaded(self, optimizer: Optimizer) -> None:
        """Raise ShardcError if the optimizer loaded another rank's state before it was guarded."""
        for group in optimizer.param_groups:
            if (note := group.pop(KEY, None)) is not None:
                self._compare(optimizer, group["params"], note)
        self._check_shapes(optimizer)

    def _mark(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            slices = [(p, x) for p in group["params"] if (x := self._here.get(id(p))) is not None]
            packed[KEY] = {"rank": self._rank, "slices": {fqn: text for _, (fqn, text, *_) in slices}}
            for p, (fqn, _, whole, part) in slices:
                for x in optimizer.state.get(p, {}).values() if whole != part else ():
                    if isinstance(x, Tensor) and x.shape == part:
                        parameter_parts.refuse_checkpoint(x, fqn)

    def _check(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = state_dict["param_groups"]
        for group, saved in zip(optimizer.param_groups, groups, strict=False):  # torch reports another number of groups
            if KEY in saved:
                self._compare(optimizer, group["params"], saved[KEY])
        return {**state_dict, "param_groups": [{k: x for k, x in g.items() if k != KEY} for g in groups]}

    def _compare(self, optimizer: Optimizer, params: Iterable[Tensor], note: Mapping[str, Any]) -> None:
        saved, slices = note["slices"], [x for p in params if (x := self._here.get(id(p))) is not None]
        if other := [(fqn, text) for fqn, text, *_ in slices if saved.get(fqn, text) != text]:
            fqn, text = other[0]
            raise ShardcError(
                f"this is the state of the slices of rank {note['rank']}: {saved[fqn]}, where this rank has {text}"
                f" ({len(other)} such)",
                where=f"{type(optimizer).__name__}.load_state_dict: {fqn}",
                fix=self._fix,
            )

    def _check_shapes(self, optimizer: Optimizer) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            fqn, _, whole, part = self._here.get(id(p), ("", "", (), ()))
            # not for a parameter of one number: a step count has its shape
            if (
                len(whole)
                and whole != part
                and any(isinstance(x, Tensor) and x.shape == whole for x in optimizer.state.get(p, {}).values())
            ):
                raise ShardcError(
                    f"this is state of the whole parameter {list(whole)}, of which this rank has a part {list(part)}",
                    where=f"{type(optimizer).__name__}.load_state_dict: {fqn}",
                    fix=f"start without it; {self._fix}",
                )
