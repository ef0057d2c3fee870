"""List the collectives of a training step by axis and cause, and its copies to the host and back, from a dry run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shardc.cost import Cost
from shardc.ir.metadata import HOST_LINK, CommRecord
from shardc.ir.program import Program
from shardc.ir.units import seconds, size
from shardc.layer_names import note_lines
from shardc.optional import registered
from shardc.report.aligned import aligned

IMPLICIT = "no annotation implies it"
#: The directions of collectives, in the order in which they are shown.
DIRECTIONS = ("forward", "recompute", "backward", "update")
K = TypeVar("K", bound=Hashable)
#: The tag of a record (the name of a node or of a bucket), with "send_recv" between stages, or the kind of a host copy.
Tag = tuple[str, str]


def tag(r: CommRecord) -> Tag:
    return r.tag, r.kind if r.kind == "send_recv" or r.axes == HOST_LINK else ""


@dataclass
class Sent:
    """Collectives of a step, added up over one rank of each coordinate of the pipeline.

    bytes: of all; largest: of one. seconds: on the device; exposed: in which a rank waits for them (both None for
    messages between stages: `--schedule` shows which stage waits). behind: the work that overlaps with them for the
    longest time, e.g. "backward of h.*.fc"; "" if there is none. tags: of their records.
    """

    count: int = 0
    bytes: int = 0
    largest: int = 0
    seconds: float | None = None
    exposed: float | None = None
    behind: str = ""
    tags: set[Tag] = field(default_factory=set)


@dataclass
class Row(Sent):
    """The collectives of one kind, axes, direction and cause in a step."""

    axes: str = ""
    direction: str = ""
    kind: str = ""
    cause: str = ""

    def to_json(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name not in ("largest", "tags")}


def added_up(cost: Cost, key: Callable[[CommRecord], K]) -> dict[K, Sent]:
    """Add up the collectives of a step that have the same key."""
    sums: defaultdict[K, Sent] = defaultdict(Sent)
    beside: defaultdict[K, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in (s for of_rank in cost.spans() for s in of_rank):
        r = span.record
        s = sums[key(r)]
        s.count, s.bytes, s.largest = s.count + 1, s.bytes + r.bytes, max(s.largest, r.bytes)
        s.tags.add(tag(r))
        if r.kind != "send_recv":
            s.seconds, s.exposed = (s.seconds or 0.0) + span.seconds, (s.exposed or 0.0) + span.exposed
            for (way, op), together in span.behind.items():
                beside[key(r)][_work(cost, way, op)] += together
    for k, works in beside.items():
        sums[k].behind = max(works, key=works.__getitem__)
    return dict(sums)


def _work(cost: Cost, way: str, op: str) -> str:
    """Return the part of a step, with the module of an op: `backward of h.*.fc`."""
    module = cost.sources[op].module if op in cost.sources else ""
    return f"{way} of {re.sub(r'(?<=[.])[0-9]+(?=[.]|$)', '*', module)}" if module else way


def comm_rows(cost: Cost) -> list[Row]:
    """Return the rows of a step with all its microbatches, by axes and direction; copies to the host come last."""
    cause = _causes(cost.program)
    sums = added_up(cost, lambda r: (r.axis, r.direction, r.kind, cause(r)))
    rows = [Row(**vars(s), axes=key[0], direction=key[1], kind=key[2], cause=key[3]) for key, s in sums.items()]
    return sorted(rows, key=lambda r: (r.axes == "+".join(HOST_LINK), r.axes, DIRECTIONS.index(r.direction)))


def _causes(program: Program) -> Callable[[CommRecord], str]:
    """Return a function that finds the cause of a collective that ran."""
    stages = [n for s in program.stages for n in s.graph.nodes if "collective" in n.meta]
    # a placeholder of a later stage may have the name of the collective whose result it receives
    nodes = {(n.name, "send_recv" if n.op == "placeholder" else ""): n.meta["collective"] for n in stages}
    buckets = {f"bucket{i}": b for i, b in enumerate(program.buckets)}
    regions = {r.name: r.cause for r in program.regions}
    others = {"loss": "the loss, to every rank", "outputs": "outputs beside the loss"}
    others |= {b.name: "new values of buffers" for b in program.buffers}
    others |= {o.name: f"output {o.name!r}, to every stage" for o in program.outputs}
    for of_feature in registered("runtime", "CAUSES", program.features):
        others |= of_feature

    def cause(r: CommRecord) -> str:
        if r.axes == HOST_LINK:
            return regions.get(r.tag) or r.tag
        b = buckets.get(r.tag)
        scales = b is not None and r.kind == "all_reduce" and b.shard in r.axes  # of a gather in 8 bits
        if b is not None and r.direction == "update":
            return "updated parameters"
        if b is not None and r.kind != "all_gather" and not scales:
            return "gradients, in buckets"
        if (c := nodes.get(tag(r))) is not None:
            return (c.cause or IMPLICIT) + (": scales" if scales else "")
        return others.get(r.tag) or others.get(r.tag.rstrip("0123456789"), r.tag)

    return cause


def comm_table(cost: Cost) -> str:
    """Format the rows as a table, with sums by axes; notes follow if some collectives have no annotation."""
    rows = comm_rows(cost)
    if not rows:
        return "no collectives: one rank"
    size_of = "bytes, all stages" if cost.program.axis else "bytes a rank"
    lines = [["axis", "direction", "collective", "a step", size_of, "takes", "exposed", "behind", "cause"]]
    for r in rows:
        times = [seconds(x) if x is not None else "" for x in (r.seconds, r.exposed)]
        lines.append([r.axes, r.direction, r.kind, str(r.count), size(r.bytes), *times])
        lines[-1] += [r.behind, r.cause]
    for axes in dict.fromkeys(r.axes for r in rows):
        mine = [r for r in rows if r.axes == axes]
        times = [seconds(sum(x)) for x in ([s.seconds or 0 for s in mine], [s.exposed or 0 for s in mine])]
        count, nbytes = sum(s.count for s in mine), sum(s.bytes for s in mine)
        lines.append([axes, "", "in all", str(count), size(nbytes), *times, "", ""])
    first, *text = aligned(lines, "<<<>>>><<")
    notes = note_lines(cost.program.notes) if any(r.cause == IMPLICIT for r in rows) else []
    head = f"on {cost.device.name}: {cost.step_words}"
    return "\n".join([first, "-" * len(first), *text, head, *notes])
