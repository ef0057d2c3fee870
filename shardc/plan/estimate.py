"""Estimate the price of every choice (tier one), by arithmetic on the dry run of one block.

    memory   state with this ZeRO and data axis + microbatches that the schedule keeps × bytes of each + the highest
             moment of a microbatch
    time     microbatches × the slowest rank + the schedule's bubble + collectives that nothing hides

The search runs a block for splits (tp, ep, cp, recomputation) that may be the best. Other splits are predicted from the
nearest one that ran. Splits that then seem the best run too, until all of the best have run.
The estimates only decide what is priced by its own dry runs (shardc.plan.price). Users see those prices.
"""

from __future__ import annotations

import functools
import itertools
import math
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
from shardc.plan.space import Choice, Core, casts_kept
from shardc.plan.stage import BYTES, CAUSES, HIGH, NET, WHAT, N, Stage, Vector
from shardc.runtime.schedule import SCHEDULES
from shardc.spec.data_section import Data

#: Rows of the microbatches that are priced, from a run of one row; other numbers are interpolated linearly.
ROWS = (1, 4, 16, 64)
KIND = {k: i for i, k in enumerate(BYTES)}
#: Kinds of bytes that grow with the rows of a microbatch, and are split with them.
GROW = np.array([k in ("activations", "communication", "temporaries", "gathered", "inputs") for k in BYTES])
#: Columns of a rank's vector: seconds of a microbatch forward and backward by rows and cause, seconds of once-a-step
#: work, bytes that forward keeps, bytes of the peak above these, bytes of state, bytes to the next rank, Weights.
_SIZES = len(ROWS) * len(WHAT), len(ROWS) * len(WHAT), len(ROWS), N, N, N, 1, len(Weights._fields)
_ENDS_OF = np.cumsum((0, *_SIZES))
F, B, ONCE, KEPT, HEIGHT, STAYS, SEND, WEIGHTS = (slice(int(a), int(b)) for a, b in itertools.pairwise(_ENDS_OF))
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
    """Vectors of a split's stages, one a row: the first with one unit, a middle one, one more unit, the last.

    beside: time of the first and last stage outside layers, in layers. before: layers before the pattern of `period`.
    whole: the model has no repeated layers, and is divided evenly. sequence_parallel: whether compile accepted it.
    """

    vectors: Vector
    beside: tuple[float, float] = (0.0, 0.0)
    before: int = 0
    period: int = 1
    whole: bool = False
    sequence_parallel: bool = False

    @staticmethod
    def of(each: Sequence[Stages], *, sequence_parallel: bool = False) -> Block:
        """Build a block from its stages with each number of ROWS."""
        s = each[0]
        vectors = [_vector([x.stages[name] for x in each], rank.weights) for name, rank in s.ranks.items()]
        if "whole" in s.ranks:
            return Block(np.array(vectors * 4), whole=True, sequence_parallel=sequence_parallel)
        first, one, two, last = vectors
        parts = np.array([first, one, two - one, last])
        return Block(parts, beside_layers(s), s.before, s.period, sequence_parallel=sequence_parallel)

    @property
    def unit(self) -> Vector:
        """What one more unit of layers adds to a stage."""
        return self.vectors[2]  # type: ignore[no-any-return]

    def scaled(self, factors: Vector) -> Block:
        return replace(self, vectors=self.vectors * factors)

    def again(self, seconds: float, kept: float) -> Block:
        """Return the block with recomputation: backward runs a share of forward again, a share of bytes is kept."""
        made = self.vectors.copy()
        made[:, B] += seconds * made[:, F]
        made[[0, 1, 3], HEIGHT] += (1 - kept) * made[[0, 1, 3], KEPT]  # one layer at a time is recomputed
        made[:, KEPT] *= kept
        return replace(self, vectors=made)


def _vector(each: Sequence[Stage], weights: Weights) -> Vector:
    s = each[0]
    b_kinds = [k for k in s.computing if k != "F"]
    forward = [x.typical("F")[CAUSES] for x in each]
    backward = [np.sum([x.typical(k)[CAUSES] for k in b_kinds], 0) for x in each]
    once = [_once(x) for x in each]
    kept = s.typical("F")[NET]
    above = s.part("F", "last")[HIGH] - kept
    later = s.part(b_kinds[0], "last")[HIGH]
    height = above if above.sum() > later.sum() else later
    stays = s["resident", ""][NET]
    grads = np.zeros(N)
    grads[KIND["gradients"]] = weights.trained if stays[KIND["gradients"]] == 0 else 0.0
    return np.concatenate([*forward, *backward, once, kept, height, stays + grads, [s.sent], weights])


def _once(s: Stage) -> float:
    """Return seconds of once-a-step work, and the extra of the first and last microbatch, such as casts."""
    seconds = np.sum([s.part(k, "")[CAUSES] for k in ("before", "after", "update")], 0)
    for kind in s.computing:
        odd = s.part(kind, "first") + s.part(kind, "last") - 2 * s.typical(kind)
        seconds = seconds + np.where(_SUMMED, odd[CAUSES], 0)
    return float(seconds.sum())


@dataclass
class Table:
    """The choices of one split as columns, so that all are priced at once.

    groups: (ranks of the pipeline, stages of a rank, whether the first rank has the last stage, too), without repeats.
    known: see _lines.
    """

    choices: Sequence[Choice]
    device: Device
    known: dict[object, list[tuple[float, float]]]
    groups: list[tuple[int, int, bool]] = field(init=False)

    def __post_init__(self) -> None:
        some = self.choices
        numbers = [(c.pp, c.per_rank, c.rows, c.microbatches, c.zero, c.sharded, c.dp) for c in some]
        self.pp, self.per_rank, self.rows, self.m, self.zero, self.sharded, dp = np.array(numbers, float).T
        flags = [(c.kept, c.over_experts, bool(c.offload), c.offload == "all") for c in some]
        self.kept, self.over, self.inputs, self.all = np.array(flags, bool).T
        self.experts_sharded = np.where(self.over, dp, self.sharded)
        self.bucket = np.array([_DATA.bucket_bytes(c.dp * c.cp * c.ep) for c in some], float)
        self.of_rows = np.array([_parts_of_rows(c.rows) for c in some])
        timed = [_schedule(c.schedule, c.pp, c.per_rank, c.microbatches) for c in some]
        self.idle, first, last = np.array(timed, float).T
        self.alive = np.stack([first, (first + last) / 2, last], 1)
        keys = [(c.pp, c.per_rank, SCHEDULES[c.schedule].folds) for c in some]
        self.groups = list(dict.fromkeys(keys))
        numbered = {key: i for i, key in enumerate(self.groups)}
        self.group = np.array([numbered[key] for key in keys], np.intp)
        self.lines = np.array([_lines(c, self.device, self.known) for c in some])

    def taken(self, which: int, nbytes: Vector, times: Vector) -> Vector:
        """Return seconds of `times` collectives `which` (see _lines) with `nbytes` in total; shape [choices, ranks]."""
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
    forward, backward, weights = 1.0, 2.0, 1.0
    if microbatches < ranks:  # too few to fill the pipeline
        idle = (ranks - 1) * (forward + backward)
    else:
        idle = maker.idle(ranks, per_rank, microbatches, forward, backward, weights)
    first, last = (maker.kept(ranks, per_rank, microbatches, at) for at in (True, False))
    return idle / (forward + backward), first, last


def _lines(c: Choice, device: Device, known: dict[object, list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return (seconds of an empty one, seconds a byte) of collectives over data axes and of sends; zeros without any.

    Gathers and scatters of sharded weights, the same of experts that are sharded over another axis; sums of the
    remaining gradients, not of experts and of experts; sends to the next stage.
    known: the results so far, by the mesh and the axes that are sharded over.
    """
    if (key := (axes := tuple(c.mesh.items()), c.zero > 0, c.over_experts)) in known:
        return known[key]
    mesh, over = Mesh(axes), c.over_experts
    shards = () if not c.zero else ("dp",) if c.outer > 1 else (c.sharding,)
    of_experts = ("dp",) if c.zero and over else () if over else shards
    outer = ("dp_outer",) if c.outer > 1 else () if c.zero and not over else ("dp",)

    def line(kind: str, *names: str) -> tuple[float, float]:
        ranks = mesh.group(0, tuple(a for a in names if a in mesh.names))
        if kind == "send_recv":
            ranks = ranks[:2]
        none = collective_seconds(device, kind, 0, ranks)
        return none, (collective_seconds(device, kind, 1e9, ranks) - none) / 1e9

    known[key] = [
        line("all_gather", *shards),
        line("reduce_scatter", *shards),
        line("all_gather", *of_experts),
        line("reduce_scatter", *of_experts),
        line("all_reduce", *outer, *(() if over else ("ep",))),
        line("all_reduce", *(() if over or c.ep == 1 else outer)),
        line("send_recv", *(("pp",) if c.pp > 1 else ())),
    ]
    return known[key]


# --- estimates of a table


def estimated(t: Table, block: Block, core: Core, library: Library) -> tuple[Vector, Vector]:
    """Return (seconds, live bytes at the peak) of all choices of a table."""
    layers = library.layers
    each = [_ranks(block, *key, layers.number if layers else 1) for key in t.groups]
    ranks, uneven = (np.array(of_all)[t.group] for of_all in zip(*each, strict=True))
    peaks = _peaks(t, ranks, core, library.microbatches == 1)
    return _step(t, ranks, uneven, core, library.device), peaks.max(1)


def _ranks(block: Block, pp: int, per_rank: int, folds: bool, layers: int) -> tuple[list[Vector], float]:
    """Return the vectors of the first rank, of the fullest rank in the middle, and of the last rank.

    Also the layers of the longest stage after the first, relative to the mean: a pipeline fills and drains at its pace,
    and the rank's other stages are shorter.
    """
    first, one, unit, last = block.vectors
    if block.whole:
        return [one / pp] * 3, 1.0
    if pp == 1:
        return [first + last + ((layers - block.before) / block.period - 2) * unit] * 3, 1.0
    count = pp * per_rank
    counts = balanced(block.beside, count, layers, block.before)
    units_of = [(n - (block.before if i == 0 else 0)) / block.period for i, n in enumerate(counts)]
    own = [[r, count - 1 - r] if folds else list(range(r, count, pp)) for r in range(pp)]
    middle = max(own[1:-1], key=lambda mine: sum(units_of[i] for i in mine), default=own[-1])

    def rank(mine: Sequence[int]) -> Vector:
        each = [(first if i == 0 else last if i == count - 1 else one) + (units_of[i] - 1) * unit for i in mine]
        total: Vector = np.sum(each, 0)
        total[HEIGHT] = max((v[HEIGHT] for v in each), key=np.sum)
        total[SEND] = each[-1][SEND]
        return total

    return [rank(own[0]), rank(middle), rank(own[-1])], max(counts[1:]) * count / layers


def _weights(ranks: Vector) -> tuple[Vector, Vector, Vector, Vector]:
    """Return bytes of weights in the compute dtype and of gradients, experts' share, number of buckets.

    Each has the shape [choices, ranks]. The buckets have the smallest size.
    """
    p, g = ranks[..., STAYS.start + KIND["parameters"]], ranks[..., STAYS.start + KIND["gradients"]]
    casts, experts, _, buckets, *_ = np.moveaxis(ranks[..., WEIGHTS], -1, 0)
    cast = np.minimum(casts, p)
    whole = np.where(cast > 0, np.minimum(p - cast, p), p)  # weights without a copy are used as stored
    return whole, g, np.minimum(experts / np.where(p > 0, p, 1.0), 1.0), buckets


def _buckets(t: Table, smallest: Vector, grads: Vector) -> Vector:
    each = np.ceil(np.minimum(smallest, grads / t.bucket[:, None]) / t.per_rank[:, None])
    return np.maximum(each, 1) * t.per_rank[:, None]  # type: ignore[no-any-return]


def _peaks(t: Table, ranks: Vector, core: Core, one_microbatch: bool) -> Vector:
    stays, kept, height = (ranks[..., s].copy() for s in (STAYS, KEPT, HEIGHT))
    p, o, g, a = (KIND[k] for k in ("parameters", "optimizer", "gradients", "activations"))
    whole, grads, experts, smallest = _weights(ranks)
    cast = np.minimum(ranks[..., WEIGHTS.start], stays[..., p])
    zero, kept_whole, rows = t.zero[:, None], t.kept[:, None], t.rows[:, None, None]
    part = 1 / t.sharded[:, None] + experts * (1 / t.experts_sharded - 1 / t.sharded)[:, None]
    shares = stays[..., p] * part
    gathered = np.where((cast > 0) | kept_whole, whole + shares, stays[..., p])
    stays[..., p] = np.where((zero == 3) & ~kept_whole, shares, np.where(zero > 0, gathered, stays[..., p]))
    stays[..., o] *= np.where(zero > 0, part, 1) * ~t.inputs[:, None]
    stays[..., g] *= np.where((zero > 1) & ~kept_whole, part, 1)
    stays[..., p] = np.where(t.all[:, None], cast, stays[..., p])
    casts = cast * casts_kept(core.checkpoint)
    if one_microbatch:  # casts were counted in the microbatch
        kept[..., a] -= casts
    kept = np.where(GROW, kept * rows, 0)
    stays[..., p] += np.where(zero == 0, casts, 0)
    height = np.where(GROW, height * rows, height * (np.arange(N) == KIND["still"]))
    each = (zero > 1) & ~kept_whole
    passing = np.minimum(2 / _buckets(t, smallest, grads), 1) * (grads + np.where(zero == 3, whole, 0))
    kinds = stays + t.alive[..., None] * kept + np.maximum(height, -kept)
    return np.maximum(kinds, 0).sum(2) + np.where(each, passing, 0)  # type: ignore[no-any-return]


def _step(t: Table, ranks: Vector, uneven: Vector, core: Core, device: Device) -> Vector:
    """Return the seconds of a step: of the slowest rank, with its waits for others."""
    shape = (*ranks.shape[:2], len(ROWS), len(WHAT))
    f, b = ((ranks[..., s].reshape(shape).sum(3) * t.of_rows[:, None]).sum(2) for s in (F, B))
    once, m, zero = (ranks[..., ONCE] * t.of_rows[:, None]).sum(2), t.m[:, None], t.zero[:, None]
    # ZeRO gathers weights in the compute dtype: no microbatch casts them, or casts their gradients back
    casting, kept = _casting(ranks, device), casts_kept(core.checkpoint)
    f = f - np.where(zero > 0, np.minimum(casting * (1 - kept), f), 0)
    b = b - np.where(zero > 0, np.minimum(casting * (2 - kept), b), 0)
    once = once - np.where(zero > 0, casting * kept, 0)
    step, forward, backward = _exposed(t, ranks, f, b, device)
    f, b = f + forward, b + backward
    busy = f + b
    waits = (t.idle * uneven * busy.mean(1))[:, None]
    sends = t.taken(6, ranks[..., SEND.start] * t.rows[:, None], np.ones_like(once))
    waits = waits + np.where(t.pp > 1, 2 * (t.pp - 1), 0)[:, None] * sends
    # stages wait one after another for the gathers of a whole step
    step = step * np.where(t.kept & (t.zero > 0), t.pp, 1)[:, None]
    return (m * busy + waits + once + step).max(1)  # type: ignore[no-any-return]


def _casting(ranks: Vector, device: Device) -> Vector:
    """Return seconds of casting a rank's weights once: three bytes are moved for each byte of a copy."""
    copies, casts = ranks[..., WEIGHTS.start + 5], ranks[..., WEIGHTS.start]
    unique, places = np.unique(np.stack([copies, casts], -1).reshape(-1, 2), axis=0, return_inverse=True)
    seconds = [
        n * device.op_seconds(Op(0, round(3 * b / n), "float32", name="_to_copy")) if n > 0 else 0 for n, b in unique
    ]
    return np.array(seconds)[places.reshape(copies.shape)]


def _exposed(t: Table, ranks: Vector, f: Vector, b: Vector, device: Device) -> tuple[Vector, Vector, Vector]:
    """Return exposed seconds of the data axes' collectives: once a step, per forward, per backward."""
    whole, grads, experts, smallest = _weights(ranks)
    zero, over = t.zero[:, None], t.over[:, None]
    dense, buckets, slower = 1 - experts, _buckets(t, smallest, grads), 1 - device.reaches.computing
    apart = np.where(over, dense, 1.0)

    def taken(kind: int, nbytes: Vector) -> Vector:
        """Return the seconds on ZeRO's axis, and those of experts on their axis, if that is another one."""
        elsewhere = np.where(over & (experts > 0), t.taken(kind + 2, nbytes * experts, buckets * experts), 0)
        return t.taken(kind, nbytes * apart, np.maximum(buckets * apart, 1)) + elsewhere

    gather, scatter = taken(0, whole), taken(1, grads)
    left = np.where(zero == 0, 1.0, 1 / t.sharded[:, None])
    summed = t.taken(4, grads * dense * left, buckets) + t.taken(5, grads * experts * left, buckets * (experts > 0))
    ends = t.per_rank[:, None] / buckets
    seen = np.maximum(ends, _SEEN)

    # one op uses all experts' weights: only computation between two buckets hides their collectives
    together = np.minimum(ranks[..., WEIGHTS.start + 4] / np.maximum(smallest, 1e-9), 1.0)

    def in_turn(sent: Vector, computed: Vector, shown: Vector) -> Vector:
        return beside(sent * dense, computed, shown) + beside(sent * experts, computed * together, shown)

    def beside(sent: Vector, computed: Vector, shown: Vector) -> Vector:
        return np.maximum(sent - computed * (1 - shown), (shown + slower * (1 - shown)) * sent)

    each = (zero == 3) & ~t.kept[:, None]
    scattered = in_turn(scatter, b, ends)
    forward = np.where(each, in_turn(gather, f, seen), 0)
    backward = np.where(each, in_turn(gather + scatter, b, seen), np.where(zero == 2, scattered, 0))
    last = np.where(zero == 0, 0, np.where(each, backward, scattered))
    last = np.maximum(beside(summed + np.where(each, gather, 0), b, ends), last) - backward
    once = np.where((zero > 0) & ~each, beside(gather, f, seen), 0)
    return once + np.maximum(last, 0), forward, backward


# --- splits that did not run


def factors(near: Core, core: Core, block: Block, device: Device) -> Vector:
    """Return the factors that turn the vector of a split that ran (`near`) into that of another split.

    Work and activations are divided among more ranks. Collectives also depend on the links of their axis.
    """
    made = np.ones(int(_ENDS_OF[-1]))
    work = near.tp * near.cp / (core.tp * core.cp)
    p = max(float(block.unit[STAYS.start + KIND["parameters"]]), 1.0)
    experts = min(float(block.unit[WEIGHTS.start + 1]) / p, 1.0)
    if core.ep > 1 and near.ep == 1:
        experts = experts or _UNKNOWN
    state = near.tp / core.tp * (1 - experts + experts * near.ep / core.ep)
    causes = {"compute": work, "memory": work, "tp": near.cp / core.cp, "cp": near.tp / core.tp, "ep": work}
    for axis in ("tp", "cp", "ep"):
        sizes = [getattr(x, axis) for x in (near, core)]
        if min(sizes) > 1 and sizes[0] != sizes[1]:
            causes[axis] *= _bytes_seconds(device, core, axis) / max(_bytes_seconds(device, near, axis), 1e-30)
    by_cause = np.array([causes.get(w, 1.0) for w in WHAT])
    for columns in (F, B):
        made[columns] = np.tile(by_cause, len(ROWS))
    made[KEPT] = made[HEIGHT] = made[SEND] = work
    made[STAYS] = made[WEIGHTS] = state
    return made


#: The assumed share of experts in parameters, if no run shows it.
_UNKNOWN = 0.9


def _bytes_seconds(device: Device, core: Core, axis: str) -> float:
    sizes = {"cp": core.cp, "ep": core.ep, "tp": core.tp}
    mesh = Mesh(tuple((a, n) for a, n in sizes.items() if n > 1))
    kind = "all_to_all" if axis == "ep" else "all_gather"
    return collective_seconds(device, kind, 1e9, mesh.group(0, (axis,)))


def distance(near: Core, core: Core) -> float:
    """Return how many times axes are doubled, plus 4 for each axis that only one of both splits uses."""
    pairs = list(zip(near[:3], core[:3], strict=True))
    apart = sum(abs(math.log2(a / b)) for a, b in pairs)
    return apart + sum(4.0 for a, b in pairs if (a == 1) != (b == 1))
