"""The time of a rank's step: its ops one after the other, collectives beside them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from shardc.cost.collective_seconds import collective_seconds
from shardc.cost.device import Device
from shardc.cost.ledger import Op, Part, Sent, Waited
from shardc.ir.mesh import Mesh
from shardc.runtime.mesh import CommRecord


@dataclass
class Clock:
    """Time of one rank: ops run one after the other; collectives overlap with them, but those of one group do
    not overlap with each other.

    now: seconds since the begin; exposed: of these, those in which the rank waits for collectives, by their axes.
    """

    device: Device
    mesh: Mesh
    rank: int
    now: float = 0.0
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _streams: dict[tuple[str, ...], float] = field(default_factory=dict)
    _under_way: dict[int, tuple[CommRecord, float]] = field(default_factory=dict)
    _seconds: dict[tuple[str, tuple[str, ...], int], float] = field(default_factory=dict)

    @property
    def waited(self) -> float:
        return sum(self.exposed.values())

    def run(self, part: Part) -> float:
        """Seconds that a part takes."""
        begin = self.now
        for w in part.work:
            if isinstance(w, Op):
                self.compute(w)
            elif isinstance(w, Waited):
                if w.key in self._under_way:
                    self._until(*self._under_way.pop(w.key))
            else:
                self._send(w)
        return self.now - begin

    def compute(self, w: Op) -> None:
        """An op runs."""
        self.now += self.device.op_seconds(w.flops, w.traffic, w.dtype)

    def started(self, w: Sent, begin: float, end: float) -> None:
        """A collective is known to run from `begin` to `end`."""

    def waited_for(self, record: CommRecord, seconds: float) -> None:
        """The rank has waited for it."""
        self.exposed[record.axis] += seconds

    def _send(self, w: Sent) -> None:
        record = w.record
        ready = self._under_way[w.after][1] if w.after in self._under_way else self.now
        begin = max(self._streams.get(record.axes, 0.0), ready)
        end = begin + self.seconds(record.kind, record.axes, record.bytes)
        self._streams[record.axes] = end
        self.started(w, begin, end)
        if w.key is None:
            self._until(record, end)
        else:
            self._under_way[w.key] = record, end

    def _until(self, record: CommRecord, end: float) -> None:
        if end > self.now:
            self.waited_for(record, end - self.now)
            self.now = end

    def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
        key = kind, axes, nbytes
        if key not in self._seconds:
            ranks = self.mesh.group(self.rank, axes)
            self._seconds[key] = collective_seconds(self.device, kind, nbytes, ranks)
        return self._seconds[key]
