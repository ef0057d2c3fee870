"""Values that a step gives beside its loss: metrics, logits, terms of the loss, by the user's names.

In every graph they stand behind the new values of buffers, detached. What a rank has of one after a step follows from
the placement that it has got, as for anything else:

    +dp          every rank has a summand: summed over dp at the step's end, with all others in one collective
    8@dp         this rank's rows
    (neither)    every rank has it whole

Over a step's microbatches it is put together in the same way: summands are added, rows joined, of what is alike in all
of them there is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardc.ir.placement import Layout, Partial, Shard

if TYPE_CHECKING:
    from shardc.ir.mesh import Mesh
    from shardc.ir.metadata import Value
    from shardc.ir.program import Program

#: Elements up to which a value that ranks have summands of is summed at the end of the step; a larger one in the graph.
SMALL = 1024
#: What a scoring program gives: each target's log-probability; their mean, which is a sum by a count.
SCORE, MEAN_SCORE, SCORED = "score", "logprob", "logprob (count)"


@dataclass(frozen=True)
class Output:
    """One value. name: the user's. shape: global, of the whole step's batch; dtype. layout: what a rank has of it.

    wanted: how the spec asks for it (`outputs:`), on the axes that it names; no axis: whole on all ranks; None: rows
    where they are, all else whole. as_made: it stays as split as the ops leave it. cause: the spec's line.
    microbatch: how its rows are cut into microbatches; None: it has none. adds: each microbatch has a summand.
    divisor: the name of the output that it is divided by, once both are summed; stage: of a pipeline: that makes it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout = Layout()
    microbatch: Shard | None = None
    adds: bool = False
    divisor: str = ""
    stage: int = 0
    wanted: Layout | None = None
    cause: str = ""
    as_made: bool = False

    @property
    def small(self) -> bool:
        """Is it so small that ranks may have summands of it after the step?"""
        return math.prod(self.shape) <= SMALL and not self.layout.shards() and self.microbatch is None

    @property
    def summed_over(self) -> tuple[str, ...]:
        """The axes over which ranks have summands."""
        return tuple(a for a, p in self.layout.items if isinstance(p, Partial))


def loss_value(program: Program) -> Value | None:
    """The type of what a stage returns as the loss of one microbatch; before there are stages, the graph. None: the
    program is forward-only.
    """
    graphs = [s.graph for s in program.stages] or [program.graph]
    returned: list[Any] = [graph.output_node().args[0] for graph in graphs]
    value: Value | None = next((loss.meta["value"] for loss, *_ in returned if loss is not None), None)
    return value


def loss_axes(program: Program) -> tuple[str, ...]:
    """The axes over which ranks have summands of a step's loss: those over which it is partial, and a pipeline's."""
    value = loss_value(program)
    if value is None:
        return ()
    axes = {a for a, p in value.layout.items if isinstance(p, Partial)}
    axes |= {program.axis} if program.axis else set()
    return program.mesh.merge(tuple(a for a in axes if program.mesh.size(a) > 1))


def divisors(outputs: tuple[Output, ...]) -> frozenset[str]:
    """Names of the outputs that only divide others: counts, which users do not see."""
    return frozenset(o.divisor for o in outputs if o.divisor)


def sum_axes(outputs: tuple[Output, ...], mesh: Mesh, pipeline: str) -> tuple[str, ...]:
    """The axes of the one sum at the end of a step; () if nothing is summed. pipeline: its axis, or ""."""
    small = [o for o in outputs if o.small]
    axes = {a for o in small for a in o.summed_over} | ({pipeline} if pipeline and small else set())
    return mesh.merge(axes) if axes else ()


def summed(outputs: tuple[Output, ...], pipeline: str) -> tuple[Output, ...]:
    """Those that take part in that sum."""
    return tuple(o for o in outputs if o.small and (o.summed_over or pipeline))
