"""Compute the time of a rank's step: ops in sequence, collectives beside them, and copies to the host.

    dp  [ gather    ][ gather  ]        collectives of one group, one after the other
    tp      [ sum     ]                 while two groups use the same links, each has half of them

A collective is a fluid: it takes a fixed number of seconds alone, and gets 1/n of links that n groups use, at every
moment. A new one delays those that are queued, not the bytes that are already sent.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace

from shardc.ir.mesh import Mesh
from shardc.ir.metadata import HOST_LINK, CommRecord
from shardc.machine.collectives import collective_seconds, reach
from shardc.machine.device import Device
from shardc.machine.work import Op, Part, Sent

#: The kind of messages between stages of a pipeline.
SENDS = "send_recv"


@dataclass(eq=False)
class Flight:
    """A collective that was started. link: the kind of link that it uses (`reach`), -1: not shared.

    alone: seconds that it takes when nothing else uses the link; ready: the earliest second at which it may begin;
    after: a flight whose end it waits for; delay: seconds of `alone` that may overlap with the previous one of its
    group. begin, end: seconds from the start of the step, as far as is known now; exposed: seconds in which the rank
    waits for it, and for earlier ones of its group; behind: seconds of computing meanwhile, by (part of the step, op of
    the program that a matrix product belongs to, or ""), if recorded (shardc.cost.streams). left: seconds of `alone`
    that remain; begun, ended: its state at the second that Flights has reached.
    """

    record: CommRecord
    link: int
    alone: float
    ready: float
    after: Flight | None = None
    delay: float = 0.0
    begin: float = 0.0
    end: float = 0.0
    exposed: float = 0.0
    behind: dict[tuple[str, str], float] = field(default_factory=dict)
    left: float = field(init=False)
    begun: bool = False
    ended: bool = False

    def __post_init__(self) -> None:
        self.left = self.alone

    @property
    def seconds(self) -> float:
        return self.end - self.begin

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

    def start(self, new: Flight, now: float) -> None:
        """Start a collective, which may change the times of others."""
        self._move(now)
        self._last.clear()
        queue = self.queues.setdefault(new.record.axes, deque())
        if new.record.kind != SENDS and any(f.record.kind == SENDS for f in queue):
            self._arrived(new.record.axes)
        first = self._ends.get(new.record.axes)
        if new.delay and first is not None:
            new.alone = new.left = new.alone - min(new.delay, max(first.end - max(new.ready, now), 0.0))
        queue.append(new)
        self._ends[new.record.axes] = new
        if new.link >= 0 and any(f.link == new.link for q in self.queues.values() if q is not queue for f in q):
            self._predict()
            return
        ends = [x.end for x in (first, new.after) if x is not None]
        new.begin = max([new.ready, *ends])
        new.end = new.begin + new.alone

    def _arrived(self, axes: tuple[str, ...]) -> None:
        """Drop the queued sends between pipeline stages, as ranks sum only after all stages have run.

        A rank's clock does not wait for other stages, so it may be earlier than their sends.
        """
        for f in self.queues[axes]:
            f.left, f.ended = 0.0, True
        self.queues[axes].clear()
        del self._ends[axes]

    def last(self, but: tuple[str, ...] = ()) -> float:
        """Return when the last flight ends, of all groups except `but`."""
        if but not in self._last:  # each op reads it, and only a start changes it
            self._last[but] = max((flight.end for axes, flight in self._ends.items() if axes != but), default=0.0)
        return self._last[but]

    def _predict(self) -> None:
        """Compute the begin and end of each flight if no other one starts."""
        now, queues = self.now, {axes: deque(q) for axes, q in self.queues.items()}
        state = [(f, f.left, f.begun) for q in queues.values() for f in q]
        self._move(math.inf)
        self.now, self.queues = now, queues
        for f, left, begun in state:
            f.left, f.begun, f.ended = left, begun, False

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


@dataclass
class Clock:
    """The time of one rank: ops run in sequence, once the host starts them, and overlap with collectives.

    A rank that waits for a collective also waits for ranks that arrive later. Copies between device and host are a
    separate group and do not slow the device.

    now: seconds since the start; exposed: the part in which the rank waits for collectives, by axes; of_update: the
    part of `exposed` for collectives that the last update started, such as gathers of weights; idle: the part in which
    the device waits for the host.
    """

    device: Device
    mesh: Mesh
    rank: int
    now: float = 0.0
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    of_update: float = 0.0
    idle: float = 0.0
    _host: float = 0.0
    _flights: Flights = field(default_factory=Flights)
    _under_way: dict[int, Flight] = field(default_factory=dict)
    _known: dict[tuple[str, tuple[str, ...], int], tuple[float, int]] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """When everything has ended, including collectives that nobody waits for."""
        return max(self.now, self._flights.last())

    def run(self, part: Part) -> float:
        """Run a part; return the seconds that it takes."""
        begin = self.now
        for w in part.work:
            if isinstance(w, Op):
                self._compute(w)
            elif isinstance(w, Sent):
                self.send(w)
            else:
                self.wait(w.key)
        return self.now - begin

    # --- hooks of subclasses

    def ran(self, w: Op, begin: float) -> None:
        """Note that an op has run, from `begin` until now. A hook for subclasses."""

    def waited_for_host(self, seconds: float) -> None:
        """Add seconds in which the device is idle, as the host starts ops more slowly than they run."""
        self.idle += seconds

    def started(self, flight: Flight) -> None:
        """Note that a collective was started. A hook for subclasses."""

    def waited_for(self, record: CommRecord, seconds: float) -> None:
        """Add seconds in which the rank waited for a collective."""
        self.exposed[record.axis] += seconds
        if record.direction == "update":
            self.of_update += seconds

    # --- computing

    def _compute(self, w: Op) -> None:
        self._after_host(self.device.host)
        begin = self.now
        self.compute(self.op_seconds(w))
        self.ran(w, begin)

    def compute(self, seconds: float) -> None:
        """Run something that takes this many seconds alone."""
        self.now += self._slowed_seconds(seconds)

    def _after_host(self, seconds: float) -> None:
        """Wait until the host, after this many more seconds of its work, has started the next op."""
        if self.device.kind == "cpu":  # which is its own host
            self._host = self.now
        self._host += seconds
        if self._host > self.now:
            self.waited_for_host(self._host - self.now)
            self.now = self._host

    def op_seconds(self, w: Op) -> float:
        """Return the seconds of an op alone."""
        return self.device.op_seconds(w)

    def _slowed_seconds(self, seconds: float) -> float:
        """Return the seconds of work beside running collectives, which slow the device. seconds: alone."""
        rate = self.device.reaches.computing
        if rate == 1.0:
            return seconds
        busy = max(self._flights.last(HOST_LINK) - self.now, 0.0)
        return seconds / rate if seconds <= busy * rate else busy + seconds - busy * rate

    # --- sending

    def send(self, w: Sent) -> None:
        """Start a collective; wait for it, if it has no key."""
        seconds, link = self.alone(w.record)
        after = None if w.after is None else self._under_way.get(w.after)
        flight = Flight(w.record, link, seconds, self.now, after, self._delay(w.record))
        self._flights.start(flight, self.now)
        self.started(flight)
        if w.key is None:
            self._until(flight)
        else:
            self._under_way[w.key] = flight

    def left(self, key: int) -> float:
        """Return the seconds until the collective of this key ends; 0 if it is not running."""
        return max(self._under_way[key].end - self.now, 0.0) if key in self._under_way else 0.0

    def wait(self, key: int) -> None:
        """Wait for the collective of this key, if it is running."""
        if key in self._under_way:
            self._until(self._under_way.pop(key))

    def _until(self, flight: Flight) -> None:
        if flight.end > self.now:
            flight.exposed += flight.end - self.now
            self.waited_for(flight.record, flight.end - self.now)
            self.now = flight.end

    def _delay(self, record: CommRecord) -> float:
        """Return the seconds of a collective that overlap with the previous one of its group (on CPUs: gloo)."""
        if self.device.kind != "cpu" or record.axes == HOST_LINK:
            return 0.0
        return self.alone(replace(record, bytes=0))[0]

    def alone(self, record: CommRecord) -> tuple[float, int]:
        """Return (seconds that a collective takes alone, the kind of link that it uses)."""
        if record.axes == HOST_LINK:
            return self.device.copy_seconds(record.bytes), -1
        key = record.kind, record.axes, record.bytes
        if key not in self._known:
            ranks = self.mesh.group(self.rank, record.axes)
            link = reach(self.device, ranks) if len(ranks) > 1 else -1
            self._known[key] = collective_seconds(self.device, record.kind, record.bytes, ranks), link
        return self._known[key]
