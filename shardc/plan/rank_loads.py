"""What each rank of a pipeline has to do and to hold, for a microbatch of one row: the loads that estimates scale.

    stages of a core, run with few layers    first, one, two, last
    a rank's load                            its stages together, with as many layers as the pipeline gives them

Of a pipeline three ranks tell: the first, the fullest of those in the middle, and the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardc.machine.device import Device
from shardc.machine.work import Op
from shardc.plan.dry_runs import Library, Stages
from shardc.plan.exact_price import balanced, beside_layers, computing, once_a_step, spread
from shardc.plan.records import Weights
from shardc.plan.space import Choice, Layers
from shardc.plan.stage_vectors import (
    AT,
    BYTES,
    CAUSES,
    FIXED,
    GROW,
    HERE,
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

#: The place of each kind of bytes.
KIND = {k: i for i, k in enumerate(BYTES)}


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


#: Of a stage, in one vector: forward and backward of a microbatch, the highest moments of both, what is once a step,
#: and how much more of that there is with each further number of ROWS, what stays, what it sends.
_SIZES = WIDTH, WIDTH, N, N, len(WHAT), len(AT), N
_F, _B, _HIGH_F, _HIGH_B, _ENDS, _MORE_AT_ENDS, _RESIDENT = itertools.starmap(
    slice, itertools.pairwise((0, *itertools.accumulate(_SIZES)))
)
_MOST_F, _MOST_B = (part.start + MOST for part in (_F, _B))

#: What of these are seconds.
_TIMES = np.zeros(_RESIDENT.stop + 1, bool)
for _part in (_F, _B):
    for _columns in (CAUSES, FIXED, *AT):
        _TIMES[_part][_columns] = True
_TIMES[_ENDS] = _TIMES[_MORE_AT_ENDS] = True
_NO_BYTES = np.zeros(N)

#: Causes of WHAT but those that estimates price themselves.
_SUMMED = np.array([w not in ("dp", "ep") for w in WHAT])


def summed(s: Stage) -> Vector:
    """What estimates want of a stage. It is as linear in layers as the stage is."""
    most = {kind: typical(s, kind) for kind in computing(s)}
    b = np.sum([v for kind, v in most.items() if kind != "F"], 0)
    ends = np.sum([part_of(s, k, "")[CAUSES] for k in ("before", "after", "update")], 0)
    # once a step, what the first microbatch and the last one take more, such as casts of weights, and sums of gradients
    # over the axes of a core, or less, as they find no gradients; sums over the data axes, experts' too, are estimated
    more = np.zeros(len(AT))
    for kind, v in most.items():
        odd = part_of(s, kind, "first") + part_of(s, kind, "last") - 2 * v
        ends += np.where(_SUMMED, odd[CAUSES], 0)
        more += [(odd[columns][:HERE] - odd[CAUSES][:HERE]).sum() for columns in AT]
    highs = [part_of(s, k, "last")[HIGH] for k in ("F", "B")]
    sent = [part_of(s, "SEND_F", "last")[SENT]]
    return np.concatenate([most["F"], b, *highs, ends, more, s["resident", ""][NET], sent])


@dataclass
class Summed:
    """The stages of a core, each in one vector."""

    core: Stages
    first: Vector
    one: Vector
    layer: Vector
    last: Vector

    @staticmethod
    def of(core: Stages) -> Summed:
        if core.whole is not None:
            whole = summed(core.whole)
            return Summed(core, whole, whole, whole, whole)
        one = summed(core.one)
        return Summed(core, summed(core.first), one, summed(core.two) - one, summed(core.last))

    def at(self, index: int, count: int, units: float) -> Vector:
        """Stage `index` of `count`, with so many units of layers."""
        base = self.first if index == 0 else self.last if index == count - 1 else self.one
        return base + (units - 1) * self.layer


def loads_of(s: Summed, c: Choice, library: Library, folds: bool) -> tuple[Load, ...]:
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


class Each(NamedTuple):
    """The loads of a rank, one for each choice. kept: bytes, of which `end` are those that only a model's last stage
    keeps. cast: bytes of weights in the dtype of products; plain: of those that are used as they are stored; experts:
    share of the parameters that are experts', spread over an axis of theirs. forward, backward, and ends, which is once
    a step: seconds with each number of ROWS. buckets, experts_buckets: see Weights; together, together_buckets:
    likewise, as shares of all. casting, widening: seconds, see `_of_casts`. Others: see Load.
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
    def of(loads: Sequence[Load], group: NDArray[np.intp], device: Device) -> Each:
        """loads: of each group of choices."""
        totals, heights, most, ends, sent, weights, places = (np.array(x) for x in zip(*loads, strict=True))
        resident, f, b = totals[:, _RESIDENT], totals[:, _F], totals[:, _B]
        casts, copies, plain, experts, buckets, experts_buckets, together, together_buckets, _ = weights.T
        parameters = resident[:, KIND["parameters"]]
        parameters = np.where(parameters == 0, 1.0, parameters)
        each = Each(
            resident,
            f[:, NET] - ends,
            ends,
            casts,
            plain,
            _by_rows(f),
            _by_rows(b),
            heights,
            most,
            totals[:, _ENDS].sum(1)[:, None] + np.pad(totals[:, _MORE_AT_ENDS], ((0, 0), (1, 0))),
            sent,
            np.minimum(experts / parameters, 1.0),
            buckets,
            experts_buckets,
            np.minimum(together / parameters, 1.0),
            np.minimum(together_buckets / np.maximum(buckets + experts_buckets, 1.0), 1.0),
            places,
            *np.transpose([_of_casts(device, *each) for each in zip(casts, copies, strict=True)]),
        )
        return Each(*(np.take(x, group, 0) for x in each))


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
