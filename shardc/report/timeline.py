"""Draw the timeline of a pipeline's schedule as text and JSON: when each rank computes or waits.

The page of `inspect --html` draws it with shardc/report/page/timeline.js.

rank 0  stage 0  F0 F1 F2 F3 .........B0--- F4 B1--- ...      27.3 %  4
                 microbatch 0 forward; nothing to do; its backward
"""

from __future__ import annotations

from typing import Any

from rich.text import Text

from shardc.runtime.schedule import Action, Schedule, Slot, Timeline

#: One colour for each kind.
_INKS = {
    "F": "black on bright_blue",
    "FB": "black on bright_magenta",
    "FF": "black on bright_magenta",
    "B": "black on green",
    "I": "black on cyan",
    "W": "black on yellow",
}
_NAMES = {
    "F": "forward",
    "FB": "forward beside backward",
    "FF": "forward beside forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
}
#: How kinds are written.
_LETTERS = {"FB": "F+B", "FF": "F+F"}


def text(t: Timeline, *, width: int | None = None) -> Text:
    """Draw a timeline, one row for each rank. width: columns to fit in; None: every action is shown with its name."""
    s = t.schedule
    heads = [f"rank {r}  {_stages(s, r)}" for r in range(s.ranks)]
    tails = [f"{100 * t.bubble(r):5.1f} %  {live:5}" for r, live in enumerate(t.live)]
    margin = max(map(len, heads)) + 2
    every = [slot for row in t.slots for slot in row]
    short = 0.1 * max((slot.end - slot.start for slot in every), default=0.0)  # whose names need not fit
    columns = ((len(_name(s, x)) + 1) / (x.end - x.start) for x in every if x.end - x.start > short)
    scale = max(columns, default=1.0)
    if width is not None:
        scale = min(scale, max(width - margin - 2 - max(map(len, tails)), 10) / (t.end or 1))
    out = Text(f"{_title(t)}\n\n", no_wrap=True)
    out.append(f"{'':{margin}}{'time':{round(t.end * scale)}}   bubble   live\n", "dim")
    for head, slots, tail in zip(heads, t.slots, tails, strict=True):
        out.append(head.ljust(margin))
        at = 0
        for slot in slots:
            begin, end = round(slot.start * scale), round(slot.end * scale)
            out.append("." * (begin - at), "dim")
            out.append(_cell(_name(s, slot), slot.action, end - begin), _INKS[slot.action.kind])
            at = end
        out.append("." * (round(t.end * scale) - at), "dim")
        out.append(f"  {tail}\n")
    stage = "stage, " if _several(s) else ""
    out.append(
        f"\n{stage}kind, microbatch: {', '.join(f'{_LETTERS.get(k, k)} {_NAMES[k]}' for k in _kinds(t))}\n", "dim"
    )
    if any((slot.end - slot.start) * scale < 1 for row in t.slots for slot in row):
        out.append("some take less than a column: --html FILE draws them all\n", "dim")
    return out


def to_json(t: Timeline) -> dict[str, Any]:
    """Return the timeline, JSON-able: the schedule's actions, bubbles, live activations, computation."""
    s = t.schedule
    return {
        "name": s.name,
        "stages": s.stages,
        "ranks": s.ranks,
        "microbatches": s.microbatches,
        "placement": list(s.placement),
        "actions": [[str(a) for a in row] for row in s.actions],
        "live": list(t.live),
        "bubble": t.bubble(),
        "bubbles": [t.bubble(r) for r in range(s.ranks)],
        "end": t.end,
        "slots": [[[str(slot.action), slot.start, slot.end] for slot in row] for row in t.slots],
    }


def _title(t: Timeline) -> str:
    return f"{t.schedule.name}: {t.schedule.sizes}; bubble {100 * t.bubble():.1f} %"


def _stages(s: Schedule, rank: int) -> str:
    stages = s.stages_of(rank)
    return f"stage{'s' if len(stages) != 1 else ''} {', '.join(map(str, stages))}"


def _kinds(t: Timeline) -> list[str]:
    """Return the kinds of actions that occur, forward first."""
    present = {slot.action.kind for row in t.slots for slot in row}
    return [k for k in _NAMES if k in present]


def _several(s: Schedule) -> bool:
    """Return whether a rank has several stages. If so, an action is shown with its stage."""
    return len(set(s.placement)) < s.stages


def _name(s: Schedule, slot: Slot) -> str:
    a = slot.action
    return str(a) if _several(s) else _short(a)


def _short(a: Action) -> str:
    """Return the name of an action without its stage."""
    return "+".join(f"{p.kind}{p.microbatch}" for p in a.parts)


def _cell(name: str, a: Action, columns: int) -> str:
    """Fit an action's name into `columns`, shortened if needed, with a blank at the end."""
    name = next((n for n in (name, _short(a), _LETTERS.get(a.kind, a.kind)) if len(n) <= columns), "")
    return name if columns <= len(name) else f"{name.ljust(columns - 1, '-')} "
