"""`program.cost(device)`: what a step takes: memory, operations, communication, time. From the program alone: nothing
is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardc.cost.device import Device
from shardc.cost.dry_run import Rehearsal, rehearse
from shardc.cost.ledger import Part
from shardc.cost.replay import Clock, Memory, memory, parts
from shardc.cost.symbolic import Symbolic, symbolic
from shardc.ir.program import Program
from shardc.runtime import schedule as schedules
from shardc.runtime.schedule import Costs, Schedule
from shardc.runtime.schedule.actions import COMPUTE
from shardc.runtime.step.engine import OptimizerOf


@dataclass(frozen=True)
class RankCost:
    """Of one rank, and of all that have its stages. at: its coordinate on the pipeline's axis; rank: its number.

    flops: of its matrix products, forward, backward and what is computed again. comm: {(axis, kind): bytes} of whole
    tensors, as in CommRecord.
    seconds: in which it computes; waited: in which it waits for collectives.
    """

    at: int
    rank: int
    memory: Memory
    flops: int
    comm: Mapping[tuple[str, str], int]
    seconds: float
    waited: float


@dataclass(frozen=True)
class Cost:
    """Of one step. ranks: one for each coordinate of the pipeline's axis. memory, flops, comm: of the rank that has
    most
    of it.

    step_seconds: with overlap as the program has it: buckets beside backward, gathers ahead of their use. bubble: share
    of time in which ranks wait for other stages.
    """

    device: Device
    ranks: tuple[RankCost, ...]
    step_seconds: float
    bubble: float
    program: Program = field(repr=False)
    rehearsals: tuple[Rehearsal, ...] = field(repr=False, default=())

    @property
    def memory(self) -> Memory:
        return max((r.memory for r in self.ranks), key=lambda m: m.peak)

    @property
    def flops(self) -> int:
        return max(r.flops for r in self.ranks)

    @property
    def comm(self) -> Mapping[tuple[str, str], int]:
        return max((r.comm for r in self.ranks), key=lambda c: sum(c.values()))

    @property
    def fits(self) -> bool:
        """Does the peak fit into the device's memory?"""
        return self.memory.peak <= self.device.memory

    @cached_property
    def symbolic(self) -> Symbolic:
        """Closed forms in the model's sizes, as sympy expressions. Raises ShardcError where two sizes are the same
        number.
        """
        return self.forms()

    def forms(self, **sizes: int) -> Symbolic:
        """The same with sizes that are named: batch, sequence, hidden, heads, vocab, or any other name. See
        shardc.cost.symbolic.
        """
        return symbolic(self.program, self.rehearsals, sizes)


def cost(program: Program, device: Device, optimizer: OptimizerOf | None, **options: Any) -> Cost:
    """See `Program.cost`. options: of Engine."""
    schedule = program.schedule or schedules.alone(program.microbatches)
    rehearsals = [rehearse(program, at, optimizer, cpu=device.kind == "cpu", **options) for at in range(schedule.ranks)]
    return put_together(program, schedule, rehearsals, device)


def put_together(program: Program, schedule: Schedule, rehearsals: Sequence[Rehearsal], device: Device) -> Cost:
    """The cost of a schedule from rehearsals of its ranks; they may have been made with another schedule of the same
    stages.
    """
    ranks, ends = [], []
    of_stage: dict[tuple[str, int], float] = {}
    first = 0.0  # seconds of the first action: it may wait for the last update's gathers, and other stages wait for it
    for r in rehearsals:
        actions = schedule.actions[r.at]
        clock = Clock(device, program.mesh, r.rank)
        computing = 0.0
        flops, comm = 0, Counter[tuple[str, str]]()
        for action, part in parts(r, actions):
            took = clock.run(part)
            if action is not None and action.kind in COMPUTE:  # the timeline has these; sums of gradients follow it
                computing += took
                first = took if (action.kind, action.stage, action.microbatch) == ("F", 0, 0) else first
                if (action.kind, action.stage) not in of_stage or action.microbatch == 1:
                    of_stage[action.kind, action.stage] = took
            flops += part.flops
            _add(comm, part)
        ends.append(clock.now - computing)
        ranks.append(RankCost(r.at, r.rank, memory(r, actions), flops, dict(comm), clock.now, clock.waited))
    if schedule.ranks == 1:
        return Cost(device, tuple(ranks), ranks[0].seconds, 0.0, program, tuple(rehearsals))
    transfer = {}
    for e in program.edges:
        pair = tuple(_rank(program, schedule, s) for s in (e.source, e.target))
        transfer[e.source, e.target] = device.comm_seconds(
            "send_recv", float(sum(v.nbytes(program.mesh) for v in e.values)), pair
        )
    found = schedules.timeline(schedule, _costs(of_stage, schedule.stages, transfer), program.edges)
    late = max(first - of_stage["F", 0], 0.0)
    return Cost(device, tuple(ranks), late + found.end + max(ends), found.bubble(), program, tuple(rehearsals))


def _add(comm: Counter[tuple[str, str]], part: Part) -> None:
    for record in part.sent:
        comm[record.axis, record.kind] += record.bytes


def _rank(program: Program, schedule: Schedule, stage: int) -> int:
    coords = dict.fromkeys(program.mesh.names, 0)
    return program.mesh.rank({**coords, program.axis: schedule.placement[stage]})


def _costs(seconds: Mapping[tuple[str, int], float], stages: int, transfer: Mapping[tuple[int, int], float]) -> Costs:
    """A whole backward counts as the gradients of inputs."""
    every = range(stages)
    inputs = tuple(seconds.get(("I", s), seconds.get(("B", s), 0.0)) for s in every)
    return Costs(
        tuple(seconds.get(("F", s), 0.0) for s in every),
        inputs,
        tuple(seconds.get(("W", s), 0.0) for s in every),
        transfer,
    )
