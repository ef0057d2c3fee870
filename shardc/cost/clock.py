"""The time of a rank's step: its ops one after the other, collectives beside them, and copies to the host and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardc.cost.collective_seconds import collective_seconds, reach
from shardc.cost.device import Device
from shardc.cost.ledger import Op, Part, Sent, Waited
from shardc.ir.mesh import Mesh
from shardc.ir.offload import HOST_LINK
from shardc.runtime.mesh import CommRecord


@dataclass(eq=False)
class Flight:
    """A collective that was started. link: which kind of link it uses (collective_seconds.reach). begin, end: seconds;
    others that use the same links may delay its end.
    """

    record: CommRecord
    link: int
    begin: float
    end: float


@dataclass
class Clock:
    """Time of one rank: ops run one after the other, at the earliest when the host has started them; collectives
    overlap with them, but those of one group do not overlap with each other, and those of several groups share the
    links that they have in common. Who waits for a collective waits for ranks that come later, too. Copies to the host
    and back are a group of their own, and take nothing of the device.

    now: seconds since the begin; exposed: of these, those in which the rank waits for collectives, by their axes; idle:
    those in which the device waits for the host.
    """

    device: Device
    mesh: Mesh
    rank: int
    now: float = 0.0
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    idle: float = 0.0
    _host: float = 0.0
    _last: dict[tuple[str, ...], Flight] = field(default_factory=dict)  # of each group
    _under_way: dict[int, Flight] = field(default_factory=dict)
    _known: dict[tuple[str, tuple[str, ...], int], tuple[float, int]] = field(default_factory=dict)

    @property
    def waited(self) -> float:
        return sum(self.exposed.values())

    def run(self, part: Part) -> float:
        """Seconds that a part takes."""
        begin = self.now
        for w in part.work:
            if isinstance(w, Op):
                self._compute(w)
            elif isinstance(w, Waited):
                if w.key in self._under_way:
                    self._until(self._under_way.pop(w.key))
            else:
                self._send(w)
        return self.now - begin

    # --- what a clock that keeps more than times sees

    def ran(self, w: Op, begin: float) -> None:
        """An op has run, from `begin` until now."""

    def waited_for_host(self, seconds: float) -> None:
        """The device has had nothing to do: the host starts ops more slowly than they run."""
        self.idle += seconds

    def started(self, flight: Flight) -> None:
        """A collective runs from `flight.begin` to `flight.end`."""

    def delayed(self, flight: Flight) -> None:
        """Its end has changed: another one takes a part of its links."""

    def waited_for(self, record: CommRecord, seconds: float) -> None:
        """The rank has waited for it."""
        self.exposed[record.axis] += seconds

    # --- computing

    def _compute(self, w: Op) -> None:
        if self.device.kind == "cpu":  # which is its own host
            self._host = self.now
        self._host += self.device.host
        if self._host > self.now:
            self.waited_for_host(self._host - self.now)
            self.now = self._host
        begin = self.now
        self.now += self._beside_collectives(self.op_seconds(w))
        self.ran(w, begin)

    def op_seconds(self, w: Op) -> float:
        """Seconds of an op alone."""
        return self.device.op_seconds(w)

    def _beside_collectives(self, seconds: float) -> float:
        """What takes so long alone, while collectives run that take some of the device."""
        rate = self.device.reaches.computing
        ends = [flight.end for axes, flight in self._last.items() if axes != HOST_LINK]
        if rate == 1.0 or not ends:
            return seconds
        busy = max(max(ends) - self.now, 0.0)
        return seconds / rate if seconds <= busy * rate else busy + seconds - busy * rate

    # --- sending

    def _send(self, w: Sent) -> None:
        record = w.record
        ready = self._under_way[w.after].end if w.after in self._under_way else self.now
        before = self._last.get(record.axes)
        begin = max(before.end if before is not None else 0.0, ready)
        seconds, link = self.alone(record)
        flight = self._shared(Flight(record, link, begin, begin + seconds))
        self._last[record.axes] = flight
        self.started(flight)
        if w.key is None:
            self._until(flight)
        else:
            self._under_way[w.key] = flight

    def _shared(self, new: Flight) -> Flight:
        """The new one, and those that run when it begins and use the same links, with the ends that follow."""
        if new.link < 0:
            return new
        others = [x for x in self._last.values() if x.link == new.link and x.begin <= new.begin < x.end]
        if others:
            every = [new, *others]
            for flight, seconds in zip(every, shared_seconds([x.end - new.begin for x in every]), strict=True):
                flight.end = new.begin + seconds
            for flight in others:
                self.delayed(flight)
        return new

    def _until(self, flight: Flight) -> None:
        if flight.end > self.now:
            skew = 0.0 if flight.record.axes == HOST_LINK else self.device.skew
            self.waited_for(flight.record, flight.end + skew - self.now)
            self.now = flight.end + skew

    def alone(self, record: CommRecord) -> tuple[float, int]:
        """(seconds that a collective takes alone, the kind of link that it uses)."""
        if record.axes == HOST_LINK:
            return self.device.copy_seconds(record.bytes), -1
        key = record.kind, record.axes, record.bytes
        if key not in self._known:
            ranks = self.mesh.group(self.rank, record.axes)
            link = reach(self.device, ranks) if len(ranks) > 1 else -1
            self._known[key] = collective_seconds(self.device, record.kind, record.bytes, ranks), link
        return self._known[key]


def shared_seconds(alone: Sequence[float]) -> list[float]:
    """How long each takes where all begin together and share what they use in equal parts.

    >>> shared_seconds([1.0, 3.0])
    [2.0, 4.0]
    """
    ends = [0.0] * len(alone)
    now = done = 0.0
    for left, i in enumerate(sorted(range(len(alone)), key=lambda i: alone[i])):
        now += (alone[i] - done) * (len(alone) - left)
        done = alone[i]
        ends[i] = now
    return ends
