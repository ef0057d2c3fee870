"""List the collectives of a training step by axis and cause, and its copies to the host and back, from a dry run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from shardc.cost import Cost
from shardc.ir.metadata import HOST_LINK, CommRecord
from shardc.ir.units import seconds, size
from shardc.layer_names import note_lines
from shardc.report.aligned import aligned
from shardc.verify.simulate import IMPLICIT, Tag, causes, tag

#: The directions of collectives, in the order in which they are shown.
DIRECTIONS = ("forward", "recompute", "backward", "update")
K = TypeVar("K", bound=Hashable)


@dataclass
class Row:
    """The collectives of one kind, axes, direction and cause in a step, added up over one rank of each pipeline stage.

    seconds: on the device; exposed: in which a rank waits for them (both None for messages between stages: `--schedule`
    shows which stage waits). behind: the work that overlaps with them for the longest time, e.g. "backward of h.*.fc";
    "" if there is none. tags: of their records.
    """

    axes: str
    direction: str
    kind: str
    cause: str = ""
    count: int = 0
    bytes: int = 0
    seconds: float | None = None
    exposed: float | None = None
    behind: str = ""
    tags: set[Tag] = field(default_factory=set)

    def to_json(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "tags"}


def added_up(cost: Cost, of: Callable[[CommRecord], K]) -> list[tuple[K, Row]]:
    """Add up the collectives of a step that have the same kind, axes, direction and `of`, by direction."""
    sums: dict[tuple[K, str, str, str], Row] = {}
    beside: defaultdict[tuple[K, str, str, str], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in (s for streams in cost.streams for s in streams.spans):
        r = span.record
        key = of(r), r.axis, r.direction, r.kind
        s = sums.setdefault(key, Row(*key[1:]))
        s.count, s.bytes = s.count + 1, s.bytes + r.bytes
        s.tags.add(tag(r))
        if r.kind != "send_recv":
            s.seconds, s.exposed = (s.seconds or 0.0) + span.seconds, (s.exposed or 0.0) + span.exposed
            for (way, op), together in span.behind.items():
                beside[key][_work(cost, way, op)] += together
    for key, works in beside.items():
        sums[key].behind = max(works, key=works.__getitem__)
    return sorted(((key[0], row) for key, row in sums.items()), key=lambda x: DIRECTIONS.index(x[1].direction))


def _work(cost: Cost, way: str, op: str) -> str:
    """Return the part of a step, with the module of an op: `backward of h.*.fc`."""
    module = cost.sources[op].module if op in cost.sources else ""
    return f"{way} of {re.sub(r'(?<=[.])[0-9]+(?=[.]|$)', '*', module)}" if module else way


def comm_rows(cost: Cost) -> list[Row]:
    """Return the rows of a step with all its microbatches, by axes and direction; copies to the host come last."""
    by_cause = [replace(row, cause=cause) for cause, row in added_up(cost, causes(cost.program))]
    return sorted(by_cause, key=lambda r: (r.axes == "+".join(HOST_LINK), r.axes))


def comm_table(cost: Cost) -> str:
    """Format the rows as a table, with sums by axes; notes follow if some collectives have no annotation."""
    rows = comm_rows(cost)
    if not rows:
        return "no collectives: one rank"
    size_of = "bytes, all stages" if cost.program.axis else "bytes a rank"
    lines = [["axis", "direction", "collective", "a step", size_of, "takes", "exposed", "behind", "cause"]]
    lines += [[r.axes, r.direction, r.kind, *_figures([r]), r.behind, r.cause] for r in rows]
    for axes in dict.fromkeys(r.axes for r in rows):
        lines.append([axes, "", "in all", *_figures([r for r in rows if r.axes == axes]), "", ""])
    first, *text = aligned(lines, "<<<>>>><<")
    notes = note_lines(cost.program.notes) if any(r.cause == IMPLICIT for r in rows) else []
    head = f"on {cost.device.name}: {cost.step_words}"
    return "\n".join([first, "-" * len(first), *text, head, *notes])


def _figures(rows: Sequence[Row]) -> list[str]:
    """Return the sums of rows: their number, bytes, seconds, exposed seconds; "" for those that are not known."""
    times = ([r.seconds for r in rows], [r.exposed for r in rows])
    shown = [seconds(sum(x or 0 for x in each)) if any(x is not None for x in each) else "" for each in times]
    return [str(sum(r.count for r in rows)), size(sum(r.bytes for r in rows)), *shown]
