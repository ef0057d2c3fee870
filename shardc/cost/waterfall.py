"""Split a step's seconds by cause, as predicted and as measured in a run.

    products at the peak    seconds of the products of forward and backward at the device's peak
    below the peak          their other seconds
    memory-bound ops        ops that wait for memory; small ops: those that take no longer than their launch
    recomputed              forward ops that run again in backward
    update                  ops of the optimizer's step
    host                    the device is idle: on a CPU, autograd and Python beside the ops
    waiting for tp          the rank waits for collectives over these axes
    other stages            a pipeline's bubble, and messages between stages
    data                    waiting for the batch

The lines add up to the step. Measured lines are of the ops of timed steps, and of the waits of all other steps; the
rest of the seconds is the host's. Both assign ops to lines by the same device, so that a line differs only in seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardc.cost.measured.op_times import MeasuredStep
from shardc.cost.measured.run_log import RunLog
from shardc.cost.step import Cost
from shardc.errors import ShardcError
from shardc.machine.device import Device
from shardc.machine.work import Op

PEAK, BELOW, MEMORY, SMALL = "products at the peak", "below the peak", "memory-bound ops", "small ops"
AGAIN, UPDATE, HOST, STAGES, DATA = "recomputed", "update", "host", "other stages", "data"
#: The order of the lines; those of axes come between FIRST and LAST.
FIRST, LAST = (PEAK, BELOW, MEMORY, SMALL, AGAIN, UPDATE, HOST), (STAGES, DATA)


def waiting(axes: str) -> str:
    return f"waiting for {axes}"


def lines_of(device: Device, op: Op, seconds: float, *, updating: bool) -> dict[str, float]:
    """Return the lines that an op's seconds belong to."""
    if updating:
        return {UPDATE: seconds}
    if op.again:
        return {AGAIN: seconds}
    cause = device.cause(op)
    if cause != "compute":
        return {MEMORY if cause == "memory" else SMALL: seconds}
    peak = min(op.flops / device.flops_per_second(op.dtype), seconds)
    return {PEAK: peak, BELOW: seconds - peak}


def predicted(cost: Cost, rank: int = 0) -> dict[str, float]:
    """Return the predicted lines of one of `cost.ranks`, by its number there."""
    clock = cost.streams[rank]
    spent: defaultdict[str, float] = defaultdict(float)
    for part, op, seconds in clock.ops:
        for name, its_seconds in lines_of(cost.device, op, seconds, updating=part == "update").items():
            spent[name] += its_seconds
    spent[HOST] += clock.idle
    for axes, seconds in clock.exposed.items():
        spent[waiting(axes)] += seconds
    spent[STAGES] += max(cost.step_seconds - clock.now, 0.0)
    return ordered(spent)


def measured(run: RunLog, cost: Cost, at: int) -> dict[str, float]:
    """Return the measured lines of the rank at this place of the pipeline's axis, over all timed steps."""
    steps = [x for x in run.timed if _at(cost, x) == at]
    spent: defaultdict[str, float] = defaultdict(float)
    for step in steps:
        for x in step.ops:
            lines = lines_of(cost.device, x.op, x.seconds / x.count, updating=x.part == "update")
            for name, seconds in lines.items():
                spent[name] += seconds * x.count / len(steps)
    waited = run.waited if at == 0 else _waited(steps)
    for axes, seconds in waited.items():
        spent[STAGES if axes == cost.program.axis else waiting(axes)] += seconds
    spent[HOST] = run.seconds - sum(spent.values())
    spent[DATA] = run.data_wait
    return ordered(spent)


def _waited(steps: Sequence[MeasuredStep]) -> dict[str, float]:
    """Return the waits of a rank that writes no log lines, in the steps whose ops were timed."""
    seconds: dict[str, float] = {}
    for step in steps:
        for wait in step.waits:
            axes = "+".join(wait.axes)
            seconds[axes] = seconds.get(axes, 0.0) + wait.seconds / len(steps)
    return seconds


def _at(cost: Cost, step: MeasuredStep) -> int:
    """Return the index in `cost.ranks` of the ranks that do the same as the rank of a step."""
    axis = cost.program.axis
    place = cost.program.mesh.coords(step.rank)[axis] if axis else 0
    return next(i for i, r in enumerate(cost.ranks) if r.at == place)


def ordered(spent: Mapping[str, float]) -> dict[str, float]:
    axes = sorted(name for name in spent if name not in (*FIRST, *LAST))
    return {name: spent[name] for name in (*FIRST, *axes, *LAST) if spent.get(name)}


@dataclass(frozen=True)
class Difference:
    """Equal ops: their number in a step, and their seconds, measured and predicted."""

    op: Op
    part: str
    count: float
    measured: float
    predicted: float


@dataclass(frozen=True)
class Comparison:
    """A run and its prediction. at: the place on the pipeline's axis.

    lines: seconds of a step by line, (predicted, measured). bytes: likewise; "made": peak bytes that a step itself
    makes; "memory", "reserved": the device's, if it has an allocator. ops: the largest differences first.
    """

    cost: Cost
    run: RunLog
    at: int
    lines: Mapping[str, tuple[float, float]]
    bytes: Mapping[str, tuple[float, float]]
    ops: tuple[Difference, ...]

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of a step, (predicted, measured), with the wait for data."""
        return sum(a for a, _ in self.lines.values()), sum(b for _, b in self.lines.values())


def compare(cost: Cost, run: RunLog) -> list[Comparison]:
    """Compare a run to its prediction, for every place on the pipeline's axis whose ops were timed.

    Raises ShardcError for a run on another mesh, or on a device of another kind.
    """
    mesh = dict(cost.program.mesh.axes)
    for step in run.timed:
        if step.mesh != mesh:
            fault, fix = f"the run's mesh was {step.mesh}, this is {mesh}", "pass the spec of the run"
            raise ShardcError(fault, where=str(run.folder), fix=fix)
        if (step.kind == "cpu") != (cost.device.kind == "cpu"):
            fault = f"the run was on {step.device}, and {cost.device.name} is not a {step.kind} device"
            raise ShardcError(fault, where=str(run.folder), fix=f"shardc device --measure, then --device {step.kind}")
    comparisons = []
    for at in sorted({_at(cost, x) for x in run.timed}):
        expected, actual = predicted(cost, at), measured(run, cost, at)
        lines = {name: (expected.get(name, 0.0), actual.get(name, 0.0)) for name in ordered({**expected, **actual})}
        steps = [x for x in run.timed if _at(cost, x) == at]
        memory = cost.ranks[at].memory
        made = memory.peak - sum(memory.resident.values()), max(x.made for x in steps)
        peaks = run.memory if cost.device.kind == "gpu" and at == 0 else {}
        ours = {"memory": memory.peak, "reserved": cost.reserved}
        nbytes = {"made": made, **{name: (n, peaks[name]) for name, n in ours.items() if name in peaks}}
        comparisons.append(Comparison(cost, run, at, lines, nbytes, _differences(cost.device, steps)))
    return comparisons


def _differences(device: Device, steps: list[MeasuredStep]) -> tuple[Difference, ...]:
    spent: defaultdict[tuple[str, Op], float] = defaultdict(float)
    count: defaultdict[tuple[str, Op], float] = defaultdict(float)
    for step in steps:
        for x in step.ops:
            spent[x.part, x.op] += x.seconds / len(steps)
            count[x.part, x.op] += x.count / len(steps)
    rows = [Difference(op, part, n, spent[part, op], n * device.op_seconds(op)) for (part, op), n in count.items()]
    return tuple(sorted(rows, key=lambda x: -abs(x.measured - x.predicted)))
