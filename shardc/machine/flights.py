"""Compute when running and queued collectives begin and end, if several use the same links.

    dp  [ gather    ][ gather  ]        those of one group, one after the other
    tp      [ sum     ]                 while two groups use the same links, each has half of them

A collective is a fluid: it takes a fixed number of seconds alone, and gets 1/n of links that n groups use, at every
moment. A new one delays those that are queued, not the bytes that are already sent.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from shardc.ir.metadata import CommRecord

#: The kind of messages between stages of a pipeline.
SENDS = "send_recv"


@dataclass(eq=False)
class Flight:
    """A collective that was started. link: the kind of link that it uses (`reach`), -1: not shared.

    alone: seconds that it takes when nothing else uses the link; ready: the earliest second at which it may begin;
    after: a flight whose end it waits for; delay: seconds of `alone` that may overlap with the previous one of its
    group. begin, end: seconds, as far as is known now; left: seconds of `alone` that remain; begun, ended: its state at
    the second that Flights has reached.
    """

    record: CommRecord
    link: int
    alone: float
    ready: float
    after: Flight | None = None
    delay: float = 0.0
    begin: float = 0.0
    end: float = 0.0
    left: float = field(init=False)
    begun: bool = False
    ended: bool = False

    def __post_init__(self) -> None:
        self.left = self.alone

    @property
    def soonest(self) -> float:
        """When it may begin, once earlier ones of its group have ended; inf: not yet known."""
        if self.after is None:
            return self.ready
        return max(self.ready, self.after.end) if self.after.ended else math.inf


@dataclass
class Flights:
    """The flights of one rank. now: all before it is final; queues: flights that have not ended, by axes."""

    now: float = 0.0
    queues: dict[tuple[str, ...], deque[Flight]] = field(default_factory=dict)
    _ends: dict[tuple[str, ...], Flight] = field(default_factory=dict)
    _last: dict[tuple[str, ...], float] = field(default_factory=dict)

    def start(self, new: Flight, now: float) -> list[Flight]:
        """Start a collective. Return the others whose times change because of it."""
        self._move(now)
        self._last.clear()
        queue = self.queues.setdefault(new.record.axes, deque())
        if new.record.kind != SENDS and any(f.record.kind == SENDS for f in queue):
            self._arrived(queue)
        first = self._ends.get(new.record.axes)
        if new.delay and first is not None:
            new.alone = new.left = new.alone - min(new.delay, max(first.end - max(new.ready, now), 0.0))
        queue.append(new)
        self._ends[new.record.axes] = new
        if new.link >= 0 and any(f.link == new.link for q in self.queues.values() if q is not queue for f in q):
            return self._predict(new)
        ends = [x.end for x in (first, new.after) if x is not None]
        new.begin = max([new.ready, *ends])
        new.end = new.begin + new.alone
        return []

    def _arrived(self, queue: deque[Flight]) -> None:
        """End the queued sends between pipeline stages, as ranks sum only after all stages have run.

        A rank's clock does not wait for other stages, so it may be earlier than their sends.
        """
        for f in queue:
            f.left, f.end, f.ended = 0.0, self.now, True
        queue.clear()

    def last(self, but: tuple[str, ...] = ()) -> float:
        """Return when the last flight ends, of all groups except `but`."""
        if but not in self._last:  # each op reads it, and only a start changes it
            self._last[but] = max((flight.end for axes, flight in self._ends.items() if axes != but), default=0.0)
        return self._last[but]

    def _predict(self, new: Flight) -> list[Flight]:
        """Compute the begin and end of each flight if no other one starts; return those that change."""
        now, queues = self.now, {axes: deque(q) for axes, q in self.queues.items()}
        state = [(f, f.left, f.begun, f.begin, f.end) for q in queues.values() for f in q]
        self._move(math.inf)
        self.now, self.queues = now, queues
        for f, left, begun, _, _ in state:
            f.left, f.begun, f.ended = left, begun, False
        return [f for f, _, _, begin, end in state if f is not new and (f.begin, f.end) != (begin, end)]

    def _move(self, until: float) -> None:
        """Advance to the second `until`, or to the end of the last flight."""
        while self.now < until and (heads := [q for q in self.queues.values() if q]):
            running = [q for q in heads if q[0].soonest <= self.now]
            users = Counter(q[0].link for q in running)
            ends = [self.now + q[0].left * (users[q[0].link] if q[0].link >= 0 else 1) for q in running]
            then = min([until, *ends, *(t for q in heads if (t := q[0].soonest) > self.now)])
            for q, end in zip(running, ends, strict=True):
                flight = q[0]
                if not flight.begun:
                    flight.begun, flight.begin = True, self.now
                if end == then:
                    flight.left, flight.end, flight.ended = 0.0, then, True
                    q.popleft()
                else:
                    flight.left -= (then - self.now) / (users[flight.link] if flight.link >= 0 else 1)
            self.now = then
        if until < math.inf:
            self.now = max(self.now, until)
