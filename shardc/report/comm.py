"""List the collectives of a training step by axis and cause, and its copies to the host and back."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import fx

from shardc.cost.fake_mesh import rank_of as rank_of_coordinate
from shardc.ir.metadata import CommRecord, Value
from shardc.ir.offload import HOST_LINK
from shardc.ir.outputs import loss_axes, loss_value, sum_axes, summed
from shardc.ir.program import Program
from shardc.ir.stage import Stage
from shardc.ir.units import seconds, size
from shardc.layer_names import note_lines
from shardc.optional import needed, registered
from shardc.runtime import ops
from shardc.runtime.zero.flat_partition import Flat

if TYPE_CHECKING:
    from shardc.cost import Cost

IMPLICIT = "no annotation implies it"


@dataclass(frozen=True)
class Row:
    """Collectives of one kind, axes and cause in a step, summed over one rank of each coordinate."""

    axes: str
    kind: str
    direction: str
    cause: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Sent:
    """Equal collectives on one rank of each coordinate. bytes: of each; of: a stage's node or a bucket."""

    axes: tuple[str, ...]
    kind: str
    direction: str
    cause: str
    bytes: int
    times: int
    of: fx.Node | int | None = None

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The key of the row that counts them: axes, direction, kind, cause."""
        return "+".join(self.axes), self.direction, self.kind, self.cause or IMPLICIT


def comm_rows(program: Program, at: int | None = None, moved: Sequence[int] | None = None) -> list[Row]:
    """Return the rows of a step with all its microbatches, sorted by axes and direction.

    at: of a pipeline, the coordinate of the one rank to count (messages between stages count at the receiver); None:
    the sum over one rank of each coordinate. moved: bytes of each message that takes parameters to the optimizer's
    owners or back, on that rank; None: those of the assumed optimizer. Gradient buckets come last in backward.
    """
    counts: dict[tuple[str, str, str, str], tuple[int, int]] = {}
    for s in sent(program, at, moved):
        times, nbytes = counts.get(s.row, (0, 0))
        counts[s.row] = times + s.times, nbytes + s.times * s.bytes
    rank = {"forward": 0, "recompute": 1, "backward": 2, "update": 3}
    rows = [Row(axes, kind, way, cause, *sums) for (axes, way, kind, cause), sums in counts.items()]
    return sorted(rows, key=lambda r: (r.axes, rank[r.direction]))


def sent(program: Program, at: int | None = None, moved: Sequence[int] | None = None) -> Iterator[Sent]:
    """Yield all collectives of a step that `comm_rows` counts: of stages, of buckets, then all others."""
    all_sent = chain(_of_stages(program, at), _of_buckets(program, at), _of_step(program, at, moved))
    return (s for s in all_sent if s.kind != "none" and s.times)


def _placement(program: Program) -> Sequence[int]:
    """Return the coordinate of each stage on the pipeline's axis."""
    return program.schedule.placement if program.schedule is not None else (0,)


def _of_stages(program: Program, at: int | None) -> Iterator[Sent]:
    m, rank_of = program.microbatches, _placement(program)
    totals: set[tuple[int, Any]] = set()
    sender = {name: rank_of[i] for i, stage in enumerate(program.stages) for name in stage.sends}
    for i, stage in enumerate(program.stages):
        for node in stage.graph.nodes if at in (None, rank_of[i]) else ():
            c = node.meta.get("collective")
            if c is None or (sender.get(node.name) == rank_of[i] and node.op == "placeholder"):
                continue  # from another stage of the same rank
            if node.target is ops.total:  # once in a step on each rank
                once = (rank_of[i], node.args[1])
                yield Sent(c.axes, c.kind, "forward", c.cause, c.bytes, int(once not in totals), node)
                totals.add(once)
            elif node.target is not ops.gather_start:
                yield Sent(c.axes, c.kind, "forward", c.cause, c.forward_bytes, m, node)
                yield Sent(c.axes, c.kind, "recompute", c.cause, c.forward_bytes, m * node.meta.get("again", 0), node)
                yield Sent(c.axes, c.backward, "backward", c.cause, c.bytes, m, node)
            else:
                number = bucket_number(node)
                b = program.buckets[number]
                times, again = 1 if b.keep else m, 0 if b.keep else m * gathered_again(stage, str(node.args[1]))
                yield Sent(c.axes, c.kind, "forward", c.cause, c.forward_bytes, times, number)
                yield Sent(c.axes, c.kind, "backward", c.cause, c.forward_bytes, again, number)
                scales = needed("fp8", "runtime", "scale_bytes") if b.rounded else lambda *_: {}
                for axes, nbytes in scales(b, Flat.of(program, b), program.mesh.names).items():
                    yield Sent(axes, "all_reduce", "forward", f"{c.cause}: scales", nbytes, times, number)
                    yield Sent(axes, "all_reduce", "backward", f"{c.cause}: scales", nbytes, again, number)


def bucket_number(gather: fx.Node) -> int:
    """Return the number of the bucket whose parameters an op gathers."""
    return int(str(gather.args[1]).removeprefix("bucket"))


def _of_buckets(program: Program, at: int | None) -> Iterator[Sent]:
    rank_of, gradients = _placement(program), "gradients, in buckets"
    for i, b in enumerate(program.buckets):
        flat = Flat.of(program, b)
        rest = tuple(a for a in b.axes if a != b.shard) if b.zero else b.axes
        stages = [s for s in b.stages if at in (None, rank_of[s])]
        ranks = len({rank_of[s] for s in stages})
        if b.zero and b.shard in b.axes:
            times = program.microbatches * len(stages) if b.each else ranks
            yield Sent((b.shard,), "reduce_scatter", "backward", gradients, flat.padded * b.dtype.itemsize, times, i)
        if rest:
            yield Sent(rest, "all_reduce", "backward", gradients, flat.part * b.dtype.itemsize, ranks, i)
        if b.zero in (1, 2):
            nbytes = flat.padded * (b.compute or program.param(b.params[0]).dtype).itemsize
            yield Sent((b.shard,), "all_gather", "update", "updated parameters", nbytes, ranks, i)


def _of_step(program: Program, at: int | None, moved: Sequence[int] | None) -> Iterator[Sent]:
    """Yield the collectives of the loss, values beside it, buffers, and owners of parameters."""
    rank_of, stages = _placement(program), program.mesh.size(program.axis) if program.axis else 1
    count = stages if at is None else 1
    if axes := sum_axes(program.outputs, program.mesh, program.axis):
        nbytes = 8 * sum(math.prod(o.shape) for o in summed(program.outputs, program.axis))
        yield Sent(axes, "all_reduce", "forward", "outputs beside the loss", nbytes, count)
    for o in program.outputs if program.axis else ():
        if not o.small:
            nbytes = Value(o.shape, o.dtype, False, o.layout).nbytes(program.mesh)
            receivers = [c for c in range(stages) if c != rank_of[o.stage] and at in (None, c)]
            cause = f"output {o.name!r}, to every stage"
            yield Sent((program.axis,), "send_recv", "forward", cause, nbytes, len(receivers))
    loss = loss_value(program)
    if loss is not None and (axes := loss_axes(program)):
        yield Sent(axes, "all_reduce", "forward", "the loss, to every rank", loss.dtype.itemsize, count)
    if stages > 1:
        for x in program.buffers:
            receivers = [to for to in program.broadcast_of(x)[1] if at in (None, to)]
            nbytes, cause = x.value.nbytes(program.mesh), "new values of buffers"
            yield Sent((program.axis,), "send_recv", "update", cause, nbytes, len(receivers))
    for coordinate in range(stages) if at is None else (at,):
        rank_here = rank_of_coordinate(program.mesh, program.axis, coordinate)
        for messages in registered("runtime", "messages", program.features):
            for axes, kind, cause, nbytes in messages(program, rank_here, moved):
                yield Sent(axes, kind, "update", cause, nbytes, 1)


def gathered_again(stage: Stage, bucket: str) -> int:
    """Count the gathers of a ZeRO 3 bucket in a stage's backward; 0 if, say, it has only biases."""
    graphs = stage.joint.graphs.values() if stage.joint is not None else ()
    gathers = (n for g in graphs for n in g.find_nodes(op="call_function", target=ops.regather_start))
    return sum(n.args[1] == bucket for n in gathers)


def host_rows(cost: Cost) -> list[Row]:
    """Return rows of the copies of `checkpoint: {offload: cpu}`, as a dry run recorded them."""
    cause_of = _causes(cost.program)
    sizes: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
    for r in (s.record for of_rank in cost.spans() for s in of_rank if s.record.axes == HOST_LINK):
        sizes[r.direction, r.kind, cause_of(r)].append(r.bytes)
    axes = "+".join(HOST_LINK)
    rows = [Row(axes, kind, way, cause, len(nbytes), sum(nbytes)) for (way, kind, cause), nbytes in sizes.items()]
    return sorted(rows, key=lambda r: r.direction != "forward")


@dataclass(frozen=True)
class Timed:
    """The seconds of a row's collectives on a device. exposed: seconds in which the rank waits for them.

    behind: the work that overlaps with them for the longest time; "" if there is none.
    """

    seconds: float
    exposed: float
    behind: str


def timed(cost: Cost) -> dict[tuple[str, str, str, str], Timed]:
    """Simulate streams; return when collectives run: {(axes, direction, kind, cause) of a row: Timed}.

    Messages between stages are not in it: `--schedule` shows which stage waits.
    """
    cause_of = _causes(cost.program)
    spent: defaultdict[Any, float] = defaultdict(float)
    exposed: defaultdict[Any, float] = defaultdict(float)
    behind: dict[Any, defaultdict[str, float]] = {}
    for span in (s for of_rank in cost.spans() for s in of_rank if s.record.kind != "send_recv"):
        r = span.record
        key = (r.axis, r.direction, r.kind, cause_of(r))
        spent[key] += span.seconds
        exposed[key] += span.exposed
        for (way, op), together in span.behind.items():
            behind.setdefault(key, defaultdict(float))[_work(cost, way, op)] += together
    most = {key: max(beside, key=beside.__getitem__) for key, beside in behind.items()}
    return {key: Timed(spent[key], exposed[key], most.get(key, "")) for key in spent}


def _work(cost: Cost, way: str, op: str) -> str:
    """Return the part of a step, with the module of an op: `backward of h.*.fc`."""
    module = cost.sources[op].module if op in cost.sources else ""
    return f"{way} of {re.sub(r'(?<=[.])[0-9]+(?=[.]|$)', '*', module)}" if module else way


def _causes(program: Program) -> Callable[[CommRecord], str]:
    """Return a function that finds the cause of a collective that ran, as `comm_rows` names it."""
    nodes = {n.name: n for s in program.stages for n in s.graph.nodes if "collective" in n.meta}
    buckets = {f"bucket{i}" for i in range(len(program.buckets))}
    regions = {r.name: r.cause for r in program.regions}
    of_features: dict[str, str] = {}
    for causes in registered("runtime", "CAUSES", program.features):
        of_features |= causes

    def cause(r: CommRecord) -> str:
        if r.axes == HOST_LINK:
            return regions.get(r.tag) or r.tag
        if r.tag == "loss":
            return "the loss, to every rank"
        if r.tag == "outputs":
            return "outputs beside the loss"
        if r.tag in buckets and r.kind != "all_gather":
            return "gradients, in buckets"
        if r.tag in buckets and r.direction == "update":
            return "updated parameters"
        if r.tag in nodes:
            return str(nodes[r.tag].meta["collective"].cause or IMPLICIT)
        return of_features.get(r.tag.rstrip("0123456789"), r.tag)

    return cause


def comm_table(program: Program, cost: Cost | None = None) -> str:
    """Format the rows as a table, with sums; notes follow if some collectives have no annotation.

    With a cost: also copies to the host; times on its device, exposed ones, and the work that hides the rest.
    """
    rows = [*comm_rows(program), *(host_rows(cost) if cost is not None else [])]
    if not rows:
        return "no collectives: one rank"
    times = timed(cost) if cost is not None else {}
    head = ["axis", "direction", "collective", "a step", "bytes, all stages" if program.axis else "bytes a rank"]
    lines = [[*head, *(["takes", "exposed", "behind"] if cost is not None else []), "cause"]]
    for r in rows:
        t = times.get((r.axes, r.direction, r.kind, r.cause))
        cells = [seconds(t.seconds), seconds(t.exposed), t.behind] if t is not None else [""] * 3
        row = [r.axes, r.direction, r.kind, str(r.count), size(r.bytes)]
        lines.append([*row, *(cells if cost is not None else []), r.cause])
    for axes in dict.fromkeys(r.axes for r in rows):
        its_rows = [r for r in rows if r.axes == axes]
        of_axes = [t for key, t in times.items() if key[0] == axes]
        cells = [seconds(sum(t.seconds for t in of_axes)), seconds(sum(t.exposed for t in of_axes)), ""]
        row = [axes, "", "in all", str(sum(r.count for r in its_rows)), size(sum(r.bytes for r in its_rows))]
        lines.append([*row, *(cells if cost is not None else []), ""])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    text = []
    for line in lines:
        cells = [c.rjust(w) if 3 <= i <= 6 else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=False))]
        text.append("  ".join([*cells, line[-1]]).rstrip())
    notes = note_lines(program.notes) if any(r.cause == IMPLICIT for r in rows) else []
    if cost is not None:
        notes = [f"on {cost.device.name}: {cost.step_words}", *notes]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:], *notes])


def bytes_sent(program: Program) -> int:
    """Return the bytes of a step's collectives on the rank with the most."""
    ranks = range(program.mesh.size(program.axis)) if program.axis else (None,)
    return max(sum(r.bytes for r in comm_rows(program, at)) for at in ranks)
