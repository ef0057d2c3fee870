"""What a rank knows of the step that it is in, beside its tensors: which microbatch runs, sums over all of them.

Ops of a program are functions of tensors and of the mesh. A few need more: `ops.total` the sum over a step's
microbatches, experts' routing a place for its counts, a mask made again in backward the microbatch of its forward.
The interpreter and the engine set it; ops and collectives read it, as `mesh.step`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

#: One routing of tokens to experts on this rank: (its op, choices of its own tokens by expert and, last, those that no
#: expert takes i64[experts + 1], rows that this rank's experts work on).
Routing = tuple[str, Tensor, int]


@dataclass(frozen=True)
class MicrobatchContext:
    """The microbatch that runs. count: of how many in the step; totals: what all of them add up to, by number
    (shardc.passes.accumulate); sums: of those that are still being summed over ranks."""

    index: int
    count: int
    totals: tuple[Tensor, ...] = ()
    sums: Mapping[int, Any] = field(default_factory=dict)  # shardc.runtime.mesh.Work


class StepContext:
    """Of one rank. Outside of a step there is no microbatch, and nothing is noted.

    microbatch: None: the program runs on whole batches (shardc.runtime.step.module).
    sums: while the interpreter runs a forward of all microbatches for `ops.summed`: what they add up to so far.
    weight_copies: while a microbatch of several runs forward in training: what `ops.cast_once` has cast, by its tag.
    routings: what experts' routing notes, if the engine is to report it (shardc.runtime.step.expert_load).
    in_backward: a backward graph runs: collectives of forward, once more, are recorded as "recompute".
    trains: a graph of a training step runs (shardc.runtime.stage.joint_stage).
    repeats: the lines that run now compute again what forward has computed (shardc.runtime.stage.repeated_lines).
    launch: in its backward, what begins the sums of the buckets that have all their gradients.
    host_copies: where it keeps values on the host (shardc.runtime.stage.activation_offload.OffloadedTensors)."""

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
        self, index: int, count: int, totals: Iterable[Tensor] = (), sums: Mapping[int, Any] | None = None
    ) -> None:
        """From here on programs run on this microbatch."""
        self.microbatch = MicrobatchContext(index, count, tuple(totals), sums or {})

    @contextmanager
    def training(self, launch: Callable[[], None] | None = None, host_copies: Any = None) -> Iterator[None]:
        """Around a graph of a training step. launch: in backward; host_copies: in forward."""
        before = self.trains, self.launch, self.host_copies
        self.trains, self.launch, self.host_copies = True, launch, host_copies
        try:
            yield
        finally:
            self.trains, self.launch, self.host_copies = before
            self.repeats = False  # an error may have come from such a line

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward graph."""
        before, self.in_backward = self.in_backward, True
        try:
            yield
        finally:
            self.in_backward = before
