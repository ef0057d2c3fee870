"""Memory over a step by kind: as a table, as SVG, as JSON.

            each rank
parameters    1.8 MiB
activations   2.9 MiB
...
peak         10.1 MiB   at backward of h.3.fc (model.py:31), microbatch 1
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shardc.cost import Cost, Memory, RankCost
from shardc.cost.peak_memory import Point
from shardc.cost.recorded import KINDS
from shardc.ir.type_text import DTYPES
from shardc.ir.units import seconds, size
from shardc.report.colours import (
    ALARM,
    BLUE,
    CYAN,
    DEEP_BLUE,
    GREEN,
    GREY,
    LIGHT_GREY,
    LINE,
    RED,
    VIOLET,
    YELLOW,
)
from shardc.report.svg import CHARACTER, Picture, cut, ticks

#: One colour a kind, from the bottom: kinds that stay between steps, those that grow, those that come and go.
_FILLS = {
    "parameters": DEEP_BLUE,
    "optimizer": BLUE,
    "gradients": GREEN,
    "buffers": GREY,
    "inputs": LIGHT_GREY,
    "activations": YELLOW,
    "gathered": CYAN,
    "communication": VIOLET,
    "temporaries": RED,
}


def table(cost: Cost) -> str:
    """A row for each kind, a column for each rank that differs: live bytes at its peak; then the peak, where that is,
    and the share of the device's memory; what is offloaded, in the machine's memory or in files, if anything is; and
    what a GPU has to have for it.
    """
    lines = [["", *(_name(cost, r) for r in cost.ranks)]]
    lines += [[kind, *(size(r.memory[kind]) for r in cost.ranks)] for kind in _kinds(r.memory for r in cost.ranks)]
    lines.append(["peak", *(size(r.memory.peak) for r in cost.ranks)])
    lines.append([f"of {size(cost.device.memory)}", *(_share(cost, r) for r in cost.ranks)])
    if any(r.memory.host for r in cost.ranks):
        lines.append(["outside, at most", *(size(r.memory.host) for r in cost.ranks)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(cost.ranks) + 1)]
    text = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    where = [f"{_name(cost, r)}: the peak is at {peak_place(cost, r.memory)}" for r in cost.ranks]
    where = [_held(cost), *where] if cost.device.kind == "gpu" else where
    where += [exposed] if (exposed := _exposed(cost)) else []
    return "\n".join(
        [f"live memory of one step on {cost.device.name}, at the peak", text[0], "-" * len(text[0]), *text[1:], *where]
    )


def _held(cost: Cost) -> str:
    """What a GPU has to have for its live bytes."""
    verdict = "fits" if cost.fits else "does not fit"
    held = f"{size(cost.reserved)} and {size(cost.outside)} of {size(cost.device.memory)}: {verdict}"
    return f"torch's allocator reserves, and libraries take beside it, {held}"


def _exposed(cost: Cost) -> str:
    """What a step waits for collectives of, by axis; "" if for nothing."""
    each = [f"{axes} {seconds(s)}" for axes, s in sorted(cost.exposed.items(), key=lambda item: -item[1]) if s > 0]
    return f"{cost.step_words}, waits for collectives over {', '.join(each)}" if each else ""


def peak_place(cost: Cost, m: Memory) -> str:
    """The part of a step and the op at the peak, by module and line of the model."""
    part, op = part_name(m.part, cost), op_place(cost, m.op)
    if op.startswith("backward of ") and part.startswith("backward"):
        part = part.removeprefix("backward").removeprefix(" of ")
        return ", ".join(filter(None, (op, part)))
    return ", ".join(filter(None, (part, op)))


_ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|REDUCE)(\d*)")
_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward to inputs",
    "W": "backward to weights",
    "SEND_F": "send activations",
    "RECV_F": "receive activations",
    "SEND_B": "send gradients",
    "RECV_B": "receive gradients",
    "REDUCE": "sum of gradients",
}


def part_name(part: str, cost: Cost) -> str:
    """A part of a step in words: `forward`; of several microbatches and stages `forward of microbatch 2, stage 3`."""
    action = _ACTION.match(part)
    if action is None:
        return "optimizer" if part == "STEP" else part
    stage, kind, microbatch = action.groups()
    of = [f"microbatch {microbatch}"] if microbatch and cost.program.microbatches > 1 else []
    of += [f"stage {stage}"] if len(cost.program.stages) > 1 else []
    return _WORDS[kind] + (f" of {', '.join(of)}" if of else "")


def op_place(cost: Cost, op: str) -> str:
    """An op by its module and the model's line: `backward of h.3.fc (model.py:31)`."""
    source = cost.sources.get(op.removeprefix("backward of "))
    if source is None or not source.line:
        return op
    place = f"{source.module or cost.program.meta.get('model', 'the model')} ({source.line})"
    return f"backward of {place}" if op.startswith("backward of ") else place


def _name(cost: Cost, r: RankCost) -> str:
    axis = cost.program.axis
    return f"{axis}={r.at}" if axis else "each rank"


def _kinds(memories: Iterable[Memory]) -> list[str]:
    """The kinds that occur, in their order."""
    present = {k for m in memories for p in (m.kinds, *(point.live for point in m.curve)) for k, n in p.items() if n}
    return [k for k in KINDS if k in present]


def _share(cost: Cost, r: RankCost) -> str:
    share = f"{100 * r.memory.peak / cost.device.memory:.1f} %"
    return share if r.memory.peak <= cost.device.memory else f"{share}: does not fit"


# --- the picture


def svg(cost: Cost) -> str:
    """A complete SVG file: live bytes over a step, stacked by kind, with the device's capacity and what runs at the
    peak. Ranks that are equal share a panel. Titles name what runs at each point.
    """
    panels = _panels(cost)
    columns = 1 if len(panels) <= 2 else 2 if len(panels) <= 4 else 4 if len(panels) <= 16 else 8
    high = {1: 220, 2: 160, 4: 90, 8: 70}[columns]
    top = _top(cost)
    kinds = _kinds(r.memory for r in cost.ranks)
    rows = -(-len(panels) // columns)
    left, head, gap = 76, 64, 58 if columns <= 2 else 42
    wide = (WIDTH - left - 20 - (columns - 1) * 24) / columns
    picture = Picture(WIDTH, head + rows * (high + gap) + 70, "live memory of one step")
    picture.text(12, 22, f"Live memory of one step on {cost.device.name}: {_verdict(cost)}", size=14, bold=True)
    for i, (name, r) in enumerate(panels):
        panel = _Panel(picture, left + i % columns * (wide + 24), head + i // columns * (high + gap), wide, high, top)
        panel.draw(cost, name, r, kinds, scale=i % columns == 0, names=columns <= 2)
    y = head + rows * (high + gap)
    picture.text(left, y - 6, "ops of one step, in the order in which they run (not to scale with time) →", kind="soft")
    end = picture.legend(left, y + 8, ((_FILLS[kind], kind) for kind in kinds))
    picture.height = end + 8
    return str(picture)


#: Pixels of a picture.
WIDTH = 1100
#: A device so many times larger than the peak is not drawn, as the curve would be flat.
_FAR = 3


def _verdict(cost: Cost) -> str:
    """Live bytes, and whether a device has what it has to: see Cost.fits."""
    needs, fits = size(cost.reserved + cost.outside), "fits" if cost.fits else "does not fit"
    return f"{size(cost.memory.peak)}; with what is reserved and outside {needs} of {size(cost.device.memory)}, {fits}"


def _top(cost: Cost) -> float:
    """The highest number of bytes of the picture."""
    peak, capacity = cost.memory.peak or 1, cost.device.memory
    return 1.05 * (max(peak, capacity) if capacity < _FAR * peak else peak)


def _panels(cost: Cost) -> list[tuple[str, RankCost]]:
    """(names of the ranks, one of them) for ranks whose memory is the same but for the numbers of stages."""
    alike: dict[object, list[RankCost]] = {}
    for r in cost.ranks:
        m = r.memory
        key = tuple(sorted(m.kinds.items())), tuple(tuple(sorted(p.live.items())) for p in m.curve)
        alike.setdefault(key, []).append(r)
    return [(_names(cost, ranks), ranks[0]) for ranks in alike.values()]


def _names(cost: Cost, ranks: list[RankCost]) -> str:
    if not cost.program.axis:
        return "each rank"
    places = [r.at for r in ranks]
    run = len(places) > 2 and places[-1] - places[0] == len(places) - 1
    return f"{cost.program.axis}={f'{places[0]}-{places[-1]}' if run else ','.join(map(str, places))}"


@dataclass(frozen=True)
class _Panel:
    """The curve of one rank, or of several that are equal. top: bytes at its upper edge."""

    picture: Picture
    x: float
    y: float
    wide: float
    high: float
    top: float

    def draw(self, cost: Cost, name: str, r: RankCost, kinds: list[str], *, scale: bool, names: bool) -> None:
        """scale: with numbers at the left. names: with the names of the parts of a step."""
        self._lines(scale)
        self._areas(cost, r.memory, kinds)
        self._parts(cost, r.memory, names)
        self._capacity(cost, names)
        self._peak(cost, name, r.memory, names)

    def _at(self, nbytes: float) -> float:
        return self.y + self.high * (1 - nbytes / self.top)

    def _lines(self, scale: bool) -> None:
        for n in ticks(self.top, 5 if self.high > 100 else 3, binary=True):
            self.picture.line(self.x, self._at(n), self.x + self.wide, self._at(n))
            if scale:
                self.picture.text(self.x - 6, self._at(n) + 4, size(n), size=10, anchor="end", kind="soft")

    def _areas(self, cost: Cost, m: Memory, kinds: list[str]) -> None:
        step = self.wide / max(len(m.curve), 1)
        below = [0] * len(m.curve)
        for kind in kinds:
            above = [b + p.live.get(kind, 0) for b, p in zip(below, m.curve, strict=True)]
            if above != below:
                self.picture.path(self._area(below, above, step), fill=_FILLS[kind], title=kind)
            below = above

    def _area(self, below: list[int], above: list[int], step: float) -> str:
        """Between two staircases."""
        there = "".join(f"V{self._at(n):.1f}H{self.x + (i + 1) * step:.1f}" for i, n in enumerate(above))
        back = "".join(f"V{self._at(n):.1f}H{self.x + i * step:.1f}" for i, n in reversed(list(enumerate(below))))
        return f"M{self.x:.1f},{self._at(0):.1f}{there}{back}Z"

    def _parts(self, cost: Cost, m: Memory, names: bool) -> None:
        """The parts of a step, with titles; and their names, where there is room."""
        step = self.wide / max(len(m.curve), 1)
        for begin, points in _stretches(m.curve):
            x, wide = self.x + begin * step, len(points) * step
            part = part_name(points[0].part, cost)
            most = max(points, key=lambda p: p.total)
            op = f", {op_place(cost, most.op)}" if most.op else ""
            stroke = LINE if names else ""
            title = f"{part}: {size(most.total)}{op}"
            self.picture.rect(x, self.y, wide, self.high, "none", stroke=stroke, title=title)
            short = next((s for s in (part, part.partition(" of ")[0]) if CHARACTER * 0.84 * len(s) < wide), "")
            if names and short:
                y = self.y + self.high + 13
                self.picture.text(x + wide / 2, y, short, size=10, anchor="middle", kind="soft")

    def _capacity(self, cost: Cost, names: bool) -> None:
        capacity = cost.device.memory
        if capacity <= self.top:
            y = self._at(capacity)
            self.picture.line(self.x, y, self.x + self.wide, y, stroke=ALARM, dashed=True)
            if names:
                words = f"{cost.device.name} has {size(capacity)}"
                self.picture.text(self.x + self.wide - 8, y - 5, words, size=11, anchor="end", fill=ALARM, over=True)

    def _peak(self, cost: Cost, name: str, m: Memory, names: bool) -> None:
        """A mark at the peak, and what runs there."""
        at = next((i for i, p in enumerate(m.curve) if p.total == m.peak), None)
        words = f"{name}: {size(m.peak)}"
        words += ", does not fit" if names and m.peak > cost.device.memory else ""
        full = f"{words}, at {peak_place(cost, m)}"
        self.picture.text(
            self.x,
            self.y - 8,
            cut(full if names else words, self.wide, 12 if names else 10),
            size=12 if names else 10,
            title=full,
        )
        if at is not None:
            x = self.x + (at + 0.5) * self.wide / len(m.curve)
            self.picture.line(x, self._at(m.peak), x, self.y + self.high, stroke=ALARM, dashed=True)
            self.picture.rect(x - 3, self._at(m.peak) - 3, 6, 6, ALARM, round_=3)


def _stretches(curve: tuple[Point, ...]) -> Iterator[tuple[int, list[Point]]]:
    """(first point, points) of each part of a step."""
    begin = 0
    for _, points in itertools.groupby(curve, lambda p: p.part):
        stretch = list(points)
        yield begin, stretch
        begin += len(stretch)


def to_json(cost: Cost) -> dict[str, Any]:
    """JSON-able: of each rank bytes by kind at the peak, where that is, what a forward keeps
    (`shardc.cost.kept_activations`), and the curve; flops, bytes sent by axis and kind, seconds.
    """
    ranks = [
        {
            "at": r.at,
            "rank": r.rank,
            "peak": r.memory.peak,
            "kinds": dict(r.memory.kinds),
            "part": r.memory.part,
            "op": r.memory.op,
            "at_peak": peak_place(cost, r.memory),
            "resident": dict(r.memory.resident),
            "host": r.memory.host,
            "flops": r.flops,
            "comm": {f"{a} {k}": n for (a, k), n in r.comm.items()},
            "seconds": r.seconds,
            "exposed": dict(r.exposed),
            "kept": [
                {
                    "op": x.op,
                    "module": x.source.module,
                    "bytes": x.nbytes,
                    "type": f"{DTYPES[x.dtype]}[{', '.join(map(str, x.shape))}]",
                    "own": x.own,
                    "wanted_by": {w.op: list(w.after) for w in x.wants},
                }
                for x in kept
            ],
            "curve": [
                {"part": p.part, "op": p.op, "live": {k: n for k, n in p.live.items() if n}} for p in r.memory.curve
            ],
        }
        for r, kept in zip(cost.ranks, cost.kept(), strict=True)
    ]
    return {
        "device": cost.device.name,
        "fits": cost.fits,
        "step_seconds": cost.step_seconds,
        "bubble": cost.bubble,
        "axis": cost.program.axis,
        "peak": cost.memory.peak,
        "reserved": cost.reserved,
        "outside": cost.outside,
        "ranks": ranks,
    }
