"""Shorten the first step of a dry run: it only has to create the optimizer's state.

    all of it      forward, backward, update
    less           gradients of the trained parameters arrive as in backward, update

State needs gradients, not their computation. The second step then begins as after a whole first one: with state and
with gradients in buffers. If a step of a rank leaves anything else to the next one, its first step runs whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.ir.program import Program
from shardc.ir.stage import Stage
from shardc.runtime import ops
from shardc.runtime.schedule import Action
from shardc.runtime.zero.buckets import Buckets
from shardc.runtime.zero.optimizer_check import stand_ins_of
from shardc.runtime.zero.trained_params import trained_by


def leaves_more(program: Program, mine: list[Stage]) -> bool:
    """Return whether a step leaves more than state and gradients. mine: the stages of a rank.

    That is: outputs and new values of buffers, which other stages may get; random numbers that are kept for ops of the
    same sizes; parts of ZeRO 3; memory on the host; an optimizer of other parameters than a rank's parts.
    """
    returns_more = any(s.graph.output_node().args[0][1] for s in program.stages)  # type: ignore[index]
    random = any(n.name == "rng" and n.users for s in mine for n in s.graph.find_nodes(op="placeholder"))
    gathered = any(b.zero == 3 for b in program.buckets)
    on_host = program.offload.used or any(r.offload for r in program.regions)
    return bool(returns_more or random or gathered or on_host or stand_ins_of(program) is not None)


def deliver_gradients(program: Program, backwards: list[Action], buckets: Buckets) -> None:
    """Deliver empty gradients of the parameters that these backwards reach."""
    for i, a in enumerate(backwards):
        buckets.start(stage=a.stage, first=i == 0, last=True)
        for name in trained_by(program, program.stages[a.stage]):
            p = buckets.given[name]
            p = p if isinstance(p, Tensor) else p.params[name]
            ops.accumulate(p, torch.empty_like(p), own=True)
        buckets.pause()
    buckets.start_incomplete()
