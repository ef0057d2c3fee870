"""Draw the timeline of a pipeline's schedule as text and JSON: when each rank computes or waits.

The page of `inspect --html` draws it with shardc/report/page/timeline.js.

rank 0  stage 0  F0 F1 F2 F3 .........B0--- F4 B1--- ...      27.3 %  4
                 microbatch 0 forward; nothing to do; its backward
"""

from __future__ import annotations

from typing import Any

from rich.text import Text

from shardc.runtime.schedule import Action, Timeline

#: The kinds of actions: name, colours.
_KINDS = {
    "F": ("forward", "black on bright_blue"),
    "FB": ("forward beside backward", "black on bright_magenta"),
    "FF": ("forward beside forward", "black on bright_magenta"),
    "B": ("backward", "black on green"),
    "I": ("gradients of inputs", "black on cyan"),
    "W": ("gradients of weights", "black on yellow"),
}


def text(t: Timeline, *, width: int | None = None) -> Text:
    """Draw a timeline, one row for each rank. width: columns to fit in; None: every action is shown with its name."""
    s = t.schedule
    of_ranks = [s.stages_of(r) for r in range(s.ranks)]
    several = any(len(stages) > 1 for stages in of_ranks)  # then an action is shown with its stage
    heads = [f"rank {r}  stage{'s' * (len(x) != 1)} {', '.join(map(str, x))}" for r, x in enumerate(of_ranks)]
    tails = [f"{100 * t.bubble(r):5.1f} %  {live:5}" for r, live in enumerate(t.live)]
    margin = max(map(len, heads)) + 2
    every = [(_names(slot.action, staged=several), slot.end - slot.start) for row in t.slots for slot in row]
    short = 0.1 * max((long for _, long in every), default=0.0)  # whose names need not fit
    scale = max(((len(names[0]) + 1) / long for names, long in every if long > short), default=1.0)
    if width is not None:
        scale = min(scale, max(width - margin - 2 - max(map(len, tails)), 10) / (t.end or 1))
    out = Text(f"{s.name}: {s.sizes}; bubble {100 * t.bubble():.1f} %\n\n", no_wrap=True)
    out.append(f"{'':{margin}}{'time':{round(t.end * scale)}}   bubble   live\n", "dim")
    for head, slots, tail in zip(heads, t.slots, tails, strict=True):
        out.append(head.ljust(margin))
        at = 0
        for slot in slots:
            begin, end = round(slot.start * scale), round(slot.end * scale)
            out.append("." * (begin - at), "dim")
            name = next((n for n in _names(slot.action, staged=several) if len(n) <= end - begin), "")
            cell = name if end - begin <= len(name) else f"{name.ljust(end - begin - 1, '-')} "
            out.append(cell, _KINDS[slot.action.kind][1])
            at = end
        out.append("." * (round(t.end * scale) - at), "dim")
        out.append(f"  {tail}\n")
    present = {slot.action.kind for row in t.slots for slot in row}
    kinds = ", ".join(f"{'+'.join(kind)} {name}" for kind, (name, _) in _KINDS.items() if kind in present)
    out.append(f"\n{'stage, ' if several else ''}kind, microbatch: {kinds}\n", "dim")
    if any(long * scale < 1 for _, long in every):
        out.append("some take less than a column: --html FILE draws them all\n", "dim")
    return out


def _names(a: Action, *, staged: bool) -> tuple[str, str, str]:
    """Return the names of an action, the longest first: the last one is its kind. staged: the first has the stage."""
    short = "+".join(f"{p.kind}{p.microbatch}" for p in a.parts)
    return str(a) if staged else short, short, "+".join(a.kind)


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
