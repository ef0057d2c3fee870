"""A plan as a picture: every priced choice by time and memory, with the limit of the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardc.ir.units import seconds, size
from shardc.plan.table import distinct, named
from shardc.report.colours import ALARM, DEEP_GREEN, GREEN, INK, LINE, RED, SOFT, WHITE
from shardc.report.svg import Picture, cut, ticks

if TYPE_CHECKING:
    from shardc.plan.result import Candidate, Plan

_FITS, _BEST, _NOT = GREEN, DEEP_GREEN, RED
_WIDTH, _LEFT, _TOP, _WIDE, _HIGH = 1100, 84, 62, 620, 360
#: What needs more than so many times the limit is drawn at the upper edge.
_FAR = 2.5
#: Where all need less than this part of the limit, the axis ends above them, and the limit lies beyond it.
_NEAR = 0.4
#: Where the largest number is more than so many times the smallest, an axis is logarithmic.
_WIDE_SPREAD = 8


@dataclass(frozen=True)
class _Scale:
    """Numbers along an axis, from 0 to 1. low: 0 of an axis that is not logarithmic."""

    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float], high: float) -> _Scale:
        """high: the end of the axis, if it is not logarithmic."""
        if not values or max(values) <= _WIDE_SPREAD * min(values):
            return _Scale(0.0, high)
        return _Scale(min(values) / 1.15, max(values) * 1.15)

    def at(self, x: float) -> float:
        if self.low:
            return math.log(x / self.low) / math.log(self.high / self.low)
        return x / self.high

    def ticks(self, most: int, *, binary: bool = False) -> list[float]:
        """Round numbers: powers of two of bytes, 1, 2 and 5 times powers of ten of seconds; as few as there is room
        for.
        """
        if not self.low:
            return ticks(self.high, most, binary=binary)
        steps = [2.0**k for k in range(64)] if binary else [b * 10.0**k for k in range(-9, 9) for b in (1, 2, 5)]
        found = [x for x in steps if self.low <= x <= self.high]
        return found[:: -(-len(found) // most)] if found else []


def svg(plan: Plan) -> str:
    """A complete SVG file. x: seconds of a step; y: what the rank needs that needs most; numbers: rows of the table.

    The line goes through what fits and is not beaten in both time and memory.
    """
    rows = [c for c, _ in distinct(plan.candidates)]
    limit = plan.target.usable
    a = plan.target
    picture = Picture(_WIDTH, _TOP + _HIGH + 70, "plan")
    fits = sum(c.fits for c in rows)
    title = f"{a.model} on {a.devices} × {a.device.name}: {fits} of {len(rows)} priced choices fit"
    picture.text(12, 22, title, size=14, bold=True)
    longest = 1.08 * max((c.step_seconds for c in rows), default=1.0)
    most = max((c.needs for c in rows), default=limit)
    beyond = most < _NEAR * limit  # the limit is: so that small needs can be told apart
    highest = 1.08 * (most if beyond else min(max(limit, most), _FAR * limit))
    time = _Scale.of([c.step_seconds for c in rows], longest)
    memory = _Scale.of([*(c.needs for c in rows), *([] if beyond else [limit])], highest)

    def at(c: Candidate) -> tuple[float, float]:
        return _LEFT + _WIDE * time.at(c.step_seconds), _TOP + _HIGH * (1 - min(memory.at(c.needs), 0.99))

    _axes(picture, time, memory)
    y = _TOP + _HIGH * (1 - min(memory.at(limit), 1))
    picture.line(_LEFT, y, _LEFT + _WIDE, y, stroke=ALARM, dashed=True)
    usable = f"{size(limit)} usable of {a.device.name}" + (", far above" if beyond else "")
    picture.text(_LEFT + 6, y + (13 if beyond else -5), usable, size=11, fill=ALARM, over=True)
    if front := [at(c) for c in _front(rows)]:
        picture.path("M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in front), stroke=_BEST, width=1.5)
    for i, c in reversed(list(enumerate(rows, 1))):
        x, y = at(c)
        fill = _BEST if i == 1 and c.fits else _FITS if c.fits else _NOT
        about = f"{named(c)}: step {seconds(c.step_seconds)}, {size(c.peak)} live, needs {size(c.needs)}"
        picture.rect(x - 9, y - 9, 18, 18, fill, stroke=SOFT, round_=9, title=about)
        picture.text(x, y + 4, str(i), size=10, anchor="middle", fill=WHITE if fill == _BEST else INK)
    _list(picture, rows)
    words = ((_BEST, "best"), (_FITS, "fits"), (_NOT, "does not fit"))
    picture.legend(_LEFT, _TOP + _HIGH + 46, words)
    return str(picture)


def _axes(picture: Picture, time: _Scale, memory: _Scale) -> None:
    bottom = _TOP + _HIGH
    for n in memory.ticks(6, binary=True):
        y = bottom - _HIGH * memory.at(n)
        picture.line(_LEFT, y, _LEFT + _WIDE, y)
        picture.text(_LEFT - 8, y + 4, size(n), size=10, anchor="end", kind="soft")
    for s in time.ticks(8):
        x = _LEFT + _WIDE * time.at(s)
        picture.line(x, bottom, x, bottom + 5)
        picture.text(x, bottom + 17, seconds(s) if s else "0", size=10, anchor="middle", kind="soft")
    picture.rect(_LEFT, _TOP, _WIDE, _HIGH, "none", stroke=LINE)
    picture.text(
        _LEFT,
        _TOP - 10,
        f"memory that the fullest rank needs, reserved and outside{_how(memory)}",
        size=11,
        kind="soft",
    )
    picture.text(_LEFT + _WIDE, bottom + 34, f"time of a step{_how(time)}", size=11, anchor="end", kind="soft")


def _how(scale: _Scale) -> str:
    return " (logarithmic)" if scale.low else ""


def _front(rows: Sequence[Candidate]) -> list[Candidate]:
    """What fits and is beaten by no other in both time and memory, the fastest first."""
    front: list[Candidate] = []
    for c in sorted((c for c in rows if c.fits), key=lambda c: (c.step_seconds, c.needs)):
        if not front or c.needs < front[-1].needs:
            front.append(c)
    return front


def _list(picture: Picture, rows: Sequence[Candidate]) -> None:
    """The choices by their numbers, as many as there is room for."""
    x, most = _LEFT + _WIDE + 24, int(_HIGH / 30)
    for i, c in enumerate(rows[:most], 1):
        y = _TOP + 12 + 30 * (i - 1)
        picture.text(x, y, cut(f"{i}  {named(c)}", _WIDTH - x - 8, 11), size=11, title=named(c))
        fits = "" if c.fits else ", does not fit"
        picture.text(x + 16, y + 13, f"{seconds(c.step_seconds)}, {size(c.needs)}{fits}", size=10, kind="soft")
    if len(rows) > most:
        picture.text(x, _TOP + 12 + 30 * most, f"and {len(rows) - most} more", size=10, kind="soft")
