"""The timeline of a pipeline's schedule: who computes what when, and who waits; as text, as SVG, as JSON.

rank 0  stage 0  F0 F1 F2 F3 .........B0--- F4 B1--- ...      27.3 %  4
                 microbatch 0 forward; nothing to do; its backward
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from rich.text import Text
from torch import fx

from shardc.ir.graph import operands_of
from shardc.ir.program import Program
from shardc.ir.types import requires_grad
from shardc.machine.assumed import ASSUMED, STAGES, byte_seconds
from shardc.report.colours import BLUE, CYAN, GREEN, INK, LINE, SOFT, VIOLET, YELLOW
from shardc.report.svg import CHARACTER, Picture, cut, ticks
from shardc.rules.op_call import call_of
from shardc.rules.registry import flops_of, rank_seconds
from shardc.runtime import schedule as schedules
from shardc.runtime.schedule import Action, Costs, Schedule, Slot, Timeline

#: One colour a kind: of terminals, of SVG.
_INKS = {
    "F": "black on bright_blue",
    "FB": "black on bright_magenta",
    "FF": "black on bright_magenta",
    "B": "black on green",
    "I": "black on cyan",
    "W": "black on yellow",
}
_FILLS = {"F": BLUE, "FB": VIOLET, "FF": VIOLET, "B": GREEN, "I": CYAN, "W": YELLOW}
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


def timeline(program: Program) -> Timeline:
    """Of one step, with the costs of the program's stages. A program without a pipeline is one stage."""
    schedule = schedules.of(program)
    return schedules.timeline(schedule, costs(program), program.edges)


def costs(program: Program) -> Costs:
    """What each stage costs one rank, in seconds, as `shardc.passes.pipeline.cuts` counts. Backward of a product is a
    product for each operand that has a gradient: for weights in W.
    """
    found = [_cost(s.graph, program) for s in program.stages]
    transfer = {
        (e.source, e.target): byte_seconds("send_recv", STAGES) * sum(v.nbytes(program.mesh) for v in e.values)
        for e in program.edges
    }
    forward, inputs, weights = zip(*found, strict=True)
    return Costs(forward, inputs, weights, transfer)


def _cost(graph: fx.Graph, program: Program) -> tuple[float, float, float]:
    """(forward, gradients of inputs, gradients of weights)."""
    params = {p.name for p in program.params}
    of_weights: set[fx.Node] = {
        n for n in graph.find_nodes(op="placeholder") if n.name in params
    }  # what depends on nothing else
    forward = inputs = weights = 0.0
    for n in graph.nodes:
        if n.op != "call_function":
            continue
        if n.target is operator.getitem:
            of_weights |= {n} & {n for x in n.all_input_nodes if x in of_weights}
            continue
        if operands_of(n) and all(x in of_weights for x in operands_of(n)):
            of_weights.add(n)
        work = rank_seconds(n, program.mesh)
        forward += work
        wanting = [x in of_weights for x in operands_of(n) if requires_grad(x)]
        # an op that is no product reads its gradients once
        each = wanting if flops_of(call_of(n)) else [all(wanting)] if wanting else []
        weights += work * sum(each)
        inputs += work * (len(each) - sum(each))
    return forward, inputs, weights


def draw(
    schedule: Schedule, costs: Costs | None = None, edges: schedules.Edges | None = None, *, width: int | None = None
) -> Text:
    """A row a rank. costs: None: F, I and W take 1 each. width: columns to fit in; None: every action is shown with its
    name.
    """
    return text(schedules.timeline(schedule, costs, edges), width=width)


def text(t: Timeline, *, width: int | None = None) -> Text:
    s = t.schedule
    heads = [f"rank {r}  {_stages(s, r)}" for r in range(s.ranks)]
    tails = [f"{100 * t.bubble(r):5.1f} %  {live:5}" for r, live in enumerate(t.live)]
    margin = max(map(len, heads)) + 2
    scale = _scale(t, lambda slot: len(_name(s, slot)) + 1)
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
    if any((slot.end - slot.start) * scale < 1 for each in t.slots for slot in each):
        out.append("some take less than a column: --svg FILE draws them all\n", "dim")
    return out


#: Pixels of the picture, and of what is beside the rows.
WIDTH, _LEFT, _RIGHT = 1100, 130, 96


def svg(t: Timeline, *, seconds: bool = False) -> str:
    """A complete SVG file. Titles show each action's name, start and end. seconds: these are the costs, as those of a
    program; else the axis counts units.
    """
    s = t.schedule
    row, top = 26, 52
    scale = (WIDTH - _LEFT - _RIGHT) / (t.end or 1)
    right = WIDTH - _RIGHT
    picture = Picture(WIDTH, top + row * s.ranks + 78, _title(t))
    picture.text(12, 22, _title(t), size=14, bold=True)
    picture.text(right + 10, top - 8, "bubble, live", kind="soft")
    for rank, slots in enumerate(t.slots):
        y = top + row * rank
        picture.text(12, y + 15, f"rank {rank}")
        picture.text(64, y + 15, cut(_stages(s, rank), _LEFT - 64), size=10, kind="soft")
        picture.rect(_LEFT, y, right - _LEFT, row - 4, LINE, opacity=0.4)
        chunks = s.stages_of(rank)
        for slot in slots:
            _slot(picture, s, slot, y, row, scale, chunks.index(slot.action.stage) / len(chunks))
        picture.text(right + 10, y + 15, f"{100 * t.bubble(rank):.1f} %, {t.live[rank]}")
    _axis(picture, t, top + row * s.ranks, scale, seconds)
    picture.legend(_LEFT, top + row * s.ranks + 50, ((_FILLS[kind], _NAMES[kind]) for kind in _kinds(t)))
    return str(picture)


def _slot(picture: Picture, s: Schedule, slot: Slot, y: float, row: int, scale: float, later: float) -> None:
    """later: the share of the rank's stages that come before: they are paler."""
    x, wide, name = _LEFT + slot.start * scale, (slot.end - slot.start) * scale, _name(s, slot)
    shown = next(
        (n for n in (name, _LETTERS.get(slot.action.kind, slot.action.kind)) if CHARACTER * len(n) <= wide), ""
    )
    about = f"{slot.action}: {slot.start:g} to {slot.end:g}"
    fill = _FILLS[slot.action.kind]
    picture.rect(x, y, max(wide - 1, 0.5), row - 4, fill, opacity=1 - 0.45 * later, title=about, kind="slot")
    if shown:
        picture.text(x + wide / 2, y + 15, shown, size=11, anchor="middle", fill=INK)


def _axis(picture: Picture, t: Timeline, y: float, scale: float, seconds: bool) -> None:
    """Round times below the rows, and what they are times of."""
    factor, name = 1.0, "units of the costs given"
    if seconds:
        factor, name = next((u, n) for u, n in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if t.end * u >= 1 or u == 1e6)
        name += f", on {ASSUMED.name}"
    for time in ticks(t.end * factor, 8):
        x = _LEFT + time / factor * scale
        picture.line(x, y, x, y + 5, stroke=SOFT)
        picture.text(x, y + 17, f"{time:,.6g}", size=10, anchor="middle", kind="soft")
    picture.text(_LEFT, y + 36, f"time in {name}", size=11, kind="soft")


def to_json(t: Timeline) -> dict[str, Any]:
    """JSON-able: the schedule's actions as text, each rank's bubble and peak of live activations, and (action, start,
    end) of what it computes.
    """
    s = t.schedule
    return {
        "name": s.name,
        "stages": s.stages,
        "ranks": s.ranks,
        "microbatches": s.microbatches,
        "placement": list(s.placement),
        "actions": [[str(a) for a in each] for each in s.actions],
        "live": list(t.live),
        "bubble": t.bubble(),
        "bubbles": [t.bubble(r) for r in range(s.ranks)],
        "end": t.end,
        "slots": [[[str(slot.action), slot.start, slot.end] for slot in each] for each in t.slots],
    }


# --- parts of both drawings


def _title(t: Timeline) -> str:
    return f"{t.schedule.name}: {t.schedule.sizes}; bubble {100 * t.bubble():.1f} %"


def _stages(s: Schedule, rank: int) -> str:
    mine = s.stages_of(rank)
    return f"stage{'s' if len(mine) != 1 else ''} {', '.join(map(str, mine))}"


def _kinds(t: Timeline) -> list[str]:
    """The kinds of actions that occur, forward first."""
    present = {slot.action.kind for each in t.slots for slot in each}
    return [k for k in _NAMES if k in present]


def _several(s: Schedule) -> bool:
    """Whether a rank has several stages: an action is shown with its stage then."""
    return len(set(s.placement)) < s.stages


def _name(s: Schedule, slot: Slot) -> str:
    a = slot.action
    return str(a) if _several(s) else _short(a)


def _short(a: Action) -> str:
    """Without stages."""
    return "+".join(f"{p.kind}{p.microbatch}" for p in a.parts)


def _cell(name: str, a: Action, columns: int) -> str:
    """An action as so many columns: the last one blank, or without its stage or microbatch where there is no room."""
    name = next((n for n in (name, _short(a), _LETTERS.get(a.kind, a.kind)) if len(n) <= columns), "")
    return name if columns <= len(name) else f"{name.ljust(columns - 1, '-')} "


def _scale(t: Timeline, room: Callable[[Slot], float]) -> float:
    """Columns or pixels for a unit of time: enough for the names of all actions but those that are very short."""
    slots = [slot for each in t.slots for slot in each if slot.end - slot.start > 0.1 * _longest(t)]
    return max((room(slot) / (slot.end - slot.start) for slot in slots), default=1.0)


def _longest(t: Timeline) -> float:
    return max((slot.end - slot.start for each in t.slots for slot in each), default=0.0)
