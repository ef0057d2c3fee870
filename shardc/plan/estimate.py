"""A first price of every choice: arithmetic on the dry run of one microbatch, for thousands of choices a second.

    memory   state at this ZeRO and data axis + microbatches that the schedule keeps × bytes of each + the highest
             moment of a backward
    time     microbatches × the slowest stage + the schedule's bubble + gradient sums that backward does not hide

The estimates only decide which choices are then priced exactly (shardc.plan.exact_price): users see exact prices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardc.cost.collective_seconds import collective_seconds
from shardc.cost.device import Device
from shardc.cost.recorded import Op
from shardc.ir.mesh import Mesh
from shardc.plan.columns import COLLECTIVES, OF_EXPERTS, Columns
from shardc.plan.dry_runs import Library, Stages
from shardc.plan.exact_price import balanced, beside_layers, computing, once_a_step, spread
from shardc.plan.records import Weights
from shardc.plan.space import Choice, Keep, Layers, casts_kept
from shardc.plan.stage_vectors import (
    AT,
    BYTES,
    CAUSES,
    FIXED,
    GROW,
    HIGH,
    MOST,
    NET,
    SENT,
    WHAT,
    WIDTH,
    N,
    Stage,
    Vector,
    part_of,
    typical,
)
from shardc.runtime.schedule import SCHEDULES

KIND = {k: i for i, k in enumerate(BYTES)}
_STILL = np.arange(N) == KIND["still"]


class Load(NamedTuple):
    """The load of one rank, for a microbatch of one row. total: of all its stages, see `summed`; height: bytes at the
    highest moment of a microbatch above what it found; most: the most of those that grow with rows; end: of the bytes
    that forward keeps, those that only a model's last stage does; sent: bytes to the next rank. place: of the rank in
    the pipeline, from 0.0, the first, to 1.0.
    """

    total: Vector
    height: Vector
    most: float
    end: Vector
    sent: float
    weights: Weights
    place: float

    @staticmethod
    def of(sums: Sequence[Vector], weights: Weights, end: Vector | None = None, place: float = 0.0) -> Load:
        """sums: of each stage of the rank, see `summed`."""
        total = sums[0].copy()
        for x in sums[1:]:
            total = total + x
        total[_ENDS] = once_a_step([x[_ENDS] for x in sums])
        f = total[_F][NET]
        forward, backward = (max((x[high] for x in sums), key=np.sum) for high in (_HIGH_F, _HIGH_B))
        high = forward - f if forward.sum() > f.sum() + backward.sum() else backward
        most = max(max(x[_MOST_F] for x in sums) - f[GROW].sum(), *(x[_MOST_B] for x in sums))
        end = _NO_BYTES if end is None else end
        return Load(total, high, float(most), end, float(sums[-1][-1]), weights, place)

    def lasting(self, other: Load) -> Load:
        """As many bytes as this one, for as long as another one."""
        return self._replace(total=np.where(_TIMES, other.total, self.total), sent=other.sent)


#: Of a stage, in one vector: forward and backward of a microbatch, the highest moments of both, what comes before and
#: after, what stays, what it sends.
_SIZES = WIDTH, WIDTH, N, N, len(WHAT), N
_F, _B, _HIGH_F, _HIGH_B, _ENDS, _RESIDENT = itertools.starmap(
    slice, itertools.pairwise((0, *itertools.accumulate(_SIZES)))
)
_MOST_F, _MOST_B = (part.start + MOST for part in (_F, _B))


#: What of these are seconds.
_TIMES = np.zeros(_RESIDENT.stop + 1, bool)
for _part in (_F, _B):
    for _columns in (CAUSES, FIXED, *AT):
        _TIMES[_part][_columns] = True
_TIMES[_ENDS] = True
_NO_BYTES = np.zeros(N)

#: Of ZeRO's collectives, the share that nothing hides in any case: the first gather, or the last sum.
_SEEN = 0.05

_SUMMED = np.array([w not in ("dp", "ep") for w in WHAT])


def summed(s: Stage) -> Vector:
    """What estimates want of a stage. It is as linear in layers as the stage is."""
    most = {kind: typical(s, kind) for kind in computing(s)}
    b = np.sum([v for kind, v in most.items() if kind != "F"], 0)
    ends = np.sum([part_of(s, k, "")[CAUSES] for k in ("before", "after", "update")], 0)
    # once a step, what the first microbatch and the last one take more, such as casts of weights, and sums of gradients
    # over the axes of a core, or less, as they find no gradients; sums over the data axes, experts' too, are estimated
    for kind, v in most.items():
        odd = [part_of(s, kind, which)[CAUSES] for which in ("first", "last")]
        ends += np.where(_SUMMED, np.sum(odd, 0) - 2 * v[CAUSES], 0)
    highs = [part_of(s, k, "last")[HIGH] for k in ("F", "B")]
    sent = [part_of(s, "SEND_F", "last")[SENT]]
    return np.concatenate([most["F"], b, *highs, ends, s["resident", ""][NET], sent])


class Rough(NamedTuple):
    """An estimate: seconds of a step, bytes at its peak."""

    seconds: float
    peak: float


@dataclass
class Estimates:
    """Estimates choices from the dry runs of their cores."""

    library: Library
    _lines: dict[object, tuple[float, float]] = field(default_factory=dict)

    def __call__(self, c: Choice) -> Rough:
        """Raises ShardcError if compile refuses the core."""
        return self.of([c], self.library.core(c))[0]

    def of(self, choices: Sequence[Choice], core: Stages) -> list[Rough]:
        """Of choices with one core, whose stages are given."""
        if not choices:
            return []
        seconds, peaks = self.at_once(self.columns(choices), core, choices[0].checkpoint)
        return [Rough(*pair) for pair in zip(seconds.tolist(), peaks.tolist(), strict=True)]

    def at_once(self, t: Columns, core: Stages, keep: Keep) -> tuple[Vector, Vector]:
        """(seconds, bytes at the peak) of all these choices, whatever they recompute. keep: what this core does."""
        sums = _Summed.of(core)
        loads = [_loads(sums, t.choices[i], self.library, SCHEDULES[t.choices[i].schedule].folds) for i in t.firsts]
        ranks = [[some[min(at, len(some) - 1)] for some in loads] for at in range(max(map(len, loads)))]
        each = [self._rank(t, _Each.of(mine, t.group, self.library.device), keep) for mine in ranks]
        return self._pipelined(t, each), np.max([rank.peak for rank in each], 0)

    def _pipelined(self, t: Columns, ranks: Sequence[_Rank]) -> Vector:
        """Seconds of each choice: a rank waits while the others run its first microbatch and its last one. ranks: the
        first, the fullest of those in the middle, and the last, or as many of these as there are.
        """
        end = np.where(t.stages > 1, 1 / t.stages, 0.0)
        shares = [1 - (len(ranks) > 1) * end] if len(ranks) < 3 else [1 / t.stages, 1 - 1 / t.stages - end]
        shares += [end] * (len(ranks) > 1)
        mean = np.sum([share * rank.actions for share, rank in zip(shares, ranks, strict=True)], 0)
        steps = t.steps(mean, np.max([rank.send for rank in ranks], 0))
        busy = mean[0] + mean[1]
        waits = np.maximum(steps - t.microbatches * busy, 0)
        of_each = []
        for rank in ranks:
            own = rank.actions[0] + rank.actions[1]
            others = np.maximum(t.stages * busy - own, 0) / np.maximum((t.stages - 1) * busy, 1e-30)
            of_each.append(t.microbatches * own + waits * np.where(t.stages > 1, others, 1) + rank.once)
        return np.max(of_each, 0)  # type: ignore[no-any-return]

    def _rank(self, t: Columns, x: _Each, keep: Keep) -> _Rank:
        """Of a rank with this load, of each choice."""
        m, rows = t.microbatches, t.rows
        p, o, g = (KIND[k] for k in ("parameters", "optimizer", "gradients"))
        cast = np.minimum(x.cast, x.resident[:, p])
        # memory
        state = x.resident.copy()
        part = t.part(x.experts)
        shares = state[:, p] * part
        # whole as products take them, and a part as they are stored
        whole = np.where(cast > 0, np.minimum(cast + x.plain, state[:, p]), state[:, p])
        gathered = np.where((cast > 0) | t.kept, whole + shares, state[:, p])
        state[:, p] = np.where((t.zero == 3) & ~t.kept, shares, np.where(t.zero > 0, gathered, state[:, p]))
        state[:, o] *= np.where(t.zero > 0, part, 1)
        state[:, g] *= np.where((t.zero > 1) & ~t.kept, part, 1)
        state[:, o] *= ~t.offloads_optimizer
        state[:, p] = np.where(t.offloads_all, cast, state[:, p])
        kept = x.kept.copy()
        # weights that are cast: a copy for all microbatches, unless they are stored in that dtype or gathered
        casts = cast * casts_kept(keep)
        if self.library.microbatches == 1:  # it was counted as the microbatch's
            kept[:, KIND["activations"]] -= casts
        kept = np.where(GROW, kept * rows[:, None], 0)
        state[:, p] += np.where(t.zero == 0, casts, 0)
        height = np.where(GROW, x.height * rows[:, None], x.height * _STILL)
        ends = np.where(GROW, x.end * (rows * np.where(t.collects, m, 1))[:, None], 0)
        alive = t.alive[0] + (t.alive[1] - t.alive[0]) * x.place
        kinds = state + alive[:, None] * kept + ends
        most = np.maximum(kinds, 0).sum(1) + x.most * rows
        kinds += np.maximum(height, -kept - ends)
        passing = self._passing(t, x, whole)
        most += passing
        kinds[:, g] += passing
        # time
        f, b = (np.maximum((v * t.of_rows).sum(1), 0) for v in (x.forward, x.backward))  # bounds may be below
        # with ZeRO weights are there in the dtype of products: no microbatch casts them, nor their gradients
        ends = x.ends.sum(1) - np.where(t.zero > 0, x.casting * casts_kept(keep), 0)
        casting = x.casting * (1 - casts_kept(keep))
        f -= np.where(t.zero > 0, np.minimum(casting, f), 0)
        b -= np.where(t.zero > 0, np.minimum(casting + x.widening, b), 0)
        # gradients of weights take as long as forward: as many products
        w = np.minimum(f, b / 2)
        of_step, of_forward, of_backward = self._sums(t, x, whole, np.where(cast > 0, cast, whole), f, b)
        send = t.taken("send_recv", x.sent * rows, np.ones(len(rows)))
        actions = np.stack([f + of_forward, b + of_backward, b - w, w + of_backward])
        return _Rank(actions, send, ends + of_step, np.maximum(most, np.maximum(kinds, 0).sum(1)))

    def _passing(self, t: Columns, x: _Each, weights: Vector) -> Vector:
        """Bytes of buckets that are whole for a moment, in backward, beside what ZeRO shards: two of gradients, one
        that fills while the one before it is summed; and at ZeRO 3 two of weights, of which one is on its way.
        """
        gradients = x.resident[:, KIND["gradients"]]
        share = np.minimum(2 / np.maximum(t.buckets(x.buckets + x.experts_buckets, gradients), 1), 1)
        each = (t.zero > 1) & ~t.kept
        passing: Vector = np.where(each, share * (gradients + np.where(t.zero == 3, weights, 0)), 0)
        return passing

    def _sums(self, t: Columns, x: _Each, weights: Vector, again: Vector, f: Vector, b: Vector) -> tuple[Vector, ...]:
        """Seconds of collectives over the data axes that do not overlap, or of ZeRO's over the sequence's axis: what is
        not sharded there is summed in the dry run. Of a step, of each microbatch's forward, and of its backward.
        weights, again: bytes of weights as forward and backward gather them. f, b: seconds of a microbatch's forward
        and backward.
        """
        grads, experts = x.resident[:, KIND["gradients"]], x.experts
        dense = 1 - experts
        sharded = np.where(t.over_experts, dense, 1.0)
        # each bucket is a collective of its own, which takes a while to begin
        some = t.buckets(x.buckets, grads * dense), t.buckets(x.experts_buckets, grads * experts)
        # weights that are gathered as they are stored go in buckets of their own
        some[0][:] += t.per_rank * ((t.zero > 0) & (x.plain > 0) & (x.cast > 0))
        at_once = np.where(t.over_experts, some[0], some[0] + some[1])

        def taken(kind: str, nbytes: Vector) -> Vector:
            """Over the axis that ZeRO shards over, and over that of experts, where it is another one: layer by layer,
            one after the other.
            """
            return t.taken(kind, nbytes * sharded, at_once) + t.taken(OF_EXPERTS[kind], nbytes * experts, some[1])

        gather, regather = taken("all_gather", weights), taken("all_gather", again)
        scatter = taken("reduce_scatter", grads)
        # once a step what is left on a rank is summed over replicas; all of it leaves over the same links, those of dp
        left = np.where(t.zero == 0, 1.0, 1 / t.sharded)
        of_experts = t.taken("sum of experts", grads * experts * left, some[1])
        of_experts += t.taken("scatter of experts", grads * experts, some[1])
        summed = t.taken("sum of dense", grads * dense * left, some[0]) + of_experts

        slower = 1 - self.library.device.reaches.computing  # what computes beside a collective

        # of each stage's the first gather and the last sum have nothing beside them
        ends = t.per_rank / np.maximum(at_once, t.per_rank)
        seen = np.maximum(ends, _SEEN)

        def beside(communicating: Vector, computing: Vector, seen: Vector) -> Vector:
            left = communicating - computing * (1 - seen)
            exposed: Vector = np.maximum(left, (seen + slower * (1 - seen)) * communicating)
            return exposed

        def in_turn(communicating: Vector, computing: Vector, seen: Vector) -> Vector:
            """One bucket at a time. Of those that are used together each hides behind no more than is computed from one
            bucket to the next; others take as long as the products with them, in proportion.
            """
            together = communicating * x.together
            apart = communicating - together
            return beside(apart, computing, seen) + beside(together, computing * x.together_buckets, seen)

        each = (t.zero == 3) & ~t.kept
        scattered = in_turn(scatter, b, ends)
        forward = np.where(each, in_turn(gather, f, seen), 0)
        backward = np.where(each, in_turn(regather + scatter, b, seen), np.where(t.zero == 2, scattered, 0))
        all_sums = np.where(each, regather + summed, summed)
        last = np.where(t.zero == 0, 0, np.where(each, backward, scattered))
        last = np.maximum(beside(all_sums, b, ends), last) - backward
        once = np.where((t.zero > 0) & ~each, beside(gather, f, seen), 0)
        # one stage of a pipeline after the other waits for them: but not for the last bucket, nor for the last
        # update's, nor for sums that are waited for after backward
        once *= np.where(t.kept, t.stages, 1)
        last *= np.where(t.zero > 1, 1 + (t.stages - 1) * (1 - 1 / np.maximum(at_once, 1)), 1)
        return once + last, forward, backward

    def columns(self, choices: Sequence[Choice]) -> Columns:
        """Choices with one core, or with cores that differ in what they recompute, as they are estimated at once."""
        return Columns(choices, self._lines_of)

    def _lines_of(self, c: Choice) -> list[tuple[float, float]]:
        """Of each collective, zeros for those that a choice does not need: see _line."""
        mine = dict.fromkeys(COLLECTIVES, (0.0, 0.0))
        over, dense, experts = _summed_over(c)
        if c.zero:
            mine |= {kind: self._line(kind, c, over) for kind in OF_EXPERTS}
            if c.over_experts and c.dp > 1:
                mine |= {name: self._line(kind, c, ("dp",)) for kind, name in OF_EXPERTS.items()}
        mine |= {"sum of dense": self._line("all_reduce", c, dense)} if dense else {}
        mine |= {"sum of experts": self._line("all_reduce", c, experts)} if experts else {}
        if c.pp > 1:
            mine["send_recv"] = self._line("send_recv", c, ("pp",))
        return list(mine.values())

    def _line(self, kind: str, c: Choice, axes: tuple[str, ...]) -> tuple[float, float]:
        """Of a collective over these axes, or from one stage to the next, which is linear in bytes: seconds of none,
        and of each byte.
        """
        key = kind, axes, c.dp, c.cp, c.ep, c.tp, c.outer, c.inside, c.pp if c.inside or axes == ("pp",) else 1
        if key not in self._lines:
            mesh = Mesh(tuple(c.mesh.items()))
            ranks = mesh.group(0, tuple(a for a in axes if a in mesh.names))
            ranks = ranks[:2] if axes == ("pp",) else ranks
            none = collective_seconds(self.library.device, kind, 0, ranks)
            self._lines[key] = none, (collective_seconds(self.library.device, kind, 1e9, ranks) - none) / 1e9
        return self._lines[key]


def _summed_over(c: Choice) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The axes that ZeRO shards over; those over which a rank's part of gradients is summed then, of what is not
    experts', and of what is: their own axis does not sum that.
    """
    shards = ("dp",) if c.outer > 1 else (c.sharding,)
    outer = ("dp_outer",) if c.outer > 1 else () if c.zero and not c.over_experts else ("dp",) if c.dp > 1 else ()
    ep = ("ep",) if c.ep > 1 and not c.over_experts else ()
    return shards if c.zero else (), (*outer, *ep), outer if c.ep > 1 and not c.over_experts else ()


class _Rank(NamedTuple):
    """What a rank takes, of each choice. actions: seconds of F, B, I and W of a microbatch, on all its stages; send: of
    what it sends to the next; once: once a step. peak: bytes.
    """

    actions: Vector
    send: Vector
    once: Vector
    peak: Vector


class _Each(NamedTuple):
    """The loads of a rank, one for each choice. kept: bytes, of which `end` are those that only a model's last stage
    keeps. cast: bytes of weights in the dtype of products; plain: of those that are used as they are stored; experts:
    share of the parameters that are experts', spread over an axis of theirs. forward, backward: seconds, see
    `_by_rows`. buckets, experts_buckets: see Weights; together, together_buckets: likewise, as shares of
    all. casting, widening: seconds, see `_of_casts`. Others: see Load.
    """

    resident: Vector
    kept: Vector
    end: Vector
    cast: Vector
    plain: Vector
    forward: Vector
    backward: Vector
    height: Vector
    most: Vector
    ends: Vector
    sent: Vector
    experts: Vector
    buckets: Vector
    experts_buckets: Vector
    together: Vector
    together_buckets: Vector
    place: Vector
    casting: Vector
    widening: Vector

    @staticmethod
    def of(loads: Sequence[Load], group: NDArray[np.intp], device: Device) -> _Each:
        """loads: of each group of choices."""
        totals, heights, most, ends, sent, weights, places = (np.array(x) for x in zip(*loads, strict=True))
        resident, f, b = totals[:, _RESIDENT], totals[:, _F], totals[:, _B]
        casts, copies, plain, experts, buckets, experts_buckets, together, together_buckets, _ = weights.T
        parameters = resident[:, KIND["parameters"]]
        parameters = np.where(parameters == 0, 1.0, parameters)
        each = _Each(
            resident,
            f[:, NET] - ends,
            ends,
            casts,
            plain,
            _by_rows(f),
            _by_rows(b),
            heights,
            most,
            totals[:, _ENDS],
            sent,
            np.minimum(experts / parameters, 1.0),
            buckets,
            experts_buckets,
            np.minimum(together / parameters, 1.0),
            np.minimum(together_buckets / np.maximum(buckets + experts_buckets, 1.0), 1.0),
            places,
            *np.transpose([_of_casts(device, *each) for each in zip(casts, copies, strict=True)]),
        )
        return _Each(*(np.take(x, group, 0) for x in each))


def _of_casts(device: Device, nbytes: float, copies: float) -> tuple[float, float]:
    """Seconds of casting the weights of a rank once; and how much longer it takes a microbatch to add up their
    gradients where these are widened first, than where a bucket takes them as they come. nbytes: of all copies.
    """
    if not copies:
        return 0.0, 0.0

    def seconds(name: str, moved: float) -> float:
        """moved: bytes, for each byte of a weight's copy, which is half as wide as the weight."""
        return copies * device.op_seconds(Op(0, round(moved * nbytes / copies), "float32", name=name))

    cast = seconds("_to_copy", 3)
    return cast, max(cast + seconds("add_", 6) - seconds("add_", 5), 0.0)


def _by_rows(v: Vector) -> Vector:
    """Seconds of parts of a microbatch with each number of ROWS."""
    return np.stack([v[:, columns].sum(1) for columns in (CAUSES, *AT)], 1)


@dataclass
class _Summed:
    """The stages of a core, each in one vector."""

    core: Stages
    first: Vector
    one: Vector
    layer: Vector
    last: Vector

    @staticmethod
    def of(core: Stages) -> _Summed:
        if core.whole is not None:
            whole = summed(core.whole)
            return _Summed(core, whole, whole, whole, whole)
        one = summed(core.one)
        return _Summed(core, summed(core.first), one, summed(core.two) - one, summed(core.last))

    def at(self, index: int, count: int, units: float) -> Vector:
        """Stage `index` of `count`, with so many units of layers."""
        base = self.first if index == 0 else self.last if index == count - 1 else self.one
        return base + (units - 1) * self.layer


def _loads(s: _Summed, c: Choice, library: Library, folds: bool) -> tuple[Load, ...]:
    """Of the ranks that may have most: of a pipeline the first, one in the middle, and the last."""
    layers, core = library.facts.layers, s.core
    if core.whole is not None or layers is None:
        return (Load.of([s.one / c.pp], Weights(*(x / c.pp for x in core.weights[0]))),)
    if c.pp == 1:
        units = (layers.number - layers.first) / layers.period
        return (Load.of([summed(core.alone(layers.number))], _weights(core, units, first=True, last=True)),)
    ranks = [[r, c.stages - 1 - r] if folds else list(range(r, c.stages, c.pp)) for r in range(c.pp)]
    spreads = _least_units(core, ranks, layers) if core.least else [_units(core, c.stages, layers)]

    def number(mine: Sequence[int], units: Sequence[float]) -> float:
        return sum(units[i] for i in mine)

    def load(mine: Sequence[int], units: Sequence[float]) -> Load:
        weights = _weights(core, number(mine, units), first=0 in mine, last=c.stages - 1 in mine)
        end = (s.last - s.one)[_F][NET] if c.stages - 1 in mine else None
        return Load.of([s.at(i, c.stages, units[i]) for i in mine], weights, end, place=mine[0] / (c.pp - 1))

    def middle(units: Sequence[float]) -> Sequence[int]:
        """That with most."""
        return max(ranks[1:-1], key=lambda mine: number(mine, units))

    loads = []
    for at in (0, *((1,) if c.pp > 2 else ()), -1):
        each = [middle(units) if at == 1 else ranks[at] for units in spreads]
        least = min(range(len(spreads)), key=lambda i: number(each[i], spreads[i]))
        loads.append(load(each[0], spreads[0]))
        if number(each[least], spreads[least]) < number(each[0], spreads[0]):
            loads[-1] = load(each[least], spreads[least]).lasting(loads[-1])
    return tuple(loads)


def _weights(core: Stages, units: float, *, first: bool, last: bool) -> Weights:
    """Of a rank with so many units of layers. first, last: it has that stage of the pipeline."""
    each = zip(*core.weights, strict=True)
    return Weights(*(b * units + (a - b if first else 0) + (z - b if last else 0) for a, b, z in each))


def _units(core: Stages, count: int, layers: Layers) -> list[float]:
    """Units of layers of each stage."""
    before = [core.before] + [0] * (count - 1)
    return [(n - b) / layers.period for n, b in zip(balanced(core, count, layers.number), before, strict=True)]


#: What the first and the last stage have beside layers takes so many times as long as a bound says, or as short, and so
#: much more or less, in the time of a layer.
_UNSURE, _SLIGHT = (1 / 1.5, 1.5), 0.05


def _least_units(core: Stages, ranks: Sequence[Sequence[int]], layers: Layers) -> list[list[float]]:
    """Units of layers of each stage where the slowest rank is as fast as can be: how they are distributed hangs on what
    is not known. And as they are where the first stage and the last take more or less than that, or than what this
    follows from says: the highest bounds of two stages may be of two others.
    """
    count = sum(map(len, ranks))
    own = beside_layers(core)
    ends = []
    for each in zip(own, *core.beside, strict=True):
        unsure = [x * share for x in each for share in _UNSURE]
        ends.append((min(unsure) - _SLIGHT, max(unsure) + _SLIGHT))
    found = []
    for first, last in (own, *itertools.product(*ends)):
        busy = [len(mine) + first * (0 in mine) + last * (count - 1 in mine) for mine in ranks]
        more = spread(busy, layers.number - count - core.before)
        units = [0.0] * count
        for mine, n in zip(ranks, more, strict=True):
            for i in mine:
                units[i] = (1 + n / len(mine)) / layers.period
        found.append(units)
    return found
