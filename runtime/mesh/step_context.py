"""Hold the state of the running step that ops need: the microbatch, sums over all microbatches.

Ops of a program are functions of tensors and of the mesh. A few need more: `ops.total` needs the sum over the
microbatches, the routing of experts a place for its counts, a mask that backward makes again the microbatch of its
forward. The interpreter and the engine set it; ops and collectives read it, as `mesh.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

#: One routing of tokens to experts on this rank: (its op, number of its tokens per expert and, last, those that no
#: expert takes i64[experts + 1], rows that this rank's experts process).
Routing = tuple[str, Tensor, int]


@dataclass(frozen=True)
class MicrobatchContext:
    """The running microbatch, number `index` of `count` in the step.

    totals: sums over all microbatches, by number (shardc.passes.accumulate); works: of totals still being summed over
    ranks.
    """

    index: int
    count: int
    totals: tuple[Tensor, ...] = ()
    works: Mapping[int, Any] = field(default_factory=dict)  # shardc.runtime.mesh.Work


class StepContext:
    """The step state of one rank. Outside of a step there is no microbatch, and nothing is recorded.

    microbatch: None if the program runs on whole batches (shardc.runtime.step.module).
    sums: the partial sums of `ops.summed`, while the interpreter runs a forward of all microbatches.
    weight_copies: what `ops.cast_once` has cast, by its tag, while one of several microbatches runs forward in
    training.
    routings: what the routing of experts records, if the engine reports it (shardc.runtime.step.expert_load).
    in_backward: a backward graph runs: collectives of forward that run again are recorded as "recompute".
    trains: a graph of a training step runs (shardc.runtime.stage.joint_stage).
    repeats: the running lines recompute what forward has computed (shardc.runtime.stage.repeated_lines).
    launch: in backward, starts the sums of the buckets that have all their gradients.
    host_copies: where it keeps values on the host (shardc.runtime.stage.activation_offload.OffloadedTensors).
    """

    def __init__(self) -> None:
        self.microbatch: MicrobatchContext | None = None
        self.sums: dict[int, Tensor] | None = None
        self.weight_copies: dict[str, Tensor] | None = None
        self.routings: list[Routing] | None = None
        self.in_backward = False
        self.trains = False
        self.repeats = False
        self.launch: Callable[[], None] | None = None
        self.host_copies: Any = None

    @property
    def running(self) -> MicrobatchContext:
        """The microbatch, in programs that have several."""
        assert self.microbatch is not None, "no microbatch runs"
        return self.microbatch

    def set_microbatch(
        self, index: int, count: int, totals: Iterable[Tensor] = (), works: Mapping[int, Any] | None = None
    ) -> None:
        """Make this microbatch the current one."""
        self.microbatch = MicrobatchContext(index, count, tuple(totals), works or {})

    def training(self, launch: Callable[[], None] | None = None, host_copies: Any = None) -> Context[None]:
        """Mark a training step's graph. launch: in backward; host_copies: in forward. Errors may leave `repeats` on."""
        return changed(self, trains=True, launch=launch, host_copies=host_copies, repeats=False)

    def backward(self) -> Context[None]:
        """Mark the context of a backward graph."""
        return changed(self, in_backward=True)


@contextmanager
def changed(of: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object inside this context."""
    before = {name: getattr(of, name) for name in values}
    vars(of).update(values)
    try:
        yield
    finally:
        vars(of).update(before)
