"""The timeline of a pipeline's schedule: who computes what when, and who waits; as text, as SVG, as JSON.

rank 0  stage 0  F0 F1 F2 F3 .........B0--- F4 B1--- ...      27.3 %  4
                 microbatch 0 forward; nothing to do; its backward
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from html import escape
from typing import Any

from rich.text import Text
from torch import fx

from shardc.ir.graph import operands_of, values_of
from shardc.ir.machine import MEMORY_BYTES_PER_NETWORK_BYTE, PEAK_FLOPS_PER_MEMORY_BYTE
from shardc.ir.program import Program
from shardc.rules import registry
from shardc.rules.calls import call_of
from shardc.runtime import schedule as schedules
from shardc.runtime.schedule import Action, Costs, Schedule, Slot, Timeline

#: One colour a kind: of terminals, of SVG.
_INKS = {"F": "black on bright_blue", "B": "black on green", "I": "black on cyan", "W": "black on yellow"}
_FILLS = {"F": "#8db4e8", "B": "#8fc99a", "I": "#86cfd3", "W": "#e8ca7c"}
_NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}


def timeline(program: Program) -> Timeline:
    """Of one step, with the costs of the program's stages. A program without a pipeline is one stage."""
    schedule = program.schedule if program.schedule is not None else schedules.alone(program.microbatches)
    return schedules.timeline(schedule, costs(program), program.edges)


def costs(program: Program) -> Costs:
    """What each stage costs by its products, and by the bytes that its ops move where that takes longer: as
    `shardc.passes.pipeline.cuts` counts.

    In bytes of memory traffic of one rank. Backward of a product is a product for each operand that has a gradient: for
    weights in W."""
    found = [_cost(s.graph, program) for s in program.stages]
    transfer = {
        (e.source, e.target): MEMORY_BYTES_PER_NETWORK_BYTE * float(sum(v.nbytes(program.mesh) for v in e.values))
        for e in program.edges
    }
    forward, inputs, weights = zip(*found, strict=True)
    return Costs(forward, inputs, weights, transfer)


def _cost(graph: fx.Graph, program: Program) -> tuple[float, float, float]:
    """(forward, gradients of inputs, gradients of weights)."""
    params = {p.name for p in program.params}
    inner = program.mesh.world // (program.mesh.size(program.axis) if program.axis else 1)
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
        traffic = sum(v.nbytes(program.mesh) for x in (*operands_of(n), n) for v in values_of(x))
        rule = registry.find(n.target)
        flops = rule.flops(call_of(n)) / inner if rule is not None and rule.flops is not None else 0.0
        work = max(traffic, flops / PEAK_FLOPS_PER_MEMORY_BYTE)
        forward += work
        wanting = [x in of_weights for x in operands_of(n) if any(v.requires_grad for v in values_of(x))]
        each = wanting if flops else [all(wanting)] if wanting else []  # any other op reads its gradients once
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
    out.append(f"\n{stage}kind, microbatch: {', '.join(f'{k} {_NAMES[k]}' for k in _kinds(t))}\n", "dim")
    if any((slot.end - slot.start) * scale < 1 for each in t.slots for slot in each):
        out.append("some take less than a column: --svg FILE draws them all\n", "dim")
    return out


def svg(t: Timeline) -> str:
    """A complete SVG file, for light and dark. Titles show each action's name, start and end."""
    s = t.schedule
    scale = min(_scale(t, lambda slot: 8.0 * len(_name(s, slot)) + 6), 12000 / (t.end or 1))
    left, row, top = 130, 26, 44
    right = left + t.end * scale
    made = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{right + 120:.0f}" height="{top + row * s.ranks + 40}"'
            ' font-family="system-ui, sans-serif" font-size="12"'
            f' role="img"><title>{escape(_title(t))}</title><style>{_STYLE}</style>'
        ),
        f'<text x="8" y="18">{escape(_title(t))}</text>',
        f'<text x="{right + 10:.1f}" y="{top - 8}" class="soft">bubble, live</text>',
    ]
    for rank, slots in enumerate(t.slots):
        y = top + row * rank
        made.append(f'<text x="8" y="{y + 16}">rank {rank} <tspan class="soft">{_stages(s, rank)}</tspan></text>')
        made.append(f'<rect x="{left}" y="{y}" width="{right - left:.1f}" height="{row - 4}" class="idle"/>')
        chunks = s.stages_of(rank)
        for slot in slots:
            x, wide = left + slot.start * scale, (slot.end - slot.start) * scale
            shade = 1 - 0.45 * chunks.index(slot.action.stage) / len(chunks)
            name = _name(s, slot)
            label = (
                f'<text x="{x + wide / 2:.1f}" y="{y + 15}" class="in">{name}</text>' if wide >= 7 * len(name) else ""
            )
            made.append(
                f'<g><title>{slot.action}: {slot.start:g} to {slot.end:g}</title><rect x="{x:.1f}" y="{y}"'
                f' width="{max(wide - 1, 0.5):.1f}" height="{row - 4}" class="{slot.action.kind}"'
                f' fill-opacity="{shade:.2f}"/>{label}</g>'
            )
        made.append(f'<text x="{right + 10:.1f}" y="{y + 16}">{100 * t.bubble(rank):.1f} %, {t.live[rank]}</text>')
    y, x = top + row * s.ranks + 10, left
    for kind in _kinds(t):
        made.append(f'<rect x="{x}" y="{y}" width="14" height="14" class="{kind}"/>')
        made.append(f'<text x="{x + 20}" y="{y + 12}" class="soft">{_NAMES[kind]}</text>')
        x += 50 + 7 * len(_NAMES[kind])
    return "\n".join([*made, "</svg>\n"])


_STYLE = (
    "text{fill:#23241f}.soft{fill:#6d6e65}.in{fill:#23241f;text-anchor:middle;font-size:11px}.idle{fill:#8884;fill-opacity:.25}"
    + "".join(f".{kind}{{fill:{colour}}}" for kind, colour in _FILLS.items())
    + "@media(prefers-color-scheme:dark){text{fill:#e4e3db}.soft{fill:#98998f}}"
)


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
    return str(a) if _several(s) else f"{a.kind}{a.microbatch}"


def _cell(name: str, a: Action, columns: int) -> str:
    """An action as so many columns: the last one blank, or without its stage or microbatch where there is no room."""
    name = next((n for n in (name, f"{a.kind}{a.microbatch}", a.kind) if len(n) <= columns), "")
    return name if columns <= len(name) else f"{name.ljust(columns - 1, '-')} "


def _scale(t: Timeline, room: Callable[[Slot], float]) -> float:
    """Columns or pixels for a unit of time: enough for the names of all actions but those that are very short."""
    slots = [slot for each in t.slots for slot in each if slot.end - slot.start > 0.1 * _longest(t)]
    return max((room(slot) / (slot.end - slot.start) for slot in slots), default=1.0)


def _longest(t: Timeline) -> float:
    return max((slot.end - slot.start for each in t.slots for slot in each), default=0.0)
