"""Memory over a step by kind: as a table, as SVG, as JSON.

            each rank
parameters    1.8 MiB
activations   2.9 MiB
...
peak         10.1 MiB   at 0B1, backward of linear_6
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from shardc.cost import Cost, Memory, RankCost
from shardc.cost.ledger import KINDS
from shardc.ir.units import size

#: One colour a kind, from the bottom: kinds that stay between steps, those that grow, those that come and go.
_FILLS = {
    "parameters": "#5b7fb5",
    "optimizer": "#8db4e8",
    "gradients": "#8fc99a",
    "buffers": "#9a9a8c",
    "inputs": "#bdbdae",
    "activations": "#e8ca7c",
    "gathered": "#86cfd3",
    "communication": "#b9a0d8",
    "temporaries": "#e39b8b",
}


def table(cost: Cost) -> str:
    """A row for each kind, a column for each rank that differs: live bytes at its peak; then the peak, where that is,
    and the share of the device's memory; what is offloaded, in the machine's memory or in files, if anything is.
    """
    lines = [["", *(_name(cost, r) for r in cost.ranks)]]
    lines += [[kind, *(size(r.memory[kind]) for r in cost.ranks)] for kind in _kinds(r.memory for r in cost.ranks)]
    lines.append(["peak", *(size(r.memory.peak) for r in cost.ranks)])
    lines.append([f"of {cost.device.name}", *(f"{100 * r.memory.peak / cost.device.memory:.1f} %" for r in cost.ranks)])
    if any(r.memory.host for r in cost.ranks):
        lines.append(["outside, at most", *(size(r.memory.host) for r in cost.ranks)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(cost.ranks) + 1)]
    text = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    where = [f"{_name(cost, r)}: the peak is at {_where(r.memory)}" for r in cost.ranks]
    return "\n".join(["live memory of one step, at the peak", text[0], "-" * len(text[0]), *text[1:], *where])


def _where(m: Memory) -> str:
    return f"{m.part}, {m.op}" if m.op else m.part


def _name(cost: Cost, r: RankCost) -> str:
    axis = cost.program.axis
    return f"{axis}={r.at}" if axis else "each rank"


def _kinds(memories: Iterable[Memory]) -> list[str]:
    """The kinds that occur, in their order."""
    present = {k for m in memories for p in (m.kinds, *(point.live for point in m.curve)) for k, n in p.items() if n}
    return [k for k in KINDS if k in present]


def svg(cost: Cost) -> str:
    """A complete SVG file, for light and dark: each rank's live bytes over the step, stacked by kind. Titles name what
    runs at each point.
    """
    left, width, high, gap = 150, 1080, 200, 52
    top = max(r.memory.peak for r in cost.ranks) or 1
    kinds = _kinds(r.memory for r in cost.ranks)
    height = 46 + len(cost.ranks) * (high + gap) + 30
    title = f"live memory of one step: {size(top)} at most"
    made = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="{height}"'
            ' font-family="system-ui, sans-serif" font-size="12"'
            f' role="img"><title>{escape(title)}</title><style>{_STYLE}</style>'
        ),
        f'<text x="8" y="18">{escape(title)}</text>',
    ]
    for i, r in enumerate(cost.ranks):
        y = 46 + i * (high + gap)
        made += _curve(cost, r, kinds, left, y, width, high, top)
        made += _scale(left, y, width, high, top)
        made += _peak(r.memory, left, y, width, high, top)
    x, y = left, height - 22
    for kind in kinds:
        made.append(
            f'<rect x="{x}" y="{y}" width="14" height="14" class="{kind}"/><text x="{x + 20}" y="{y + 12}"'
            f' class="soft">{kind}</text>'
        )
        x += 40 + 7 * len(kind)
    return "\n".join([*made, "</svg>\n"])


def _curve(cost: Cost, r: RankCost, kinds: list[str], left: int, y: int, width: int, high: int, top: int) -> list[str]:
    points = r.memory.curve
    made = [
        f'<text x="8" y="{y + 14}">{escape(_name(cost, r))}</text>',
        f'<text x="8" y="{y + 30}" class="soft">{size(r.memory.peak)}</text>',
    ]
    step = width / max(len(points), 1)
    below = [0] * len(points)
    for kind in kinds:
        above = [b + p.live.get(kind, 0) for b, p in zip(below, points, strict=True)]
        if above != below:
            made.append(
                f'<path class="{kind}"'
                f' d="{_area(below, above, left, y + high, step, high / top)}"><title>{kind}</title></path>'
            )
        below = above
    begin = 0
    for at in range(1, len(points) + 1):
        if at == len(points) or points[at].part != points[begin].part:
            x, wide, part = left + begin * step, (at - begin) * step, points[begin].part
            most = max(points[begin:at], key=lambda p: p.total)
            title = f"{part}: {size(most.total)}{', ' + most.op if most.op else ''}"
            made.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{high}"'
                f' class="part"><title>{escape(title)}</title></rect>'
            )
            if wide > 7 * len(part):
                made.append(f'<text x="{x + wide / 2:.1f}" y="{y + high + 14}" class="in">{escape(part)}</text>')
            begin = at
    return made


def _scale(left: int, y: int, width: int, high: int, top: int) -> list[str]:
    """Lines at round numbers of bytes."""
    each = 1 << max(top.bit_length() - 2, 0)
    each = each // 2 if top < 3 * each else each
    made = []
    for n in range(0, top + 1, max(each, 1)):
        at = y + high - n * high / top
        made.append(
            f'<path d="M{left - 4},{at:.1f}h{width + 4}" class="line"/><text x="{left - 8}" y="{at + 4:.1f}"'
            f' class="tick">{size(n)}</text>'
        )
    return made


def _peak(m: Memory, left: int, y: int, width: int, high: int, top: int) -> list[str]:
    """A mark at the peak, and what runs there."""
    at = next((i for i, p in enumerate(m.curve) if p.total == m.peak), None)
    if at is None:
        return []
    x, above = left + (at + 0.5) * width / len(m.curve), y + high * (1 - m.peak / top)
    side = "end" if at > len(m.curve) / 2 else "start"
    label = (
        f'<text x="{x:.1f}" y="{y - 8}" style="text-anchor:{side}">peak {escape(size(m.peak))}:'
        f" {escape(_where(m))}</text>"
    )
    return [
        (
            f'<path d="M{x:.1f},{y - 4}V{y + high}" class="peak"/><circle cx="{x:.1f}" cy="{above:.1f}" r="3.5"'
            ' class="dot"/>'
        ),
        label,
    ]


def _area(below: list[int], above: list[int], left: float, base: float, step: float, scale: float) -> str:
    """Between two staircases."""
    there = "".join(f"V{base - n * scale:.1f}H{left + (i + 1) * step:.1f}" for i, n in enumerate(above))
    back = "".join(f"V{base - n * scale:.1f}H{left + i * step:.1f}" for i, n in reversed(list(enumerate(below))))
    return f"M{left:.1f},{base:.1f}{there}{back}Z"


_STYLE = (
    "text{fill:#23241f}.soft{fill:#6d6e65}.in{fill:#6d6e65;text-anchor:middle;font-size:10px}.part{fill:#0000;stroke:#8885;stroke-width:.5}.tick{fill:#6d6e65;text-anchor:end;font-size:10px}.line{stroke:#8884;stroke-width:.5}.peak{stroke:#b3261e;stroke-dasharray:3"
    " 3;fill:none}.dot{fill:#b3261e}"
    + "".join(f".{kind}{{fill:{colour}}}" for kind, colour in _FILLS.items())
    + "@media(prefers-color-scheme:dark){text{fill:#e4e3db}.soft,.in,.tick{fill:#98998f}}"
)


def to_json(cost: Cost) -> dict[str, Any]:
    """JSON-able: of each rank bytes by kind at the peak, where that is, and the curve; flops, bytes sent by axis and
    kind, seconds.
    """
    ranks = [
        {
            "at": r.at,
            "rank": r.rank,
            "peak": r.memory.peak,
            "kinds": dict(r.memory.kinds),
            "part": r.memory.part,
            "op": r.memory.op,
            "resident": dict(r.memory.resident),
            "host": r.memory.host,
            "flops": r.flops,
            "comm": {f"{a} {k}": n for (a, k), n in r.comm.items()},
            "seconds": r.seconds,
            "waited": r.waited,
            "curve": [
                {"part": p.part, "op": p.op, "live": {k: n for k, n in p.live.items() if n}} for p in r.memory.curve
            ],
        }
        for r in cost.ranks
    ]
    return {
        "device": cost.device.name,
        "fits": cost.fits,
        "step_seconds": cost.step_seconds,
        "bubble": cost.bubble,
        "axis": cost.program.axis,
        "peak": cost.memory.peak,
        "ranks": ranks,
    }
