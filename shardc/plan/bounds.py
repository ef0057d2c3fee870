"""The best that a way to split could come to, from dry runs of others: what cannot be among the best is not run.

    twice as many ranks split a row's work       at best half the time and half the activations
    an axis has more ranks                       what is sent along it takes at best as long as over as many links
    other things are computed again              at best the time of nothing, and the memory of everything, or of what
                                                 keeps no more (shardc.plan.space.LESS)
    the sequence is split among more ranks       what does not grow with rows, as casts of weights, takes as long
    experts are on more ranks                    what their weights take, and products of few rows, becomes less

Of what is computed again the share is that of other splits which were run both ways (Again). Latencies and the start of
small ops become no less by splitting. Many others may be known: each gives a bound, and of each number the highest
counts. Bounds are as good as estimates are: how layers are distributed over stages, and what starts while others are
waited for, differs from split to split, so what is near the best is run too (shardc.plan.frontier.NEAR).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from shardc.machine.device import Device
from shardc.plan.dry_runs import Stages
from shardc.plan.exact_price import beside_layers, computing
from shardc.plan.records import Weights
from shardc.plan.space import LESS, Core, budget, casts_kept
from shardc.plan.stage_vectors import (
    AT,
    BYTES,
    CAUSES,
    FIXED,
    GROW,
    HERE,
    HIGH,
    MOST,
    MOVED,
    NET,
    PRODUCTS,
    ROWS,
    SENT,
    STILL_MOVED,
    SURE,
    WHAT,
    Stage,
    Vector,
    lines,
    part_of,
    typical,
)

#: Kinds that a microbatch makes: casts of weights, which another one may keep, are temporaries that do not grow.
_MADE = GROW | np.array([k == "still" for k in BYTES])

_MEMORY, _LAUNCH = (WHAT.index(w) for w in ("memory", "launch"))
#: Of WHAT: computing. Actions that compute.
_HERE = slice(0, 2)
_COMPUTING = ("F", "B", "I", "W")
#: Bytes read and written to cast a weight, for each byte of the copy: it is half as wide.
_CAST = 3


def relatives(core: Core, known: Mapping[Core, Stages]) -> tuple[Core, ...]:
    """What bounds of a core follow from: of those that are known, all that do no more, with the same recomputation, one
    that keeps less, none, or with everything recomputed; of a share of what is kept with these two alone, as it follows
    from them. One says most of products, another one of what is sent.
    """
    return tuple(k for k in rests_on(core, known) if _comparable(k, core))


def rests_on(core: Core, known: Mapping[Core, Stages]) -> tuple[Core, ...]:
    """Its relatives, and those that tell how much of what these do is less here: see OfExperts and Again."""
    alike = {core.checkpoint, LESS.get(core.checkpoint)} if budget(core.checkpoint) is None else set[str | None]()
    return tuple(k for k in known if k.checkpoint in {*alike, "none", "full"})


def _comparable(near: Core, core: Core) -> bool:
    """Whether a core does all that the other one does: it sends along every axis along which that one sends. Where
    experts are not spread, nothing says how much of the state is theirs.
    """
    alike = all(a == 1 or b > 1 for a, b in zip(near[:3], core[:3], strict=True))
    return alike and (near.ep > 1) == (core.ep > 1) and (core.sequence_parallel or not near.sequence_parallel)


def optimistic(core: Core, others: Mapping[Core, Stages], known: Mapping[Core, Stages], device: Device) -> Stages:
    """A lower bound of every number of a core's stages. others: of those that were run (known), with collectives priced
    between as many ranks as this one's. Of each number the highest bound counts.
    """
    bounds = [
        _bound(core, near, replace(stages, least=True), OfExperts.of(near, known), Again.of(core, near, known), device)
        for near, stages in others.items()
    ]
    a, b, c = (Weights(*map(max, zip(*some, strict=True))) for some in zip(*(x.weights for x in bounds), strict=True))
    first = replace(bounds[0], weights=(a, b, c))
    if first.whole is not None:
        return replace(first, whole=highest_bound([b.whole for b in bounds if b.whole is not None]))
    one = highest_bound([b.one for b in bounds])
    layer = highest_bound([lines({}, b.two, b.one, 1) for b in bounds])
    ends = highest_bound([b.first for b in bounds]), highest_bound([b.last for b in bounds])
    beside = tuple(beside_layers(s) for s in (*bounds, *others.values()))
    return replace(first, first=ends[0], one=one, two=lines(one, layer, {}, 1), last=ends[1], beside=beside)


def highest_bound(some: Sequence[Stage]) -> Stage:
    """The highest bound. Bytes by kind belong together, as what is one kind here may be another one there. So do
    seconds of computing and of waiting, in all parts: who computes longer waits less. Either those of one bound count,
    or what a rank computes at least and what is waited in any case. With more rows it waits as much longer, but for
    what is FIXED, or as long as the one that was run: the least of both.
    """
    each = {key: [s[key] for s in some if key in s] for key in {k: None for s in some for k in s}}
    highest: Stage = {key: np.max(vectors, 0) for key, vectors in each.items()}
    mixed = {key: _mixed(vectors, computes=key[0] in _COMPUTING) for key, vectors in each.items()}

    def seconds(s: Stage) -> float:
        """Of a microbatch like most: the last one sums gradients, too, once a step."""
        return float(sum(typical(s, kind)[CAUSES].sum() for kind in computing(s)))

    timed = max((*some, mixed), key=seconds)
    for key, v in highest.items():
        for columns in (NET, HIGH):
            v[columns] = max((x[columns] for x in each[key]), key=lambda x: float(x.sum()))
        for columns in (CAUSES, FIXED, *AT):
            v[columns] = timed[key][columns] if key in timed else 0.0
        for rows, columns in zip(ROWS[1:], AT, strict=True):
            grown = (v[FIXED] + (v[CAUSES] - v[FIXED]) * rows)[HERE:].sum()
            v[columns][HERE] = min(v[columns][HERE], grown)
    return highest


def _mixed(some: Sequence[Vector], *, computes: bool) -> Vector:
    """Of one part, the most that one of these computes, and the most that one waits, however much it computes."""
    found: Vector = max(some, key=_here).copy()
    if computes:  # the products of one, and what another one moves
        found[[PRODUCTS, MOVED]] = np.max([v[[PRODUCTS, MOVED]] for v in some], 0)
        _at_least(found, found[PRODUCTS], found[MOVED])
    found[CAUSES][_LAUNCH] = found[FIXED][_LAUNCH] = 0.0  # while it waits for others, the host gets ahead
    for i in range(_LAUNCH + 1, len(WHAT)):
        surest = max(some, key=lambda v: float(v[SURE][i]))
        hidden = min(float(v[CAUSES][i] - v[SURE][i]) for v in some)  # of a layer that hides what others wait for
        found[CAUSES][i] = surest[SURE][i] + min(hidden, 0.0)
        found[FIXED][i] = min(surest[SURE][i], surest[FIXED][i])
    return found


class OfExperts(NamedTuple):
    """How many seconds a split takes at most for what becomes less where experts are on more ranks: their weights,
    casts and gradients of these, and products of few rows. From two splits that were run, which recompute nothing:

        ep=2   5.0 ms                      a rank has half as many experts at ep=4: they took 2 ms at most there, and
        ep=4   3.0 ms                      take 1 ms at most at ep=8

    What one op moves grows with a rank's experts, in a line that begins above nothing, and no op takes less time than
    its start: so between more ranks less of it is saved by each doubling. few, more: the two; near: who has at least as
    many ranks for experts as `more`, and as many for the rest of a layer.
    """

    near: Core
    few: tuple[Core, Stages]
    more: tuple[Core, Stages]

    @staticmethod
    def of(near: Core, known: Mapping[Core, Stages]) -> OfExperts | None:
        none = ((k, s) for k, s in known.items() if k.checkpoint == "none")
        some = [(k, s) for k, s in none if 1 < k.ep <= near.ep and k.tp <= near.tp]
        alike: dict[Core, list[tuple[Core, Stages]]] = {}
        for k, s in some:
            alike.setdefault(k._replace(ep=1), []).append((k, s))
        pairs = [sorted(each, key=lambda x: x[0].ep)[-2:] for each in alike.values() if len(each) > 1]
        best = max(pairs, key=lambda p: (p[1][0].tp, p[1][0].ep, p[0][0].ep), default=None)
        return OfExperts(near, *best) if best is not None else None

    def seconds(self, where: str, kind: str, which: str) -> tuple[float, float]:
        """Of a part of a stage: of those that it waits for memory (MOVED), and of all that it computes. What computes
        again does so once more than forward.
        """
        # the first forward makes the casts, which one that recomputes makes in each
        of_both = self._slopes(where, kind, "first" if kind == "F" else which)
        if kind != "F" and self.near.checkpoint != "none":
            of_both += self._slopes(where, "F", "first")
        moved, here = (of_both / self.near.ep).tolist()
        return moved, here

    def _slopes(self, where: str, kind: str, which: str) -> Vector:
        (few, less), (more, most) = self.few, self.more
        fewer = [_part(s, where, kind, which) for s in (less, most)]
        saved = [max(float(of(fewer[0]) - of(fewer[1])), 0.0) for of in (lambda v: v[MOVED], _here)]
        return np.array(saved) / (1 / few.ep - 1 / more.ep)


def _here(v: Vector) -> float:
    """Seconds of computing."""
    return float(v[CAUSES][_HERE].sum())


def _part(stages: Stages, where: str, kind: str, which: str) -> Vector:
    """Of a stage, or of a layer, the difference of two."""
    if where == "layer":
        return _part(stages, "two", kind, which) - _part(stages, "one", kind, which)
    return part_of(getattr(stages, where), kind, which)


class Again(NamedTuple):
    """How many times what a split computes it does where other things are computed again: as other splits do, which
    were run both ways.

        tp=8         everything 52 ms, products kept 41 ms
        tp=4, cp=2   everything 57 ms, so products kept about 45 ms

    both: of each of these, (as the one that is bounded does, as the one that was run does, how many times the weights
    a rank has of it). They spread experts alike, and split a row into no more parts: ops of smaller parts may take no
    longer than their start. less: it computes less again; more of it says how many products that are, but not what else
    is, as that hangs on how it is split.
    """

    both: tuple[tuple[Stages, Stages, float], ...]
    less: bool

    @staticmethod
    def of(core: Core, near: Core, known: Mapping[Core, Stages]) -> Again | None:
        if core.checkpoint == near.checkpoint:
            return None
        alike = (k for k in known if k.checkpoint == core.checkpoint and k.ep == core.ep)
        parts = (k for k in alike if k.tp * k.cp <= core.tp * core.cp)
        pairs = ((k, known.get(k._replace(checkpoint=near.checkpoint))) for k in parts)
        both = tuple((known[k], other, max(k.tp / core.tp, 1.0)) for k, other in pairs if other is not None)
        return Again(both, near.checkpoint != "none") if both else None

    def at_least(self, x: Vector, v: Vector, where: str, key: tuple[str, str]) -> None:
        """Of a part: v, of the one that was run; x, a bound, which becomes no lower."""
        each = [(_part(mine, where, *key), _part(other, where, *key), more) for mine, other, more in self.both]

        def least(column: int) -> float:
            """In proportion, and at most as much less: of casts it is as much for any part of a row."""
            shares = (mine[column] / other[column] if other[column] > 0 else 0.0 for mine, other, _ in each)
            less = [v[column] - (other[column] - mine[column]) * more for mine, other, more in each if self.less]
            return float(min(v[column] * min(shares), *less, math.inf))

        for column in (PRODUCTS, MOVED) if self.less else (PRODUCTS,):
            x[column] = max(x[column], least(column))
        if self.less:
            for columns, i in itertools.product((CAUSES, *AT), range(_HERE.stop)):
                x[columns][i] = max(x[columns][i], least(columns.start + i))


def _bound(
    core: Core, near: Core, stages: Stages, experts: OfExperts | None, again: Again | None, device: Device
) -> Stages:
    """What follows from one that was run. A layer, the difference of two stages, is no stage, but as linear."""
    bandwidth = device.bandwidth * device.reaches.bandwidth
    shares = _Shares(*(min(a / b, 1.0) for a, b in zip(near[:3], core[:3], strict=True)))
    # what keeps copies of weights makes them once a step
    once = max(casts_kept(core.checkpoint) - casts_kept(near.checkpoint), 0.0)

    def f(where: str, i: int) -> Stage:
        s: Stage = lines({}, stages.two, stages.one, 1) if where == "layer" else getattr(stages, where)
        if core.checkpoint != near.checkpoint:
            if casts_kept(core.checkpoint) < casts_kept(near.checkpoint) and ("F", "first") in s:
                s = {**s, ("F", "first"): part_of(s, "F", "last")}  # without copies that are made once a step
            casts, copies, *_ = stages.weights[i]
            seconds = _Casts(once * _CAST * casts / bandwidth, once * copies * (device.launch + device.host))
            least = _least(s, near.checkpoint != "none", seconds)
            if again is not None:
                for key in (key for key in s if key[0] in _COMPUTING):
                    again.at_least(least[key], s[key], where, key)
            s = least
        return _scaled(s, shares, partial(experts.seconds, where) if experts is not None else None)

    def left(w: Weights) -> Weights:
        casts = w.casts * min(shares.work, shares.weights)
        rest = (x * shares.weights for x in (w.plain, *w[3:]))
        return Weights(casts, w.copies, *rest)

    a, b, c = stages.weights
    known = replace(stages, weights=(left(a), left(b), left(c)))
    if stages.whole is not None:
        return replace(known, whole=f("whole", 0))
    one = f("one", 1)
    two = lines(one, f("layer", 1), {}, 1)
    return replace(known, first=f("first", 0), one=one, two=two, last=f("last", 2))


class _Casts(NamedTuple):
    """Seconds of making the copies of weights that something else keeps for other microbatches: of what they read and
    write, and of starting them.
    """

    memory: float
    launch: float


class _Shares(NamedTuple):
    """What is left of a rank's part of the axes of tensors, experts and sequences: 1/2 where twice as many ranks have
    it.
    """

    tp: float
    ep: float
    cp: float

    @property
    def work(self) -> float:
        return self.tp * self.cp

    @property
    def weights(self) -> float:
        return self.tp * self.ep

    @property
    def highest(self) -> float:
        """Of the highest moments."""
        return self.work * self.ep

    @property
    def causes(self) -> Vector:
        """Of the seconds by cause (WHAT): experts on more ranks mean that each product has more rows, and reads fewer
        weights; tp hands on whole tokens, of a part of the sequence; a ring whole sequences, of a part of the heads.
        """
        work = self.work
        of = {"compute": work * self.ep, "memory": work * self.ep, "tp": self.cp, "cp": self.tp}
        return np.array([of.get(w, work) for w in WHAT])

    def moved(self, v: Vector, of_experts: float) -> float:
        """Of MOVED, at least: what does not grow with rows is of weights, and no less where the sequence is split; if
        it is of experts it is less where these are on more ranks. of_experts: as much at most.
        """

        still = min(float(v[STILL_MOVED]), float(v[MOVED]))

        def left(mine: float) -> float:
            of_weights = max(still, mine)
            return float(v[MOVED]) * self.work + self.tp * (of_weights * (1 - self.cp) - mine * (1 - self.ep))

        return min(left(of_experts), left(min(of_experts, still)))


def _scaled(s: Stage, shares: _Shares, of_experts: Callable[[str, str], tuple[float, float]] | None) -> Stage:
    """of_experts: see OfExperts.seconds; None: it may be all."""
    share = np.where(GROW, shares.work, shares.weights)
    scaled: Stage = {}
    for key, v in s.items():
        x = v.copy()
        x[NET] *= share
        x[HIGH] *= np.minimum(share, shares.highest)
        x[MOST] *= min(shares.work, shares.highest)
        x[SENT] *= shares.work
        ends = key[0] in ("before", "after", "update")
        causes = np.minimum(shares.causes, shares.weights) if ends else shares.causes
        x[CAUSES] = v[FIXED] + (v[CAUSES] - v[FIXED]) * causes
        x[SURE] *= causes
        if key[0] in _COMPUTING:
            moved, here = of_experts(*key) if of_experts is not None else (math.inf, math.inf)
            x[PRODUCTS] *= shares.work
            x[MOVED] = shares.moved(v, min(moved, float(v[MOVED])))
            for columns in (CAUSES, *AT):
                if columns != CAUSES:
                    x[columns][_HERE] *= causes[_HERE]
                all_of_it = float(v[columns][_HERE].sum())
                least = shares.work * (all_of_it - min(here, all_of_it) * (1 - shares.ep))
                x[columns][0] += max(least - x[columns][_HERE].sum(), 0.0)
            for columns in AT:  # more rows take no less: a host that is late catches up while more is waited for
                x[columns][_LAUNCH] += max(x[CAUSES].sum() - x[columns].sum(), 0.0)
            _at_least(x, x[PRODUCTS], x[MOVED])
        scaled[key] = x
    return scaled


def _at_least(v: Vector, products: float, moved: float) -> None:
    """What it computes is at least that, with any number of rows."""
    for rows, columns in zip(ROWS, (CAUSES, *AT), strict=True):
        here = products * rows, moved
        if sum(here) > v[columns][_HERE].sum():
            v[columns][_HERE] = here


def _least(s: Stage, recomputes: bool, casts: _Casts) -> Stage:
    """Of stages, what they are at best where something else is computed again. recomputes: these do, and keep less:
    then it takes as much memory at least, and the time of nothing computed again, which is at least backward's without
    another forward; if they do not, their time alone tells. casts: those that are not made then.
    """
    return {key: _lower(s, key, v, recomputes, casts) for key, v in s.items()}


def _lower(s: Stage, key: tuple[str, str], v: Vector, recomputes: bool, casts: _Casts) -> Vector:
    kind, which = key
    if kind not in _COMPUTING:
        return v
    x = v.copy()
    x[NET] = v[NET] if recomputes else np.where(GROW, 0, v[NET])
    if recomputes == (kind != "F"):
        x[HIGH], x[MOST] = np.where(_MADE, 0, v[HIGH]), 0
    if kind == "F":
        x[CAUSES][_MEMORY] = max(v[CAUSES][_MEMORY] - casts.memory, 0.0)
        x[[MOVED, STILL_MOVED]] = np.maximum(v[[MOVED, STILL_MOVED]] - casts.memory, 0.0)
        for columns in (CAUSES, FIXED, *AT):
            x[columns][_LAUNCH] = max(v[columns][_LAUNCH] - casts.launch, 0.0)
        for columns in AT:
            x[columns][_MEMORY] = max(v[columns][_MEMORY] - casts.memory, 0.0)
    elif recomputes:
        again = part_of(s, "F", which)
        for columns in (CAUSES, FIXED, SURE, *AT):
            x[columns] = np.maximum(v[columns] - again[columns], 0)
        for columns in (CAUSES, FIXED, *AT):  # the host is slower where something is computed again
            x[columns][_LAUNCH] = 0.0
        for column in (PRODUCTS, MOVED, STILL_MOVED):
            x[column] = max(v[column] - again[column], 0.0)
    return x
