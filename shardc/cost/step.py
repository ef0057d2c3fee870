"""Compute `program.cost(device)`: memory, operations, communication and time of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from shardc.cost.dry_run import dry_run
from shardc.cost.kept_activations import Kept, kept
from shardc.cost.known_ops import KnownOps
from shardc.cost.peak_memory import Memory, memory, reserved
from shardc.cost.recorded import DryRun, parts
from shardc.cost.streams import Streams
from shardc.ir.graph import source_of
from shardc.ir.mesh import Mesh
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.ir.units import seconds as duration
from shardc.ir.units import si, size
from shardc.machine.clock import Clock
from shardc.machine.collectives import collective_seconds
from shardc.machine.device import Device
from shardc.runtime import schedule as schedules
from shardc.runtime.schedule import Costs, Schedule, Slot, Timeline
from shardc.runtime.schedule.actions import COMPUTE, PAIRS, live
from shardc.runtime.step import step_graph
from shardc.runtime.step.engine_optimizer import OptimizerOf

#: Called before each rank's dry run: (its name, how many are done, how many there are).
OnRank = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RankCost:
    """The cost of one rank, and of all with the same stages.

    at: its coordinate on the pipeline's axis; rank: its number.
    flops: of its matrix products, forward, backward and recomputed. comm: {(axis, kind): bytes} of whole tensors, as in
    CommRecord. seconds: of the step, without waits for other stages; exposed: the part in which it waits for
    collectives, by their axes ("dp", "dp+tp").
    """

    at: int
    rank: int
    memory: Memory
    flops: int
    comm: Mapping[tuple[str, str], int]
    seconds: float
    exposed: Mapping[str, float]

    @property
    def waited(self) -> float:
        """Seconds of waiting for collectives."""
        return sum(self.exposed.values())

    def __repr__(self) -> str:
        work = f"{si(self.flops, 'FLOP')}, {duration(self.seconds)}"
        return f"<RankCost of rank {self.rank}: peak {size(self.memory.peak)}, {work}>"


@dataclass(frozen=True)
class Cost:
    """The cost of one step. ranks: one for each coordinate of the pipeline's axis.

    memory, flops, comm: of the rank that has the most. memory is live bytes; a device has to hold reserved + outside.
    step_seconds: with overlap as in the program: buckets during backward, gathers ahead of their use. bubble: share of
    time in which ranks wait for other stages. timeline: when each action of each rank runs, in seconds. premises:
    what the step computes, in words.
    """

    device: Device
    ranks: tuple[RankCost, ...]
    step_seconds: float
    bubble: float
    program: Program = field(repr=False)
    dry_runs: tuple[DryRun, ...] = field(repr=False)
    timeline: Timeline = field(repr=False)
    premises: str = ""

    def __repr__(self) -> str:
        peak = f"peak {size(self.memory.peak)} of {size(self.device.memory)}{'' if self.fits else ', does not fit'}"
        ranks = "" if len(self.ranks) == 1 else f", {len(self.ranks)} different ranks"
        return f"<Cost on {self.device.name}: {peak}; step {duration(self.step_seconds)}{ranks}>"

    @property
    def step_words(self) -> str:
        """A step's duration and its premises, in words."""
        return ", ".join(filter(None, (f"a step of {duration(self.step_seconds)}", self.premises)))

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
    def exposed(self) -> Mapping[str, float]:
        """{axes: seconds of waiting for collectives over them}, of the rank that waits longest."""
        return max(self.ranks, key=lambda r: r.waited).exposed

    @cached_property
    def streams(self) -> list[Streams]:
        """When each rank of `ranks` computes, and when its collectives run, by the clock of that rank."""
        schedule, streams = schedules.of(self.program), []
        for r in self.dry_runs:
            streams.append(Streams(started_by(self.device, self.program), self.program.mesh, r.rank))
            for _, part in parts(r, schedule.actions[r.at]):
                streams[-1].run(part)
        return streams

    def kept(self) -> list[list[Kept]]:
        """Return the tensors that a forward keeps, and the ops that need them; per rank of `ranks`."""
        return [kept(self.program, r) for r in self.dry_runs]

    @cached_property
    def outside(self) -> int:
        """Bytes outside of torch's allocator: the device's context, and libraries' workspaces and buffers."""
        sent = [{axes for (axes, _), n in r.comm.items() if n} for r in self.ranks]
        return int(self.device.outside_bytes(max(map(len, sent))))

    @cached_property
    def reserved(self) -> int:
        """Bytes that torch's allocator reserves on a GPU, on the rank that has the most (caching_allocator).

        On a CPU: the live bytes, as memory is returned when it is freed.
        """
        if self.device.kind == "cpu":
            return self.memory.peak
        actions, left = schedules.of(self.program).actions, self.device.memory - self.outside
        return max(reserved(r, actions[r.at], left) for r in self.dry_runs)

    @property
    def fits(self) -> bool:
        """Whether reserved and outside bytes fit into the device's memory."""
        return self.reserved + self.outside <= self.device.memory

    @cached_property
    def sources(self) -> dict[str, Source]:
        """The module and line of every op of the program, by its name."""
        graphs = (s.graph for s in self.program.stages)
        return {n.name: source_of(n) for graph in graphs for n in graph.nodes if n.op == "call_function"}


def cost(program: Program, device: Device, optimizer: OptimizerOf | None, on: OnRank, **options: Any) -> Cost:
    """Compute the cost of a step; see `Program.cost`. options: of Engine."""
    schedule = schedules.of(program)
    dry_runs, known = [], KnownOps()
    for at in range(schedule.ranks):
        on(f"{program.axis}={at}" if program.axis else "a rank", at, schedule.ranks)
        dry_runs.append(dry_run(program, at, optimizer, cpu=device.kind == "cpu", known=known, **options))
    words = premises(program, dry_runs[0].optimizer, **options)
    return replace(assemble(program, schedule, dry_runs, device), premises=words)


def started_by(device: Device, program: Program) -> Device:
    """Return the device as a step uses it: in a step that is a CUDA graph, the host starts no ops."""
    if device.kind != "gpu" or not step_graph.requested(program) or step_graph.why_not(program):
        return device
    return device.model_copy(update={"host": 0.0})


def assemble(program: Program, schedule: Schedule, dry_runs: Sequence[DryRun], device: Device) -> Cost:
    """Compute the cost of a schedule from dry runs, made for it or for another one of the same stages."""
    ranks, ends = [], []
    of_action: dict[tuple[str, int, int], float] = {}
    of_pair: dict[tuple[str, int, int], list[float]] = {}
    slots: list[Slot] = []  # used if there is only one rank
    begin: list[float] = []  # per rank: seconds in which its first forward waits for the last update's gathers
    for r in dry_runs:
        actions = schedule.actions[r.at]
        clock = Clock(started_by(device, program), program.mesh, r.rank)
        computing = 0.0
        begin.append(0.0)
        flops, comm = 0, Counter[tuple[str, str]]()
        for action, part in parts(r, actions):
            of_update = clock.of_update
            seconds = clock.run(part)
            if action is not None and action.kind in COMPUTE:  # the timeline has these; the last sums follow it
                computing += seconds
                slots.append(Slot(action, clock.now - seconds, clock.now))
                if action.kind in PAIRS:
                    of_pair.setdefault(action.of_pair, []).append(seconds)
                else:
                    late = clock.of_update - of_update
                    of_action[action.kind, action.stage, action.microbatch] = seconds - late
                    begin[-1] = begin[-1] or late
            flops += part.flops
            for record in part.sent:
                comm[record.axis, record.kind] += record.bytes
        ends.append(clock.now - computing)
        ranks.append(RankCost(r.at, r.rank, memory(r, actions), flops, dict(comm), clock.now, dict(clock.exposed)))
    if schedule.ranks == 1:
        alone = Timeline(schedule, (tuple(slots),), (live(schedule.actions[0]),))
        return Cost(device, tuple(ranks), ranks[0].seconds, 0.0, program, tuple(dry_runs), alone)
    sent = {(e.source, e.target): float(sum(v.nbytes(program.mesh) for v in e.values)) for e in program.edges}
    transfer = transfers(device, program.mesh, program.axis, schedule, sent)
    pairs = {stages: sorted(times)[len(times) // 2] for stages, times in of_pair.items()}
    timeline = schedules.timeline(schedule, costs(of_action, schedule, transfer, begin, pairs), program.edges)
    seconds = timeline.end + max(ends)
    return Cost(device, tuple(ranks), seconds, timeline.bubble(), program, tuple(dry_runs), timeline)


def transfers(
    device: Device, mesh: Mesh, axis: str, schedule: Schedule, sent: Mapping[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """Return seconds of the sends between stages along an axis of a mesh. sent: bytes by (source, target) stage."""

    def rank(stage: int) -> int:
        return mesh.rank({**dict.fromkeys(mesh.names, 0), axis: schedule.placement[stage]})

    return {(a, b): collective_seconds(device, "send_recv", n, (rank(a), rank(b))) for (a, b), n in sent.items()}


def costs(
    of_action: Mapping[tuple[str, int, int], float],
    schedule: Schedule,
    transfer: Mapping[tuple[int, int], float],
    begin: Sequence[float],
    pairs: Mapping[tuple[str, int, int], float] = MappingProxyType({}),
) -> Costs:
    """Build a schedule's costs. Whole backwards count as input gradients; middle microbatches as equal.

    of_action: seconds by (kind, stage, microbatch): of the first, one like all between, the last.
    """
    last = schedule.microbatches - 1

    def typical(*kinds: str) -> tuple[float, ...]:
        some = [[(kind, s, m) for kind in kinds for m in (1, 0)] for s in range(schedule.stages)]
        return tuple(next((of_action[key] for key in keys if key in of_action), 0.0) for keys in some)

    single = {key: seconds for key, seconds in of_action.items() if key[2] in (0, last)}
    return Costs(typical("F"), typical("I", "B"), typical("W"), transfer, pairs, single, begin)


def premises(program: Program, optimizer: str, *, clip_norm: float | None = None, norm: bool = False, **_: Any) -> str:
    """Describe what a predicted step computes: "in float32, AdamW, ...".

    optimizer: its class name or ""; clip_norm, norm: options of Engine.
    """
    numbers = Counter(p.dtype for p in program.params)
    stored = str(max(numbers, key=numbers.__getitem__, default="")).removeprefix("torch.")
    computed = program.spec.precision.compute or stored
    words = [f"in {computed}"] if computed else []
    if computed != stored:
        words.append(f"weights in {stored}")
    if step_graph.requested(program) and not step_graph.why_not(program):
        words.append("one CUDA graph on a GPU")
    if optimizer:
        words.append(optimizer)
        words.append(gradients_norm(norm=norm, clipped=clip_norm is not None))
    return ", ".join(words)


def gradients_norm(*, norm: bool, clipped: bool) -> str:
    """Return in words whether a step computes the norm of gradients. `shardc run` does, to show it."""
    if clipped:
        return "clipping by the norm of gradients"
    return f"with{'' if norm else 'out'} the norm of gradients"
