"""Complete a schedule of F, B, I and W: add its sends and receives, a REDUCE for each stage, STEP.

All events get one total order, and each rank's list is its part of it. An action is sorted by its end time where every
F, I and W takes 1, then by its rank; its sends follow directly, on both ranks. With sends and receives in one order,
each at one moment on both its ranks, there is no deadlock under any buffering, and every pair of ranks sees one order
(proof.py). As actions are sorted by their end, a receive comes before the action that its rank runs while the value is
made: it is posted ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardc.runtime.schedule.actions import COMPUTE, SENDS, Action, Edges, Schedule, computed, links
from shardc.runtime.schedule.timeline import timeline

#: Maximal number of pending sends of a rank, each of all values of one edge. More would keep more activations alive.
IN_FLIGHT = 2


def fill(schedule: Schedule, edges: Edges | None = None) -> Schedule:
    """Complete a proven schedule. Existing sends and receives, REDUCE, or STEP stay as they are."""
    known = {a.kind for row in schedule.actions for a in computed(row)}
    actions = schedule.actions
    if not known & SENDS:
        actions = _with_sends(schedule, edges)
    if "REDUCE" not in known and known & {"B", "W"}:
        actions = tuple(map(_with_reduce, actions))
    if "STEP" not in known and known & {"B", "W"}:
        actions = tuple((*row, Action("STEP")) for row in actions)
    return schedule if actions == schedule.actions else replace(schedule, actions=actions, where=())


def _with_sends(schedule: Schedule, edges: Edges | None) -> tuple[tuple[Action, ...], ...]:
    users: dict[int, list[int]] = {}  # by stage: the stages on other ranks that use its values
    sources: dict[int, list[int]] = {}  # ... whose values it uses
    for link in links(edges, schedule.stages):
        if schedule.placement[link.source] != schedule.placement[link.target]:
            users.setdefault(link.source, []).append(link.target)
            if link.gradient:
                sources.setdefault(link.target, []).append(link.source)
    listed: list[list[tuple[tuple[float, int, int], Action]]] = [[] for _ in schedule.actions]
    clock = timeline(schedule, edges=edges)
    for rank, row in enumerate(schedule.actions):
        ends = iter(clock.slots[rank])
        end = 0.0
        for a in row:
            if a.kind in COMPUTE:
                end = next(ends).end
            listed[rank].append(((end, rank, 0 if a.kind in COMPUTE else 2), a))
            for part in a.parts:
                peers = users if part.kind == "F" else sources if part.kind in ("B", "I") else {}
                for peer in peers.get(part.stage, ()):
                    send = Action("SEND_F" if part.kind == "F" else "SEND_B", part.stage, part.microbatch, peer)
                    listed[rank].append(((end, rank, 1), send))
                    listed[schedule.placement[peer]].append(((end, rank, 1), send.other_end()))
    return tuple(tuple(a for _, a in sorted(row, key=lambda x: x[0])) for row in listed)


def _with_reduce(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Add REDUCE after the last backward of each stage, and after the sends of that."""
    last = {p.stage: i for i, a in enumerate(actions) for p in a.parts if p.kind in ("B", "W")}
    ordered: list[Action] = []
    due: list[Action] = []
    for i, a in enumerate(actions):
        if a.kind not in SENDS:
            ordered += due
            due = []
        ordered.append(a)
        due += [Action("REDUCE", p.stage) for p in a.parts if p.kind in ("B", "W") and last[p.stage] == i]
    return (*ordered, *due)
