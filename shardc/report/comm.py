"""The collectives of one training step, by axis and cause."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shardc.folded_messages import note_lines
from shardc.ir.outputs import sum_axes, summed
from shardc.ir.program import Program, Value
from shardc.ir.units import size
from shardc.runtime import ops

IMPLICIT = "no annotation implies it"


@dataclass(frozen=True)
class Row:
    """Collectives of one kind over the same axes for one cause: their number a step, and their bytes on one rank; for a
    pipeline, summed over one rank of each coordinate.
    """

    axes: str
    kind: str
    direction: str
    cause: str
    count: int
    bytes: int


def comm_rows(program: Program, at: int | None = None) -> list[Row]:
    """Rows by axes, direction and cause, of a step with all its microbatches; gradient buckets come last in backward.

    at: of a pipeline, the coordinate of the one rank that is counted (what passes between stages counts where it is
    received); None: one rank of each coordinate, added up.

    At ZeRO 3 every bucket is counted as gathered again for backward, which one of biases alone, say, is not.
    """
    sizes_by_row: dict[tuple[str, str, str, str], list[int]] = {}

    def add(axes: tuple[str, ...], kind: str, direction: str, cause: str, nbytes: int, times: int) -> None:
        if kind != "none" and times:
            sizes_by_row.setdefault(("+".join(axes), direction, kind, cause or IMPLICIT), []).extend([nbytes] * times)

    m = program.microbatches
    rank_of = program.schedule.placement if program.schedule is not None else (0,)
    sender = {name: rank_of[i] for i, stage in enumerate(program.stages) for name in stage.sends}
    for i, stage in enumerate(program.stages):
        for node in stage.graph.nodes if at in (None, rank_of[i]) else ():
            c = node.meta.get("collective")
            if sender.get(node.name) == rank_of[i] and node.op == "placeholder":
                continue  # from another stage of the same rank
            if c is not None and node.target is not ops.gather_start:
                add(c.axes, c.kind, "forward", c.cause, c.bytes, m)
                add(c.axes, c.kind, "recompute", c.cause, c.bytes, m * node.meta.get("again", 0))
                add(c.axes, c.backward, "backward", c.cause, c.bytes, m)
            elif c is not None:
                b = program.buckets[int(str(node.args[1]).removeprefix("bucket"))]
                add(c.axes, c.kind, "forward", c.cause, c.bytes, 1 if b.keep else m)
                add(c.axes, c.kind, "backward", c.cause, c.bytes, 0 if b.keep else m)
    for b in program.buckets:
        numbers = sum(math.prod(program.param(n).value.local_shape(program.mesh)) for n in b.params)
        n = program.mesh.size(b.shard) if b.zero else 1
        padded = -(-numbers // n) * n
        rest = tuple(a for a in b.axes if a != b.shard) if b.zero else b.axes
        mine = [s for s in b.stages if at in (None, rank_of[s])]
        ranks = len({rank_of[s] for s in mine})
        if b.zero and b.shard in b.axes:
            times = m * len(mine) if b.zero == 3 and not b.keep else ranks
            add((b.shard,), "reduce_scatter", "backward", "gradients, in buckets", padded * b.dtype.itemsize, times)
        if rest:
            add(rest, "all_reduce", "backward", "gradients, in buckets", padded // n * b.dtype.itemsize, ranks)
        if b.zero in (1, 2):
            dtype = b.compute or program.param(b.params[0]).dtype
            add((b.shard,), "all_gather", "update", "updated parameters", padded * dtype.itemsize, ranks)
    stages = program.mesh.size(program.axis) if program.axis else 1
    if axes := sum_axes(program.outputs, program.mesh, program.axis):
        nbytes = 8 * sum(math.prod(o.shape) for o in summed(program.outputs, program.axis))
        add(axes, "all_reduce", "forward", "outputs beside the loss", nbytes, stages if at is None else 1)
    for o in program.outputs if program.axis else ():
        if not o.small:
            nbytes = Value(o.shape, o.dtype, False, o.layout).nbytes(program.mesh)
            receivers = [c for c in range(stages) if c != rank_of[o.stage] and at in (None, c)]
            cause = f"output {o.name!r}, to every stage"
            add((program.axis,), "send_recv", "forward", cause, nbytes, len(receivers))
    if program.axis and program.mesh.size(program.axis) > 1:
        returned: Any = program.graph.output_node().args[0]
        nbytes = returned[0].meta["value"].dtype.itemsize
        ranks = program.mesh.size(program.axis) if at is None else 1
        add((program.axis,), "all_reduce", "forward", "the loss, to every rank", nbytes, ranks)
        for x in program.buffers:
            receivers = [to for to in program.broadcast_of(x)[1] if at in (None, to)]
            nbytes = x.value.nbytes(program.mesh)
            add((program.axis,), "send_recv", "update", "new values of buffers", nbytes, len(receivers))
    rank = {"forward": 0, "recompute": 1, "backward": 2, "update": 3}
    rows = [
        Row(axes, kind, way, cause, len(sizes), sum(sizes)) for (axes, way, kind, cause), sizes in sizes_by_row.items()
    ]
    return sorted(rows, key=lambda r: (r.axes, rank[r.direction]))


def comm_table(program: Program) -> str:
    """The rows as a table of plain text, with a sum per axis; followed by the program's notes, if there are collectives
    that no annotation requires.
    """
    rows = comm_rows(program)
    if not rows:
        return "no collectives: one rank"
    lines = [
        ("axis", "direction", "collective", "a step", "bytes, all stages" if program.axis else "bytes a rank", "cause")
    ]
    for r in rows:
        lines.append((r.axes, r.direction, r.kind, str(r.count), size(r.bytes), r.cause))
    for axes in dict.fromkeys(r.axes for r in rows):
        same = [r for r in rows if r.axes == axes]
        lines.append((axes, "", "in all", str(sum(r.count for r in same)), size(sum(r.bytes for r in same)), ""))
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    text = []
    for line in lines:
        cells = [c.rjust(w) if i in (3, 4) else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=False))]
        text.append("  ".join([*cells, line[5]]).rstrip())
    notes = note_lines(program.notes) if any(r.cause == IMPLICIT for r in rows) else []
    return "\n".join([text[0], "-" * len(text[0]), *text[1:], *notes])


def bytes_sent(program: Program) -> int:
    """Bytes of the collectives of a step, of the rank that has most."""
    ranks = range(program.mesh.size(program.axis)) if program.axis else (None,)
    return max(sum(r.bytes for r in comm_rows(program, at)) for at in ranks)
