"""Record when every collective of a rank's step runs, what hides it, and how long it is waited for."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from shardc.ir.metadata import CommRecord
from shardc.machine.clock import Clock
from shardc.machine.flights import Flight
from shardc.machine.work import Op, Part

_ACTION = re.compile(r"\d+(F|B|I|W)\d*(\+\d+B)?")
#: The part of a step that a pair of two microbatches counts as.
PAIR = "forward and backward"
_WAYS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


@dataclass
class Span:
    """One collective. begin, end: seconds from the start of the step.

    exposed: seconds in which the rank waits for it, and for earlier ones of its communicator. behind: seconds of
    computing meanwhile, by (part of the step, op of the program that a matrix product belongs to, or "").
    """

    record: CommRecord
    begin: float
    end: float
    exposed: float = 0.0
    behind: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class Streams(Clock):
    """A clock that keeps a record. parts: name, begin and end of each part; spans: all collectives.

    spans are in the order of their start. computing: (part of the step, begin, end) of computing without a gap.
    """

    parts: list[tuple[str, float, float]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    computing: list[tuple[str, float, float]] = field(default_factory=list)
    _open: list[Span] = field(default_factory=list)
    _of: dict[int, Span] = field(default_factory=dict)
    _part: str = ""

    def run(self, part: Part) -> float:
        action = _ACTION.match(part.name)
        self._part = PAIR if action and action[2] else _WAYS[action[1]] if action else part.name
        begin = self.now
        taken = super().run(part)
        self.parts.append((part.name, begin, self.now))
        return taken

    def ran(self, w: Op, begin: float) -> None:
        if self.computing and self.computing[-1][0] == self._part and self.computing[-1][2] == begin:
            begun = self.computing.pop()[1]
        else:
            begun = begin
        self.computing.append((self._part, begun, self.now))
        if self._open:
            self._open = [span for span in self._open if span.end > begin]
        for span in self._open:
            if (together := min(self.now, span.end) - max(begin, span.begin)) > 0:
                span.behind[self._part, w.of] += together

    def started(self, flight: Flight) -> None:
        self.spans.append(Span(flight.record, flight.begin, flight.end))
        self._open.append(self.spans[-1])
        self._of[id(flight)] = self.spans[-1]

    def delayed(self, flight: Flight) -> None:
        span = self._of[id(flight)]
        span.begin, span.end = flight.begin, flight.end

    def waited_for(self, record: CommRecord, seconds: float) -> None:
        super().waited_for(record, seconds)
        span = next(s for s in reversed(self.spans) if s.record is record)
        span.exposed += seconds
