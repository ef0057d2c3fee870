"""Record when every collective of a rank's step runs, what hides it, and how long it is waited for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from shardc.machine.clock import Clock, Flight
from shardc.machine.work import Op, Part

_ACTION = re.compile(r"\d+(F|B|I|W)\d*(\+\d+B)?")
#: The part of a step that a pair of two microbatches counts as.
PAIR = "forward and backward"
_WAYS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


@dataclass
class Streams(Clock):
    """A clock that keeps a record. parts: name, begin and end of each part; spans: all collectives.

    spans are in the order of their start. ops: (name of the part, op, its seconds). computing: (part of the step,
    begin, end) of computing without a gap.
    """

    parts: list[tuple[str, float, float]] = field(default_factory=list)
    spans: list[Flight] = field(default_factory=list)
    ops: list[tuple[str, Op, float]] = field(default_factory=list)
    computing: list[tuple[str, float, float]] = field(default_factory=list)
    _open: list[Flight] = field(default_factory=list)
    _name: str = ""
    _part: str = ""

    def run(self, part: Part) -> float:
        action = _ACTION.match(part.name)
        self._name = part.name
        self._part = PAIR if action and action[2] else _WAYS[action[1]] if action else part.name
        begin = self.now
        taken = super().run(part)
        self.parts.append((part.name, begin, self.now))
        return taken

    def ran(self, w: Op, begin: float) -> None:
        self.ops.append((self._name, w, self.now - begin))
        if self.computing and self.computing[-1][0] == self._part and self.computing[-1][2] == begin:
            begun = self.computing.pop()[1]
        else:
            begun = begin
        self.computing.append((self._part, begun, self.now))
        self._open = [span for span in self._open if span.end > begin]
        for span in self._open:
            if (together := min(self.now, span.end) - max(begin, span.begin)) > 0:
                key = self._part, w.of
                span.behind[key] = span.behind.get(key, 0.0) + together

    def started(self, flight: Flight) -> None:
        self.spans.append(flight)
        self._open.append(flight)
