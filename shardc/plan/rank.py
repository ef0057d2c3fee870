"""Estimate the price of every choice of a split (tier one), by arithmetic on the dry run of one block.

    memory   state with this ZeRO and data axis + microbatches that the schedule keeps × bytes of each + the highest
             moment of a microbatch
    time     microbatches × the slowest rank + the schedule's bubble + collectives that nothing hides

The estimates only decide what is priced by its own dry runs (shardc.plan.price). Users see those prices.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from shardc.ir.mesh import Mesh
from shardc.machine.collectives import collective_seconds
from shardc.machine.device import Device
from shardc.machine.work import Op
from shardc.plan.price import balanced, beside_layers
from shardc.plan.runs import Library, Stages, Weights
from shardc.plan.space import Choice, Core, Keep, casts_kept
from shardc.plan.stage import BYTES, CAUSES, HIGH, NET, SENT, WHAT, Stage, Vector, computing, part_of, typical
from shardc.runtime.schedule import SCHEDULES
from shardc.spec.data_section import Data

#: Rows of the microbatches that are priced, from a run of one row; other numbers are interpolated linearly.
ROWS = (1, 4, 16, 64)
KIND = {k: i for i, k in enumerate(BYTES)}
#: Kinds of bytes that grow with the rows of a microbatch, and are split with them.
GROW = np.array([k in ("activations", "communication", "temporaries", "gathered", "inputs") for k in BYTES])
#: Columns of a rank's vector: seconds of forward, of backward, and of once-a-step work, each for ROWS; seconds of one
#: cast of the weights; bytes that forward keeps; bytes of the peak above these, growing with rows or not (STILL);
#: bytes of state; bytes sent to the next rank; the bytes and buckets of Weights.
F, B, ONCE = (slice(i * len(ROWS), (i + 1) * len(ROWS)) for i in range(3))
(CASTING, KEPT, HEIGHT, STILL, PARAMETERS, OPTIMIZER, GRADIENTS, STATE, SEND, CASTS, EXPERTS, BUCKETS) = range(
    ONCE.stop, ONCE.stop + 12
)
_SUMMED = np.array([w not in ("dp", "ep") for w in WHAT])
_DATA = Data()
#: The share of hidden collectives that is always exposed: the first gather, the last sum.
_SEEN = 0.05


class Rough(NamedTuple):
    """An estimate: seconds of a step, live bytes at its peak."""

    seconds: float
    peak: float


@dataclass(frozen=True)
class Block:
    """Vectors of a split's stages: the first with one unit, a middle one, one more unit, the last.

    beside: time of the first and last stage outside layers, in layers. before: layers before the pattern of `period`.
    whole: the model has no repeated layers, and is divided evenly.
    """

    core: Core
    first: Vector
    one: Vector
    unit: Vector
    last: Vector
    beside: tuple[float, float] = (0.0, 0.0)
    before: int = 0
    period: int = 1
    whole: bool = False

    @staticmethod
    def of(core: Core, each: Sequence[Stages], device: Device) -> Block:
        """Build a block from its stages with each number of ROWS."""
        s = each[0]
        if s.whole is not None:
            whole = _vector([x.whole or {} for x in each], s.ranks["whole"].weights, device)
            return Block(core, whole, whole, whole, whole, whole=True)
        first, one, two, last = (
            _vector([getattr(x, name) for x in each], s.ranks[name].weights, device)
            for name in ("first", "one", "two", "last")
        )
        return Block(core, first, one, two - one, last, beside_layers(s), s.before, s.period)

    def between(self, full: Block, keep: Keep, share: float) -> Block:
        """Return the block with a share of the saved bytes, between nothing (`full`) and everything saved."""
        names = "first", "one", "unit", "last"
        vectors = {name: share * getattr(self, name) + (1 - share) * getattr(full, name) for name in names}
        return replace(full, core=full.core._replace(checkpoint=keep), **vectors)


def _vector(each: Sequence[Stage], weights: Weights, device: Device) -> Vector:
    s = each[0]
    later = [k for k in computing(s) if k != "F"]
    seconds = [[sum(typical(x, k)[CAUSES].sum() for k in kinds) for x in each] for kinds in (["F"], later)]
    kept, resident = typical(s, "F")[NET], s["resident", ""][NET]
    height = max(part_of(s, "F", "last")[HIGH] - kept, part_of(s, later[0], "last")[HIGH], key=np.sum)
    p, o, g = (float(resident[KIND[k]]) for k in ("parameters", "optimizer", "gradients"))
    cast = Op(0, round(3 * weights.casts / max(weights.copies, 1)), "float32", name="_to_copy")
    casting = weights.copies * device.op_seconds(cast)  # moves three times the bytes of the copies
    of_rows = kept[GROW].sum(), height[GROW].sum(), height[KIND["still"]]
    state = p, o, g or weights.trained, resident.sum() - p - o - g
    sent = part_of(s, "SEND_F", "last")[SENT], weights.casts, weights.experts, weights.buckets
    return np.array([*seconds[0], *seconds[1], *map(_once, each), casting, *of_rows, *state, *sent])


def _once(s: Stage) -> float:
    """Return seconds of once-a-step work, and the extra of the first and last microbatch, such as casts."""
    seconds = np.sum([part_of(s, k, "")[CAUSES] for k in ("before", "after", "update")], 0)
    for kind in computing(s):
        odd = part_of(s, kind, "first") + part_of(s, kind, "last") - 2 * typical(s, kind)
        seconds = seconds + np.where(_SUMMED, odd[CAUSES], 0)
    return float(seconds.sum())


@dataclass
class Table:
    """The choices of one split as columns, so that all are priced at once.

    groups: (ranks of the pipeline, stages of a rank, whether the first rank has the last stage, too), without repeats.
    known: times of collectives, see _line.
    """

    choices: Sequence[Choice]
    device: Device
    known: dict[object, tuple[float, float]]
    groups: list[tuple[int, int, bool]] = field(init=False)

    def __post_init__(self) -> None:
        choices = self.choices
        numbers = [
            (c.pp, c.per_rank, c.rows, c.microbatches, c.zero, c.sharded, c.dp, _DATA.bucket_bytes(c.dp * c.cp * c.ep))
            for c in choices
        ]
        columns = np.array(numbers, float).T[:, :, None]
        self.pp, self.per_rank, self.rows, self.m, self.zero, self.sharded, dp, self.bucket = columns
        flags = [(c.over_experts, bool(c.offload), c.offload == "all") for c in choices]
        self.over, self.host, self.all = np.array(flags, bool).T[:, :, None]
        self.experts_sharded = np.where(self.over, dp, self.sharded)
        self.of_rows = np.array([_parts_of_rows(c.rows) for c in choices])[:, None, :]
        timed = [_schedule(c.schedule, c.pp, c.per_rank, c.microbatches) for c in choices]
        self.idle, first, last = np.array(timed, float).T[:, :, None]
        self.alive = np.concatenate([first, (first + last) / 2, last], 1)
        keys = [(c.pp, c.per_rank, SCHEDULES[c.schedule].folds) for c in choices]
        self.groups = list(dict.fromkeys(keys))
        self.group = np.array(list(map({key: i for i, key in enumerate(self.groups)}.__getitem__, keys)), np.intp)
        lines = {_placed(c): c for c in choices}
        times = {key: _lines(c, self.device, self.known) for key, c in lines.items()}
        self.lines = np.array([times[_placed(c)] for c in choices])

    def taken(self, which: int, nbytes: Vector, times: Vector) -> Vector:
        """Return seconds of `times` COLLECTIVES[which] with `nbytes` in total; shape [choices, ranks]."""
        line = self.lines[:, which, :, None]
        return line[:, 0] * times + line[:, 1] * nbytes


def _parts_of_rows(rows: int) -> list[float]:
    """Return how to interpolate a microbatch of so many rows: the factor for each number of ROWS.

    >>> _parts_of_rows(7)
    [0.0, 0.75, 0.25, 0.0]
    """
    shares = [0.0] * len(ROWS)
    i = min(bisect_right(ROWS, rows), len(ROWS) - 1)
    further = (rows - ROWS[i - 1]) / (ROWS[i] - ROWS[i - 1])
    shares[i - 1], shares[i] = 1 - further, further
    return shares


@functools.cache
def _schedule(name: str, ranks: int, per_rank: int, microbatches: int) -> tuple[float, float, float]:
    """Return (idle time of a rank in microbatches, microbatches that the first rank keeps, the last rank)."""
    maker = SCHEDULES[name]
    if ranks == 1:
        return 0.0, 1.0, 1.0
    idle = 3.0 * (ranks - 1)  # too few to fill the pipeline
    if microbatches >= ranks:
        idle = maker.idle(ranks, per_rank, microbatches, 1.0, 2.0, 1.0)
    first, last = (maker.kept(ranks, per_rank, microbatches, at) for at in (True, False))
    return idle / 3, first, last


#: Collectives of data axes and pipeline neighbours: gathers and scatters of sharded weights, and of experts that are
#: sharded over another axis; sums of the remaining gradients, not of experts and of experts; sends to the next stage.
COLLECTIVES = SHARED, OF_EXPERTS, SUM, SUM_OF_EXPERTS, TO_NEXT = range(5)


def _placed(c: Choice) -> tuple[object, ...]:
    return c.pp, c.dp, c.cp, c.ep, c.tp, c.zero > 0, c.outer, c.over_experts


def _lines(c: Choice, device: Device, known: dict[object, tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (seconds of an empty one, seconds a byte) of each of COLLECTIVES; zeros if a choice has none."""
    outer = ("dp_outer",) if c.outer > 1 else () if c.zero and not c.over_experts else ("dp",)
    ep = () if c.over_experts else ("ep",)
    needed = (
        ("all_gather", (c.sharding,) if c.zero else ()),
        ("all_gather", ("dp",) if c.over_experts else ()),
        ("all_reduce", (*outer, *ep)),
        ("all_reduce", outer if c.ep > 1 and not c.over_experts else ()),
        ("send_recv", ("pp",)),
    )
    mesh = Mesh(tuple(c.mesh.items()))
    sizes = dict(mesh.axes)
    return [_line(device, kind, mesh, tuple(a for a in over if sizes.get(a, 1) > 1), known) for kind, over in needed]


def _line(
    device: Device, kind: str, mesh: Mesh, axes: tuple[str, ...], known: dict[object, tuple[float, float]]
) -> tuple[float, float]:
    if not axes:
        return 0.0, 0.0
    first = min(mesh.names.index(a) for a in axes)
    inner = mesh.axes[first + 1 :] if axes == ("pp",) else mesh.axes[first:]  # axes outside make no difference
    if (key := (kind, axes, inner)) not in known:
        ranks = Mesh((("pp", 2), *inner)).group(0, axes) if axes == ("pp",) else Mesh(inner).group(0, axes)
        none = collective_seconds(device, kind, 0, ranks)
        known[key] = none, (collective_seconds(device, kind, 1e9, ranks) - none) / 1e9
    return known[key]


# --- prices of a table


def priced(t: Table, block: Block, library: Library) -> tuple[Vector, Vector]:
    """Return (seconds, live bytes at the peak) of all choices of a table."""
    layers = library.layers
    pairs = [_ranks(block, *key, layers.number if layers else 1) for key in t.groups]
    ranks, uneven = np.array([r for r, _ in pairs])[t.group], np.array([u for _, u in pairs])[t.group, None]
    kept = casts_kept(block.core.checkpoint)
    return _step(t, ranks, uneven, kept, library.device), _peaks(t, ranks, kept)


def _ranks(block: Block, pp: int, per_rank: int, folds: bool, layers: int) -> tuple[list[Vector], float]:
    """Return the first, the fullest middle and the last rank; and the longest stage, relative to the mean.

    A pipeline fills and drains at the pace of its longest stage; other stages of the rank are shorter.
    """
    if block.whole:
        return [block.one / pp] * 3, 1.0
    if pp == 1:
        units = (layers - block.before) / block.period
        return [block.first + block.last + (units - 2) * block.unit] * 3, 1.0
    count = pp * per_rank
    counts = balanced(block.beside, count, layers, block.before)
    units_of = [(n - (block.before if i == 0 else 0)) / block.period for i, n in enumerate(counts)]
    stages = [[r, count - 1 - r] if folds else list(range(r, count, pp)) for r in range(pp)]
    middle = max(stages[1:-1], key=lambda mine: sum(units_of[i] for i in mine), default=stages[-1])

    def rank(mine: Sequence[int]) -> Vector:
        vectors = [
            (block.first if i == 0 else block.last if i == count - 1 else block.one) + (units_of[i] - 1) * block.unit
            for i in mine
        ]
        total: Vector = np.sum(vectors, 0)
        total[[HEIGHT, STILL]] = max((v[[HEIGHT, STILL]] for v in vectors), key=np.sum)
        total[SEND] = vectors[-1][SEND]
        return total

    return [rank(stages[0]), rank(middle), rank(stages[-1])], max(counts[1:]) * count / layers


def _weights(t: Table, ranks: Vector) -> tuple[Vector, Vector, Vector]:
    """Return (bytes of weights in the compute dtype, experts' share, number of buckets). [choices, ranks]"""
    p, casts = ranks[..., PARAMETERS], ranks[..., CASTS]
    whole = np.where(casts > 0, np.minimum(np.maximum(p - casts, 0), p), p)  # weights without a copy are used as stored
    smallest = np.minimum(ranks[..., BUCKETS], ranks[..., GRADIENTS] / t.bucket)
    buckets = np.maximum(np.ceil(smallest / t.per_rank), 1) * t.per_rank
    return whole, np.minimum(ranks[..., EXPERTS] / np.maximum(p, 1.0), 1.0), buckets


def _peaks(t: Table, ranks: Vector, casts_kept: float) -> Vector:
    p, o, grads, rest = (ranks[..., i] for i in (PARAMETERS, OPTIMIZER, GRADIENTS, STATE))
    whole, experts, buckets = _weights(t, ranks)
    cast = np.minimum(ranks[..., CASTS], p)
    part = 1 / t.sharded + experts * (1 / t.experts_sharded - 1 / t.sharded)
    gathered = np.where(cast > 0, whole + p * part, p)
    weights = np.where(t.zero == 3, p * part, np.where(t.zero > 0, gathered, p + cast * casts_kept))
    state = np.where(t.all, cast, weights) + o * np.where(t.zero > 0, part, 1) * ~t.host
    state = state + grads * np.where(t.zero > 1, part, 1) + rest
    kept, height = ranks[..., KEPT] * t.rows, ranks[..., HEIGHT] * t.rows
    passing = np.minimum(2 / buckets, 1) * (grads + np.where(t.zero == 3, whole, 0))
    total = state + t.alive * kept + np.maximum(height, -kept) + ranks[..., STILL] + np.where(t.zero > 1, passing, 0)
    return total.max(1)  # type: ignore[no-any-return]


def _step(t: Table, ranks: Vector, uneven: Vector, casts_kept: float, device: Device) -> Vector:
    """Return the seconds of a step: of the slowest rank, with its waits for others."""
    f, b, once = ((ranks[..., s] * t.of_rows).sum(2) for s in (F, B, ONCE))
    # with ZeRO, weights are gathered in the compute dtype: no microbatch casts them, or widens their gradients
    casting = np.where(t.zero > 0, ranks[..., CASTING], 0)
    f, b = np.maximum(f - casting * (1 - casts_kept), 0), np.maximum(b - casting * (2 - casts_kept), 0)
    step, forward, backward = _exposed(t, ranks, f, b, device)
    busy = f + b + forward + backward
    waits = t.idle * uneven * busy.mean(1, keepdims=True)
    waits = waits + 2 * (t.pp - 1) * t.taken(TO_NEXT, ranks[..., SEND] * t.rows, np.ones_like(once))
    return (t.m * busy + waits + once - casting * casts_kept + step).max(1)  # type: ignore[no-any-return]


def _exposed(t: Table, ranks: Vector, f: Vector, b: Vector, device: Device) -> tuple[Vector, Vector, Vector]:
    """Return exposed seconds of the data axes' collectives: once a step, per forward, per backward."""
    grads, (whole, experts, buckets) = ranks[..., GRADIENTS], _weights(t, ranks)
    share, slower = np.where(t.over, 1 - experts, 1.0), 1 - device.reaches.computing

    def sharded(nbytes: Vector) -> Vector:
        """Return seconds over the axis that ZeRO shards over, and over that of experts if it is another one."""
        elsewhere = np.where(t.over, t.taken(OF_EXPERTS, nbytes * experts, buckets * experts), 0)
        return t.taken(SHARED, nbytes * share, np.maximum(buckets * share, 1)) + elsewhere

    def beside(sent: Vector, computed: Vector, shown: Vector) -> Vector:
        return np.maximum(sent - computed * (1 - shown), (shown + slower * (1 - shown)) * sent)

    gather, scatter, left = sharded(whole), sharded(grads), grads * np.where(t.zero == 0, 1.0, 1 / t.sharded)
    summed = t.taken(SUM, left * (1 - experts), buckets)
    summed = summed + t.taken(SUM_OF_EXPERTS, left * experts, buckets * (experts > 0))
    ends = t.per_rank / buckets
    seen = np.maximum(ends, _SEEN)
    zero3 = t.zero == 3
    scattered = beside(scatter, b, ends)
    forward = np.where(zero3, beside(gather, f, seen), 0)
    backward = np.where(zero3, beside(gather + scatter, b, seen), np.where(t.zero == 2, scattered, 0))
    last = np.where(t.zero == 0, 0, np.where(zero3, backward, scattered))
    last = np.maximum(beside(summed + np.where(zero3, gather, 0), b, ends), last) - backward
    once = np.where((t.zero > 0) & ~zero3, beside(gather, f, seen), 0)
    return once + np.maximum(last, 0), forward, backward
