"""Define outputs: values that a step returns beside its loss, such as metrics, by the user's names.

In every graph they follow the new values of buffers, detached. Their placement decides what a rank has of one after a
step:

    +dp          every rank has a summand: summed over dp at the step's end, with all others in one collective
    8@dp         this rank's rows
    (neither)    every rank has it whole

Microbatches of a step are combined in the same way: summands are added, rows are joined, and of a value that is the
same in all microbatches there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardc.ir.placement import Layout, Partial, Shard

if TYPE_CHECKING:
    from shardc.ir.mesh import Mesh
    from shardc.ir.metadata import Value
    from shardc.ir.program import Program
    from shardc.spec import Spec

#: Elements of the largest partial value that is summed at the end of the step; a larger one is summed in the graph.
_SMALL = 1024
#: Outputs of a scoring program: each target's log-probability; their mean, which is a sum divided by a count.
SCORE, MEAN_SCORE, SCORED = "score", "logprob", "logprob (count)"


def is_small(shape: Sequence[int]) -> bool:
    """Return whether a value is so small that its summands may be added up at the end of the step."""
    return math.prod(shape) <= _SMALL


@dataclass(frozen=True)
class Output:
    """One output. name: the user's. shape: global, of the whole step's batch. layout: its placements.

    wanted: the layout that the spec sets (`outputs:`), on the axes that it names; no axis: whole on all ranks; None:
    rows where they are, all else whole. as_made: it stays as split as the ops leave it. cause: the spec's line.
    microbatch: how its rows are cut into microbatches; None: it has no rows. adds: each microbatch has a summand.
    divisor: the name of the output that it is divided by, after both are summed; stage: of a pipeline, its producer.
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
        """Whether it is so small that ranks may hold summands of it after the step."""
        return is_small(self.shape) and not self.layout.shards() and self.microbatch is None

    @property
    def summed_over(self) -> tuple[str, ...]:
        """The axes over which ranks have summands."""
        return tuple(a for a, p in self.layout.items if isinstance(p, Partial))


def loss_value(program: Program) -> Value | None:
    """Return the type of one microbatch's loss, of a stage or else of the graph; None if forward-only."""
    graphs = [s.graph for s in program.stages] or [program.graph]
    returned: list[Any] = [graph.output_node().args[0] for graph in graphs]
    value: Value | None = next((loss.meta["value"] for loss, *_ in returned if loss is not None), None)
    return value


def loss_axes(program: Program) -> tuple[str, ...]:
    """Return the axes over which a step's loss is partial: those of its layout, and the pipeline's axis."""
    value = loss_value(program)
    if value is None:
        return ()
    axes = {a for a, p in value.layout.items if isinstance(p, Partial)}
    axes |= {program.axis} if program.axis else set()
    return program.mesh.merge(tuple(a for a in axes if program.mesh.size(a) > 1))


def divisors(outputs: tuple[Output, ...]) -> frozenset[str]:
    """Return names of the outputs that only divide others: counts, which users do not see."""
    return frozenset(o.divisor for o in outputs if o.divisor)


def sum_axes(outputs: tuple[Output, ...], mesh: Mesh, pipeline: str) -> tuple[str, ...]:
    """Return the axes of the single sum at the end of a step; () if none. pipeline: its axis, or ""."""
    small = [o for o in outputs if o.small]
    axes = {a for o in small for a in o.summed_over} | ({pipeline} if pipeline and small else set())
    return mesh.merge(axes) if axes else ()


def summed(outputs: tuple[Output, ...], pipeline: str) -> tuple[Output, ...]:
    """Return the outputs that take part in the sum at the end of a step."""
    return tuple(o for o in outputs if o.small and (o.summed_over or pipeline))


class OtherForward:
    """A forward other than the model's own, with a batch and outputs of its own kind.

    An optional feature compiles it (`forward=` of shardc.compile).
    """

    def spec(self, spec: Spec) -> Spec:
        """Return the part of a spec that applies."""
        raise NotImplementedError

    def module(self, model: Any, leaves: Any) -> Any:
        """Return the module to capture, a shardc.capture.loss.ValuesOf."""
        raise NotImplementedError

    def outputs(self, outputs: Sequence[Output]) -> tuple[Output, ...]:
        """Return the program's outputs with the layouts that they need."""
        raise NotImplementedError
