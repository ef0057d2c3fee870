"""Compute the page's view of a step on a device: computation, messages and memory over time."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

from shardc.cost import Cost
from shardc.cost.recorded import KINDS, parts
from shardc.cost.streams import Streams
from shardc.ir.metadata import CommRecord
from shardc.report.cost import op_place, part_name, peak_place
from shardc.runtime.schedule import Slot
from shardc.runtime.schedule.actions import COMPUTE, PAIRS

#: The largest number of a rank's collectives that are drawn: the first ones of a step.
SPANS = 6000
#: Returns the number of the page's message that a collective belongs to, or None; in a trace, its tag.
Number = Callable[[CommRecord], int | str | None]


def timeline(cost: Cost, number: Number) -> dict[str, Any]:
    """Return {end, bubble, rows: one for each rank of `cost.ranks`}.

    A row has slots [action, microbatch, begin, end, stage], computing [part, begin, end], and for each axis the
    collectives [begin, end, exposed, message or -1, direction, kind]. Times are whole nanoseconds. In a pipeline they
    are times of all ranks: a rank's own clock, which does not wait for other stages, is shifted to its actions.
    """
    program, schedule = cost.program, cost.timeline.schedule
    rows = []
    for i, (r, clock) in enumerate(zip(cost.dry_runs, cost.streams, strict=True)):
        actions = (action for action, _ in parts(r, schedule.actions[r.at]))
        ran, slots = [*zip(actions, clock.parts, strict=True)], cost.timeline.slots[i]
        at = _Wall([times for a, (_, *times) in ran if a is not None and a.kind in COMPUTE], slots)
        rows.append(
            {
                "rank": r.rank,
                "at": r.at,
                "stages": list(schedule.stages_of(i)) if program.axis else [0],
                "bubble": cost.timeline.bubble(i),
                "live": cost.timeline.live[i] if program.axis else 0,
                "slots": [
                    [a.kind, a.microbatch, *map(_ns, times), a.stage, *(a.other if a.kind in PAIRS else ())]
                    for a, *times in ((x.action, x.start, x.end) for x in slots)
                ],
                "tail": [
                    [name, at.begin(begin), at.begin(begin) + _ns(end - begin)]
                    for a, (name, begin, end) in ran
                    if a is None and end > begin
                ],
                "computing": [
                    [part, at.begin(begin), at.end(end)]
                    for part, *times in clock.computing
                    for begin, end in at.cut(*times)
                ],
                "streams": _streams(clock, number, at),
                "left_out": max(len(clock.spans) - SPANS, 0),
                "waits": {axes: _ns(s) for axes, s in cost.ranks[i].exposed.items() if s > 0},
            }
        )
    return {"end": _ns(cost.step_seconds), "bubble": cost.bubble, "rows": rows}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _streams(clock: Streams, number: Number, at: _Wall) -> dict[str, list[list[Any]]]:
    streams: dict[str, list[list[Any]]] = {}
    for span in clock.spans[:SPANS]:
        message = number(span.record)
        begin = at.begin(span.begin)
        end = max(at.end(span.end), begin)
        exposed = min(_ns(span.exposed), end - begin)
        bar = [begin, end, exposed, -1 if message is None else message, span.record.direction, span.record.kind]
        streams.setdefault(span.record.axis, []).append(bar)
    return streams


class _Wall:
    """Converts times of a rank's own clock to the time of all ranks, in nanoseconds.

    ran: begin and end of the rank's actions by its own clock; slots: when they run. A moment between two actions is the
    end of one and the start of the other; these differ in the time of all ranks.
    """

    def __init__(self, ran: Sequence[Sequence[float]], slots: Sequence[Slot]) -> None:
        self._own, self._wall, self._rate = [0.0], [0.0], [1.0]
        for (begin, end), slot in zip(ran, slots, strict=True):
            self._own += [begin, end]
            self._wall += [slot.start, slot.end]
            self._rate += [(slot.end - slot.start) / (end - begin) if end > begin else 1.0, 1.0]

    def begin(self, t: float) -> int:
        """Convert the time at which something begins."""
        return self._at(t, max(bisect.bisect_right(self._own, t) - 1, 0))

    def end(self, t: float) -> int:
        return self._at(t, max(bisect.bisect_left(self._own, t) - 1, 0))

    def _at(self, t: float, i: int) -> int:
        return _ns(self._wall[i] + (t - self._own[i]) * self._rate[i])

    def cut(self, begin: float, end: float) -> list[tuple[float, float]]:
        """Split a stretch of time at the borders of actions."""
        inner = self._own[bisect.bisect_right(self._own, begin) : bisect.bisect_left(self._own, end)]
        return [(a, b) for a, b in pairwise([begin, *inner, end]) if b > a]


def memory(cost: Cost) -> dict[str, Any]:
    """Return {limit, panels}: live bytes over a step by kind. Ranks with the same memory share a panel."""
    panels: dict[object, dict[str, Any]] = {}
    for r in cost.ranks:
        m = r.memory
        key = tuple(sorted(m.kinds.items())), tuple(tuple(sorted(p.live.items())) for p in m.curve)
        if key in panels:
            panels[key]["at"].append(r.at)
            continue
        lengths = [(part_name(part, cost), len(list(points))) for part, points in groupby(m.curve, lambda p: p.part)]
        begins = accumulate((n for _, n in lengths), initial=0)
        places = [op_place(cost, p.op) if p.op else "" for p in m.curve]
        names = {name: i for i, name in enumerate(dict.fromkeys(places))}
        panels[key] = {
            "at": [r.at],
            "rank": r.rank,
            "peak": m.peak,
            "kinds": dict(m.kinds),
            "where": peak_place(cost, m),
            "resident": dict(m.resident),
            "host": m.host,
            "curve": {k: [p.live.get(k, 0) for p in m.curve] for k in KINDS if any(p.live.get(k) for p in m.curve)},
            "parts": [[name, begin] for (name, _), begin in zip(lengths, begins, strict=False)],
            "names": list(names),
            "ops": [names[p] for p in places],
        }
    return {"limit": cost.device.memory, "panels": list(panels.values())}
