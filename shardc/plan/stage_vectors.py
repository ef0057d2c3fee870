"""The parts of a stage's step as vectors, so that stages of many layers follow from stages of one and of two.

    F of two layers - F of one layer = the part of one layer in F, in bytes by kind and in seconds by cause

A vector's columns are linear in layers: bytes by kind that a part leaves, and the most that it adds at any moment;
flops; seconds by cause, and those from which bounds follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardc.cost.recorded import KINDS, DryRun
from shardc.ir.comm_record import CommRecord
from shardc.ir.mesh import Mesh
from shardc.ir.offload import HOST_LINK
from shardc.machine.clock import Clock
from shardc.machine.device import Device
from shardc.machine.work import Op, Part, Sent, Storage, Waited
from shardc.runtime.schedule.actions import PAIRS
from shardc.spec import Spec

Vector = NDArray[np.float64]
#: Kinds of bytes: temporaries that are no larger where a microbatch has more rows, as gradients of one layer before
#: they are added up, count for themselves.
BYTES = (*KINDS, "still")
N = len(BYTES)
#: Those of them that grow with the rows of a microbatch, and are split with them.
GROW = np.array([k in ("activations", "communication", "temporaries", "gathered", "inputs") for k in BYTES])
#: Columns: bytes left behind, bytes at the highest moment, and the most bytes that GROW, which may be at another one.
NET, HIGH, MOST = slice(0, N), slice(N, 2 * N), 2 * N
_S = 2 * N + 1
#: Flops, bytes sent to the next stage, seconds by cause; and how much of these is no more where a microbatch has more
#: rows: small ops, the latency of collectives.
FLOPS, SENT, CAUSES, FIXED = _S, _S + 1, slice(_S + 2, _S + 10), slice(_S + 10, _S + 18)
#: And how much of the seconds nothing can hide: what comes next needs the collective.
SURE = slice(_S + 18, _S + 26)
#: How much of them is waited for what the last update began: gathers of weights, which are under way on all ranks.
OF_UPDATE = _S + 26
#: Seconds of products at least, whatever their shapes, and of ops without products; but of those alone that take longer
#: than to be run at all. And how much of the latter would be no more with more rows, as what casts weights.
PRODUCTS, MOVED, STILL_MOVED = _S + 27, _S + 28, _S + 29
#: Microbatches of so many rows: what a part computes then, by the first causes of WHAT, and how long it waits for
#: collectives, which may hide behind a late host with few rows and not with many. Between two of them it is taken to
#: lie on a line.
ROWS = (1, 4, 16, 64)
HERE = 3
_EACH = HERE + 1
AT = tuple(slice(_S + 30 + _EACH * i, _S + 30 + _EACH * (i + 1)) for i in range(len(ROWS) - 1))
WIDTH = AT[-1].stop
#: What a rank does in a second: products, memory traffic, starting small ops, waiting for the collectives of an axis.
WHAT = ("compute", "memory", "launch", "tp", "cp", "ep", "dp", "pp")
#: What the first microbatch leaves for the others: gradients, weights that were cast, those that are kept gathered.
SHARED = "gradients", "parameters", "gathered"
_SHARED = [KINDS.index(k) for k in SHARED]
_KIND, _STILL, _GROWS = {k: i for i, k in enumerate(KINDS)}, BYTES.index("still"), GROW.tolist()

#: Of a part: (kind of action, or "before", "after", "update", "resident"; "first", "middle" or "last" of its
#: microbatch).
Key = tuple[str, str]
Stage = dict[Key, Vector]


def roles(spec: Spec) -> dict[str, str]:
    """The role of each axis of the mesh, as named in WHAT."""
    stages = spec.pipeline.axis if spec.pipeline else ""
    sequence = dict.fromkeys(spec.sequence.axis if spec.sequence else (), "cp")
    of = {**dict.fromkeys(spec.data_axes, "dp"), **dict.fromkeys(spec.expert_axes, "ep"), **sequence, stages: "pp"}
    return {a: of.get(a, "tp") for a in spec.mesh.names}


class _Stretch(NamedTuple):
    """Ops between two collectives. spent: seconds by cause; total: of all; host: that the host takes to start them;
    ahead: so many seconds before the device is free the host has to begin, if this is not to wait for it.
    """

    ops: list[Op]
    spent: dict[str, float]
    total: float
    host: float
    ahead: float


@dataclass
class Prices:
    """What clocks of one device share. ops: seconds and cause of each op object; parts: the work of each part, ops
    between collectives as one; sent: what collectives take alone, of each mesh and rank. (What a number is the address
    of is kept, so that nothing else gets that.)
    """

    ops: dict[int, tuple[Op, float, str]] = field(default_factory=dict)
    parts: dict[int, tuple[Part, list[_Stretch | Sent | Waited]]] = field(default_factory=dict)
    sent: dict[object, dict[tuple[str, tuple[str, ...], int], tuple[float, int]]] = field(default_factory=dict)
    _of_rows: dict[int, Prices] = field(default_factory=dict)

    def of_rows(self, times: int) -> Prices:
        """Those of the same ops with so many times the rows."""
        if times == 1:
            return self
        return self._of_rows.setdefault(times, Prices(sent=self.sent))


@dataclass
class Meter(Clock):
    """A clock that also sums time by cause. roles: of the mesh's axes. rows: as many times those that were run. fixed:
    the part of `spent` that would be no more with more rows, but for weights' bytes; sure: the part that is waited,
    however long the rank computes before.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    priced: Prices = field(default_factory=Prices)
    rows: int = 1
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WHAT, 0.0))
    fixed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WHAT, 0.0))
    sure: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WHAT, 0.0))
    _causes: dict[tuple[str, ...], str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        device: Device,
        mesh: Mesh,
        rank: int,
        roles: Mapping[str, str],
        priced: Prices | None = None,
        rows: int = 1,
    ) -> Meter:
        priced = (Prices() if priced is None else priced).of_rows(rows)
        known = priced.sent.setdefault((mesh, rank), {})
        return cls(device, mesh, rank, roles=roles, priced=priced, rows=rows, _known=known)

    def of_rows(self, times: int) -> Meter:
        """One that has seen nothing yet, of so many times the rows."""
        return Meter.of(self.device, self.mesh, self.rank, self.roles, self.priced, times)

    def run(self, part: Part) -> float:
        """As a clock does, but for rounding: what waits for no collective, and is slowed down by none, is added up
        once.
        """
        if self.device.kind == "cpu":
            return super().run(part)
        found = self.priced.parts.get(id(part))
        if found is None:
            found = self.priced.parts[id(part)] = part, self._stretches(part)
        begin = self.now
        for w in found[1]:
            if not isinstance(w, _Stretch):
                self._communicate(w)
            elif self.device.reaches.computing < 1.0 and self._flights.last(HOST_LINK) > self.now:
                for op in w.ops:
                    self._compute(op)
            else:
                self._add(w)
        return self.now - begin

    def _add(self, w: _Stretch) -> None:
        if (late := w.ahead - (self.now - self._host)) > 0:
            self.waited_for_host(late)
            self.now += late
        self.now += w.total
        self._host += w.host
        for what, seconds in w.spent.items():
            self.spent[what] += seconds
        self.fixed["launch"] += w.spent.get("launch", 0.0)

    def _stretches(self, part: Part) -> list[_Stretch | Sent | Waited]:
        made: list[_Stretch | Sent | Waited] = []
        for is_op, some in groupby(part.work, lambda w: isinstance(w, Op)):
            if not is_op:
                made += some  # type: ignore[arg-type]
                continue
            ops: list[Op] = list(some)  # type: ignore[arg-type]
            spent: dict[str, float] = {}
            total = host = ahead = 0.0
            for op in ops:
                _, seconds, what = self._priced(op)
                host += self.device.host
                ahead = max(ahead, host - total)
                total += seconds
                spent[what] = spent.get(what, 0.0) + seconds
            made.append(_Stretch(ops, spent, total, host, ahead))
        return made

    def op_seconds(self, w: Op) -> float:
        return self._priced(w)[1]

    def _priced(self, w: Op) -> tuple[Op, float, str]:
        found = self.priced.ops.get(id(w))
        if found is None:  # the op is kept, so that no other one gets its id
            op = w if self.rows == 1 else w.of_rows(self.rows)
            found = self.priced.ops[id(w)] = w, self.device.op_seconds(op), self.device.cause(op)
        return found

    def least(self, part: Part) -> tuple[float, float]:
        """(PRODUCTS, MOVED) of a part."""
        products = moved = 0.0
        for w in part.work:
            if isinstance(w, Op):
                _, seconds, what = self._priced(w)
                if w.flops and what != "launch":
                    products += self.device.least_product_seconds(w)
                elif what == "memory":
                    moved += seconds
        return products, moved

    def ran(self, w: Op, begin: float) -> None:
        what = self._priced(w)[2]
        self.spent[what] += self.now - begin
        self.fixed[what] += self.now - begin if what == "launch" else 0.0

    def waited_for_host(self, seconds: float) -> None:
        super().waited_for_host(seconds)
        self.spent["launch"] += seconds
        self.fixed["launch"] += seconds

    def alone(self, record: CommRecord) -> tuple[float, int]:
        return super().alone(record if self.rows == 1 else replace(record, bytes=record.bytes * self.rows))

    def waited_for(self, record: CommRecord, seconds: float) -> None:
        super().waited_for(record, seconds)
        self.spent[self.cause(record)] += seconds
        fixed = self.alone(replace(record, bytes=0))[0]
        self.fixed[self.cause(record)] += min(seconds, fixed)

    def send(self, w: Sent) -> None:
        super().send(w)
        if w.key is None:
            self.sure[self.cause(w.record)] += self.alone(w.record)[0]

    def cause(self, record: CommRecord) -> str:
        """What waiting for a collective counts as."""
        if record.axes == HOST_LINK:  # activations that wait on the host
            return "memory"
        if record.axes not in self._causes:
            roles = {self.roles[a.partition("[")[0].partition(".")[0]] for a in record.axes}
            self._causes[record.axes] = next(a for a in ("pp", "dp", "ep", "cp", "tp") if a in roles)
        return self._causes[record.axes]


def kind_of(storage: Storage) -> int:
    """Its index in BYTES."""
    return _STILL if storage.still and storage.kind == "temporaries" else _KIND[storage.kind]


def memory(part: Part) -> Vector:
    """The columns of memory, flops and sends."""
    v = np.zeros(WIDTH)
    net, total, best, growing, most = [0] * N, 0, 0, 0, 0
    high = net.copy()
    for sign, storage in part.changes:
        if storage.kind not in KINDS:  # outside of the device
            continue
        at = kind_of(storage)
        net[at] += sign * storage.nbytes
        total += sign * storage.nbytes
        growing += sign * storage.nbytes if _GROWS[at] else 0
        most = max(most, growing)
        if total > best:
            best, high = total, net.copy()
    v[NET], v[HIGH], v[MOST] = net, high, most
    v[FLOPS] = part.flops
    v[SENT] = sum(r.bytes for r in part.sent if r.kind == "send_recv")
    return v


def stage(r: DryRun, clock: Meter) -> Stage:
    """The vectors of a dry run of a rank with one stage. A middle microbatch leaves nothing once it has ended."""
    vectors: Stage = {}
    for key, part in _parts(r):
        seconds = _seconds(part, clock)
        if key not in vectors:
            vectors[key] = memory(part)
            vectors[key][_SECONDS] = seconds
            vectors[key][[PRODUCTS, MOVED]] = clock.least(part)
    if len(_microbatches(r)) < 3:
        _of_more_rows(vectors, r, clock)
    resident = np.zeros(WIDTH)
    for storage in r.resident:
        if storage.kind in KINDS:
            resident[KINDS.index(storage.kind)] += storage.nbytes
    vectors["resident", ""] = resident
    for which in ("first", "middle") if len(_microbatches(r)) > 1 else ():
        mine = [v for (_, w), v in vectors.items() if w == which]
        if mine and (end := vectors.get(("W", which), vectors.get(("B", which)))) is not None:
            left = np.sum([v[NET] for v in mine], 0)
            if which == "first":
                left[_SHARED] = 0
            end[NET] -= left
    return vectors


def _of_more_rows(vectors: Stage, r: DryRun, clock: Meter) -> None:
    """Write down how long the parts of microbatches compute and wait with more rows."""
    for rows, columns in zip(ROWS[1:], AT, strict=True):
        more = clock.of_rows(rows)
        for key, part in _parts(r):
            if key[1]:
                seconds = _seconds(part, more)[: len(WHAT)]
                vectors[key][columns] = [*seconds[:HERE], seconds[HERE:].sum()]
                if columns == AT[0]:
                    v, (_, moved) = vectors[key], more.least(part)
                    v[STILL_MOVED] = max(v[MOVED] - max(moved - v[MOVED], 0.0) / (rows - 1), 0.0)


def _microbatches(r: DryRun) -> list[int]:
    return sorted({a.microbatch for a, _ in r.actions if a.microbatch >= 0})


def parts_of(r: DryRun) -> dict[Key, Part]:
    """Those that its vectors are of."""
    found: dict[Key, Part] = {}
    for key, part in _parts(r):
        found.setdefault(key, part)
    return found


def _parts(r: DryRun) -> Iterator[tuple[Key, Part]]:
    """The parts of a step, in order; those of microbatches between the first and the last have the same key."""
    assert not any(a.kind in PAIRS for a, _ in r.actions), "a pair is of two stages"
    some = _microbatches(r)
    ends = {**({some[-1]: "last"} if some else {}), **({some[0]: "first"} if some else {}), -1: ""}
    yield ("before", ""), r.before
    for a, part in r.actions:
        yield (a.kind, ends.get(a.microbatch, "middle")), part
    yield ("after", ""), r.after
    yield ("update", ""), r.update


#: The columns of CAUSES, FIXED, SURE and OF_UPDATE.
_SECONDS = slice(CAUSES.start, OF_UPDATE + 1)


def _seconds(part: Part, clock: Meter) -> Vector:
    """By cause: what a part takes; of that, what would be no more with more rows, and what nothing can hide; and
    OF_UPDATE.
    """
    before, of_update = [dict(each) for each in (clock.spent, clock.fixed, clock.sure)], clock.of_update
    clock.run(part)
    now = clock.spent, clock.fixed, clock.sure
    by_cause = [new[w] - old[w] for new, old in zip(now, before, strict=True) for w in WHAT]
    return np.array([*by_cause, clock.of_update - of_update])


def elsewhere(s: Stage, r: DryRun, there: Meter) -> Stage:
    """The stage of a dry run where its collectives are between other ranks. there: a clock of these."""
    moved: Stage = {}
    for key, part in _parts(r):
        seconds = _seconds(part, there)
        if key not in moved:
            moved[key] = s[key].copy()
            moved[key][_SECONDS] = seconds
    return {**s, **moved}


def axes_of(r: DryRun) -> tuple[tuple[str, ...], ...]:
    """The axes along which a rank sends in a step."""
    records = (w.record for _, part in _parts(r) for w in part.work if isinstance(w, Sent))
    return tuple(dict.fromkeys(record.axes for record in records if record.axes != HOST_LINK))


def lines(a: Stage, more: Stage, less: Stage, n: float) -> Stage:
    """a + n · (more - less). A first stage has nothing to fill with parts of backward, and runs it undivided."""
    none = np.zeros(WIDTH)
    if ("B", "first") in a and ("I", "first") in more:
        more, less = undivided(more), undivided(less)
    return {k: a.get(k, none) + n * (more.get(k, none) - less.get(k, none)) for k in {**a, **more, **less}}


def then(a: Vector, b: Vector) -> Vector:
    """One part after another. Its highest moment is the first's, or the second's above what the first leaves."""
    both, after = a + b, a[NET] + b[HIGH]
    both[HIGH] = a[HIGH] if a[HIGH].sum() >= after.sum() else after
    both[MOST] = max(a[MOST], a[NET][GROW].sum() + b[MOST])
    return both


def undivided(s: Stage) -> Stage:
    """With backward as one part."""
    found = {key: v for key, v in s.items() if key[0] not in ("I", "W")}
    return found | {("B", w): then(s["I", w], part_of(s, "W", w)) for kind, w in s if kind == "I"}


def part_of(s: Stage, kind: str, which: str) -> Vector:
    """A part, or the same of the most similar microbatch; of a backward that was divided, or was not, what is asked
    for: all of an undivided one counts as its first part.
    """
    for w in (which, "middle", "last", "first"):
        if (vector := s.get((kind, w))) is not None:
            return vector
    there = {k for k, _ in s}
    if kind == "I" and "B" in there:
        return part_of(s, "B", which)
    if kind == "B" and "I" in there:
        return then(part_of(s, "I", which), part_of(s, "W", which))
    return np.zeros(WIDTH)


def typical(s: Stage, kind: str) -> Vector:
    """A part of a microbatch like most, where only a first one and a last one were run: the first one's forward makes
    what all of them use; of backward, the last one sums gradients over axes, and adds them to those that there are.
    """
    if (kind, "middle") in s or kind == "F":
        return part_of(s, kind, "middle")
    found = part_of(s, kind, "first").copy()
    last = part_of(s, kind, "last")
    for columns in (CAUSES, FIXED, *AT):
        found[columns][:HERE] = last[columns][:HERE]
    found[[PRODUCTS, MOVED, STILL_MOVED]] = last[[PRODUCTS, MOVED, STILL_MOVED]]
    return found
