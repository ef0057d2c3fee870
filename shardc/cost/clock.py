"""The time of a rank's step: its ops one after the other, collectives beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardc.cost.device import Device
from shardc.cost.ledger import Op, Part, Sent, Waited
from shardc.ir.mesh import Mesh


@dataclass
class Clock:
    """Time of one rank: ops run one after the other; collectives overlap with them, but those of one group do
    not overlap with each other.
    """

    device: Device
    mesh: Mesh
    rank: int
    now: float = 0.0
    waited: float = 0.0
    _streams: dict[tuple[str, ...], float] = field(default_factory=dict)
    _ends: dict[int, float] = field(default_factory=dict)
    _seconds: dict[tuple[str, tuple[str, ...], int], float] = field(default_factory=dict)

    def run(self, part: Part) -> float:
        """Seconds that a part takes."""
        begin = self.now
        for w in part.work:
            if isinstance(w, Op):
                self.now += self.device.op_seconds(w.flops, w.traffic, w.dtype)
            elif isinstance(w, Waited):
                self._until(self._ends.pop(w.key, self.now))
            else:
                self._send(w)
        return self.now - begin

    def _send(self, w: Sent) -> None:
        record = w.record
        end = max(self._streams.get(record.axes, 0.0), self.now) + self.seconds(record.kind, record.axes, record.bytes)
        self._streams[record.axes] = end
        if w.key is None:
            self._until(end)
        else:
            self._ends[w.key] = end

    def _until(self, end: float) -> None:
        self.waited += max(end - self.now, 0.0)
        self.now = max(end, self.now)

    def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
        key = kind, axes, nbytes
        if key not in self._seconds:
            ranks = self.mesh.group(self.rank, axes)
            self._seconds[key] = self.device.comm_seconds(kind, nbytes, ranks)
        return self._seconds[key]
