"""Price the parts of a stage's step, as vectors that are linear in the n units of layers of the stage.

[1 unit] + (n - 1) · ([2 units] - [1 unit])        bytes by kind, seconds by cause, flops
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardc.cost.recorded import KINDS, DryRun
from shardc.ir.mesh import axes_of_spec
from shardc.ir.metadata import HOST_LINK, CommRecord
from shardc.machine.clock import Clock
from shardc.machine.work import Op, Part, Storage
from shardc.runtime.schedule import Action, computed
from shardc.spec import Spec

Vector = NDArray[np.float64]
#: Kinds of bytes; "still": temporaries that do not grow with rows, such as a layer's gradients of weights.
BYTES = (*KINDS, "still")
N = len(BYTES)
#: Causes of a rank's time: products, memory traffic, starting small ops, waiting for the collectives of an axis.
WHAT = ("compute", "memory", "launch", "tp", "cp", "ep", "dp", "pp")
#: Columns: bytes left behind, bytes at the highest moment, seconds by cause; seconds of waiting for collectives that
#: the last update began, flops, and bytes sent to the next stage.
NET, HIGH, CAUSES = slice(0, N), slice(N, 2 * N), slice(2 * N, 2 * N + len(WHAT))
LATE, FLOPS, _SENT, WIDTH = range(CAUSES.stop, CAUSES.stop + 4)
#: What the first microbatch leaves for the others: gradients, cast weights, weights that stay gathered.
_SHARED = "gradients", "parameters", "gathered"
_KIND, _STILL = {k: i for i, k in enumerate(KINDS)}, BYTES.index("still")

#: Key of a part: (kind of action, or "before", "after", "update", "resident"; "first", "middle" or "last" microbatch).
Key = tuple[str, str]
T = TypeVar("T")


class Parts(dict[Key, T]):
    """What is known of each part of a stage's step."""

    @property
    def computing(self) -> tuple[str, ...]:
        """The kinds of actions of a microbatch."""
        return ("F", "I", "W") if any(k == "I" for k, _ in self) else ("F", "B")

    def similar(self, kind: str, which: str) -> list[T]:
        """Return a part, or the same part of the most similar microbatch, in a list; [] if there is none.

        If only the other form of backward was run, B is I and then W, and I is all of B.
        """
        kinds = {k for k, _ in self}
        forms = (kind,) if kind in kinds else {"I": ("B",), "B": ("I", "W")}.get(kind, ())
        each = ([self[k, w] for w in (which, "middle", "last", "first") if (k, w) in self] for k in forms)
        return [some[0] for some in each if some]


class Stage(Parts[Vector]):
    """The vectors of a stage."""

    def part(self, kind: str, which: str) -> Vector:
        """Return the vector of a part, as `similar` finds it; zeros if there is none."""
        vectors = self.similar(kind, which)
        return reduce(then, vectors) if vectors else np.zeros(WIDTH)

    def typical(self, kind: str) -> Vector:
        """Return a part of a typical microbatch, also from a run with only a first and a last one.

        Forward is the last one's: the first one makes values for all. Backward is the first one's, as the last one sums
        gradients over axes; but its computation is the last one's, which adds to gradients.
        """
        if (kind, "middle") in self or kind == "F":
            return self.part(kind, "middle")
        vector = self.part(kind, "first").copy()
        here = slice(CAUSES.start, CAUSES.start + 3)
        vector[here] = self.part(kind, "last")[here]
        return vector

    @property
    def sent(self) -> float:
        """Bytes that a microbatch sends to the next stage."""
        return float(self.part("SEND_F", "last")[_SENT])


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
            of = {self.roles[name] for a in record.axes for name in axes_of_spec(a)}
            self._causes[record.axes] = next(a for a in ("pp", "dp", "ep", "cp", "tp") if a in of)
        return self._causes[record.axes]


def stage(r: DryRun, memory: Mapping[Key, Vector], clock: Meter) -> Stage:
    """Return the vectors of a one-stage rank's dry run. memory: as of `memory_of`."""
    vectors = Stage({("resident", ""): memory["resident", ""]})
    for key, part in _in_order(r):
        begin = _times(clock)
        clock.run(part)
        if key not in vectors:
            vectors[key] = memory[key].copy()
            vectors[key][CAUSES.start : LATE + 1] = _times(clock) - begin
    return vectors


def _times(clock: Meter) -> Vector:
    return np.array([*clock.spent.values(), clock.of_update])


def memory_of(r: DryRun) -> dict[Key, Vector]:
    """Return the vectors of the parts of a step without times, which do not depend on the device."""
    resident = Part("", [(1, storage) for storage in r.resident])
    parts, ran = parts_of(r), dict(reversed([*_in_order(r)]))
    vectors = {key: _memory(part) for key, part in [*parts.items(), (("resident", ""), resident)]}
    for key in (key for key, part in ran.items() if parts[key] is not part):
        vectors[key][HIGH] = _memory(ran[key])[HIGH]  # undoing what it leaves makes no peak
    return vectors


def parts_of(r: DryRun) -> Parts[Part]:
    """Return the parts of a step: all microbatches between the first and the last share a key.

    A microbatch that represents many leaves nothing when it ends; the first one leaves what the others use.
    """
    parts = Parts(reversed([*_in_order(r)]))
    several = len({a.microbatch for a, _ in r.actions if a.microbatch >= 0}) > 1
    for which, stays in (("first", _SHARED), ("middle", ())) if several else ():
        end = next((key for kind in "WB" if (key := (kind, which)) in parts), None)
        if end is not None:
            left = Counter[Storage]()
            for sign, storage in (x for (_, w), part in parts.items() if w == which for x in part.changes):
                left[storage] += sign
            undone = [(-1 if n > 0 else 1, s) for s, n in left.items() if n and s.kind not in stays]
            parts[end] = replace(parts[end], changes=[*parts[end].changes, *undone])
    return parts


def _in_order(r: DryRun) -> Iterator[tuple[Key, Part]]:
    """Yield a step's parts in order. None is a pair, which is of two stages."""
    yield ("before", ""), r.before
    for (a, which), (_, part) in zip(named(a for a, _ in r.actions), r.actions, strict=True):
        yield (a.kind, which), part
    yield ("after", ""), r.after
    yield ("update", ""), r.update


def named(actions: Iterable[Action]) -> Iterator[tuple[Action, str]]:
    """Yield a rank's actions with the kind of their microbatch: "first", "middle", "last", or "" (none)."""
    some = [*computed(actions)]
    last = max((a.microbatch for a in some), default=0)
    for a in some:
        m = a.microbatch
        yield a, "" if m < 0 else "first" if m == 0 else "last" if m == last else "middle"


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
    v[_SENT] = sum(r.bytes for r in part.sent if r.kind == "send_recv")
    return v


def lines(a: Stage, more: Stage, less: Stage, n: float) -> Stage:
    """Return a + n · (more - less). A first stage runs backward undivided: it has no time to fill."""
    none = np.zeros(WIDTH)
    if ("B", "first") in a and ("I", "first") in more:
        more, less = _undivided(more), _undivided(less)
    return Stage({k: a.get(k, none) + n * (more.get(k, none) - less.get(k, none)) for k in {**a, **more, **less}})


def then(a: Vector, b: Vector) -> Vector:
    """Return two parts in order. The peak is the first's, or the second's above what the first leaves."""
    both, after = a + b, a[NET] + b[HIGH]
    both[HIGH] = a[HIGH] if a[HIGH].sum() >= after.sum() else after
    return both


def _undivided(s: Stage) -> Stage:
    """Return the stage with backward as one part."""
    rest = {key: v for key, v in s.items() if key[0] not in ("I", "W")}
    return Stage(rest | {("B", w): then(s["I", w], s.part("W", w)) for kind, w in s if kind == "I"})
