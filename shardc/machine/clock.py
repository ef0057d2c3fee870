"""Compute the time of a rank's step: ops in sequence, collectives beside them, and copies to the host."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from shardc.ir.mesh import Mesh
from shardc.ir.metadata import CommRecord
from shardc.ir.offload import HOST_LINK
from shardc.machine.collectives import collective_seconds, reach
from shardc.machine.device import Device
from shardc.machine.flights import Flight, Flights
from shardc.machine.work import Op, Part, Sent, Waited


@dataclass
class Clock:
    """The time of one rank: ops run in sequence, once the host starts them, and overlap with collectives.

    Collectives of one group run one after the other. Those of several groups share the links that they have in common.
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
    def waited(self) -> float:
        return sum(self.exposed.values())

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
            else:
                self._communicate(w)
        return self.now - begin

    def _communicate(self, w: Sent | Waited) -> None:
        if isinstance(w, Sent):
            self.send(w)
        else:
            self.wait(w.key)

    # --- hooks of subclasses

    def ran(self, w: Op, begin: float) -> None:
        """Note that an op has run, from `begin` until now. A hook for subclasses."""

    def waited_for_host(self, seconds: float) -> None:
        """Add seconds in which the device is idle, as the host starts ops more slowly than they run."""
        self.idle += seconds

    def started(self, flight: Flight) -> None:
        """Note that a collective runs from `flight.begin` to `flight.end`. A hook for subclasses."""

    def delayed(self, flight: Flight) -> None:
        """Note that a flight's begin or end has changed, as another one shares links. A hook for subclasses."""

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
        others = self._flights.start(flight, self.now)
        self.started(flight)
        for other in others:
            self.delayed(other)
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
