"""Price the parts of a stage's step, as vectors that are linear in the n units of layers of the stage.

[1 unit] + (n - 1) · ([2 units] - [1 unit])        bytes by kind, seconds by cause, flops
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from shardc.cost.recorded import KINDS, DryRun
from shardc.ir.metadata import HOST_LINK, CommRecord
from shardc.machine.clock import Clock
from shardc.machine.work import Op, Part
from shardc.runtime.schedule.actions import PAIRS
from shardc.spec import Spec

Vector = NDArray[np.float64]
#: Kinds of bytes; "still": temporaries that do not grow with rows, such as a layer's gradients of weights.
BYTES = (*KINDS, "still")
N = len(BYTES)
#: Causes of a rank's time: products, memory traffic, starting small ops, waiting for the collectives of an axis.
WHAT = ("compute", "memory", "launch", "tp", "cp", "ep", "dp", "pp")
#: Columns: bytes left behind, bytes at the highest moment, seconds by cause; flops, bytes sent to the next stage, and
#: seconds of waiting for collectives that the last update began.
NET, HIGH, CAUSES = slice(0, N), slice(N, 2 * N), slice(2 * N, 2 * N + len(WHAT))
FLOPS, SENT, OF_UPDATE = range(CAUSES.stop, CAUSES.stop + 3)
WIDTH = OF_UPDATE + 1
#: What the first microbatch leaves for the others: gradients, cast weights, weights that stay gathered.
SHARED = "gradients", "parameters", "gathered"
_SHARED = [KINDS.index(k) for k in SHARED]
_KIND, _STILL = {k: i for i, k in enumerate(KINDS)}, BYTES.index("still")

#: Key of a part: (kind of action, or "before", "after", "update", "resident"; "first", "middle" or "last" microbatch).
Key = tuple[str, str]
Stage = dict[Key, Vector]


def roles(spec: Spec) -> dict[str, str]:
    """Return the role of each axis of the mesh, as named in WHAT."""
    stages = spec.pipeline.axis if spec.pipeline else ""
    sequence = dict.fromkeys(spec.token_axes, "cp")
    of = {**dict.fromkeys(spec.data_axes, "dp"), **dict.fromkeys(spec.expert_axes, "ep"), **sequence, stages: "pp"}
    return {a: of.get(a, "tp") for a in spec.mesh.names}


@dataclass
class Meter(Clock):
    """A clock that sums time by cause. roles: of the mesh's axes. rows: factor on the rows that were run.

    priced: seconds and cause of each op, shared by the clocks of a device.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    rows: int = 1
    priced: dict[tuple[int, Op], tuple[float, str]] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WHAT, 0.0))
    _causes: dict[tuple[str, ...], str] = field(default_factory=dict)

    def op_seconds(self, w: Op) -> float:
        found = self.priced.get((self.rows, w))
        if found is None:
            op = w if self.rows == 1 else w.of_rows(self.rows)
            found = self.priced[self.rows, w] = self.device.op_seconds(op), self.device.cause(op)
        return found[0]

    def ran(self, w: Op, begin: float) -> None:
        self.spent[self.priced[self.rows, w][1]] += self.now - begin

    def waited_for_host(self, seconds: float) -> None:
        super().waited_for_host(seconds)
        self.spent["launch"] += seconds

    def alone(self, record: CommRecord) -> tuple[float, int]:
        return super().alone(record if self.rows == 1 else replace(record, bytes=record.bytes * self.rows))

    def waited_for(self, record: CommRecord, seconds: float) -> None:
        super().waited_for(record, seconds)
        self.spent[self.cause(record)] += seconds

    def cause(self, record: CommRecord) -> str:
        """Return the cause that waiting for a collective counts as."""
        if record.axes == HOST_LINK:  # activations that wait on the host
            return "memory"
        if record.axes not in self._causes:
            of = {self.roles[a.partition("[")[0].partition(".")[0]] for a in record.axes}
            self._causes[record.axes] = next(a for a in ("pp", "dp", "ep", "cp", "tp") if a in of)
        return self._causes[record.axes]


def stage(r: DryRun, clock: Meter) -> Stage:
    """Return the vectors of a one-stage rank's dry run. A middle microbatch leaves nothing when it ends."""
    vectors: Stage = {}
    for key, part in parts_of(r):
        before, of_update = list(clock.spent.values()), clock.of_update
        clock.run(part)
        if key not in vectors:
            vectors[key] = v = _memory(part)
            v[CAUSES] = np.array(list(clock.spent.values())) - before
            v[OF_UPDATE] = clock.of_update - of_update
    resident = np.zeros(WIDTH)
    for storage in r.resident:
        if storage.kind in KINDS:
            resident[_KIND[storage.kind]] += storage.nbytes
    vectors["resident", ""] = resident
    several = len({a.microbatch for a, _ in r.actions if a.microbatch >= 0}) > 1
    for which in ("first", "middle") if several else ():
        mine = [v for (_, w), v in vectors.items() if w == which]
        if mine and (end := vectors.get(("W", which), vectors.get(("B", which)))) is not None:
            left = np.sum([v[NET] for v in mine], 0)
            if which == "first":
                left[_SHARED] = 0
            end[NET] -= left
    return vectors


def parts_of(r: DryRun) -> Iterator[tuple[Key, Part]]:
    """Yield a step's parts in order; all microbatches between the first and the last share a key."""
    assert not any(a.kind in PAIRS for a, _ in r.actions), "a pair is of two stages"
    some = sorted({a.microbatch for a, _ in r.actions if a.microbatch >= 0})
    ends = {**({some[-1]: "last"} if some else {}), **({some[0]: "first"} if some else {}), -1: ""}
    yield ("before", ""), r.before
    for a, part in r.actions:
        yield (a.kind, ends.get(a.microbatch, "middle")), part
    yield ("after", ""), r.after
    yield ("update", ""), r.update


def _memory(part: Part) -> Vector:
    """Return a part's vector with the columns of memory, flops and sends."""
    v = np.zeros(WIDTH)
    net, total, best = [0] * N, 0, 0
    high = net.copy()
    for sign, s in part.changes:
        if s.kind not in KINDS:  # outside of the device
            continue
        net[_STILL if s.still and s.kind == "temporaries" else _KIND[s.kind]] += sign * s.nbytes
        total += sign * s.nbytes
        if total > best:
            best, high = total, net.copy()
    v[NET], v[HIGH], v[FLOPS] = net, high, part.flops
    v[SENT] = sum(r.bytes for r in part.sent if r.kind == "send_recv")
    return v


def lines(a: Stage, more: Stage, less: Stage, n: float) -> Stage:
    """Return a + n · (more - less). A first stage runs backward undivided: it has no time to fill."""
    none = np.zeros(WIDTH)
    if ("B", "first") in a and ("I", "first") in more:
        more, less = _undivided(more), _undivided(less)
    return {k: a.get(k, none) + n * (more.get(k, none) - less.get(k, none)) for k in {**a, **more, **less}}


def then(a: Vector, b: Vector) -> Vector:
    """Return two parts in order. The peak is the first's, or the second's above what the first leaves."""
    both, after = a + b, a[NET] + b[HIGH]
    both[HIGH] = a[HIGH] if a[HIGH].sum() >= after.sum() else after
    return both


def _undivided(s: Stage) -> Stage:
    """Return the stage with backward as one part."""
    found = {key: v for key, v in s.items() if key[0] not in ("I", "W")}
    return found | {("B", w): then(s["I", w], part_of(s, "W", w)) for kind, w in s if kind == "I"}


def similar(there: Collection[Key], kind: str, which: str) -> list[Key]:
    """Return the keys of a part, or of the same part of the most similar microbatch; [] if there is none.

    If only the other form of backward was run, B is I and then W, and I is all of B.
    """
    kinds = {k for k, _ in there}
    forms = (kind,) if kind in kinds else {"I": ("B",), "B": ("I", "W")}.get(kind, ())
    each = ([(k, w) for w in (which, "middle", "last", "first") if (k, w) in there] for k in forms)
    return [keys[0] for keys in each if keys]


def part_of(s: Stage, kind: str, which: str) -> Vector:
    """Return a part of a stage, as `similar` finds it; zeros if there is none."""
    vectors = [s[key] for key in similar(s, kind, which)]
    return reduce(then, vectors) if vectors else np.zeros(WIDTH)


def computing(s: Stage) -> tuple[str, ...]:
    """Return the kinds of actions of a microbatch in a stage."""
    return ("F", "I", "W") if any(k == "I" for k, _ in s) else ("F", "B")


def typical(s: Stage, kind: str) -> Vector:
    """Return a part of a typical microbatch, also from a run with only a first and a last one.

    Forward is the last one's: the first one makes values for all. Backward is the first one's, as the last one sums
    gradients over axes; but its computation is the last one's, which adds to gradients.
    """
    if (kind, "middle") in s or kind == "F":
        return part_of(s, kind, "middle")
    found = part_of(s, kind, "first").copy()
    here = slice(CAUSES.start, CAUSES.start + 3)
    found[here] = part_of(s, kind, "last")[here]
    return found
