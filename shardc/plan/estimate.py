"""A first price of every choice: arithmetic on the dry run of one microbatch, for thousands of choices a second.

    memory   state at this ZeRO and data axis + microbatches that the schedule keeps × bytes of each + the highest
             moment of a backward
    time     microbatches × the slowest stage + the schedule's bubble + gradient sums that backward does not hide

The estimates only decide which choices are then priced exactly (shardc.plan.exact_price): users see exact prices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardc.cost.collective_seconds import collective_seconds
from shardc.cost.ledger import KINDS
from shardc.ir.mesh import Mesh
from shardc.plan.dry_runs import Library, Stages
from shardc.plan.exact_price import Priced, balanced, computing
from shardc.plan.space import Choice, casts_kept
from shardc.plan.stage_vectors import CAUSES, FIXED, HIGH, NET, SENT, WHAT, Stage, Vector, part_of
from shardc.runtime.schedule import SCHEDULES

KIND = {k: i for i, k in enumerate(KINDS)}
#: Kinds that grow with the rows of a microbatch.
GROW = np.array([k in ("activations", "communication", "temporaries", "gathered", "inputs") for k in KINDS])


@dataclass(frozen=True)
class Load:
    """The load of one rank, for a microbatch of one row. kept: bytes, of which `end` are those that only a model's last
    stage keeps. cast: bytes of weights in the dtype of products. forward, backward: seconds by cause, in two rows: what
    each row of a microbatch adds, and what it takes however many these are.
    """

    resident: Vector
    kept: Vector
    end: Vector
    cast: float
    forward: Vector
    backward: Vector
    height: Vector
    ends: Vector
    sent: float

    @staticmethod
    def of(stages: list[Stage], cast: float, end: Vector | None = None) -> Load:
        f = np.sum([part_of(s, "F", "middle") for s in stages], 0)
        b = np.sum([part_of(s, k, "middle") for s in stages for k in computing(s) if k != "F"], 0)
        forward, backward = (
            max((part_of(s, k, "last")[HIGH] for s in stages), key=lambda v: float(v.sum())) for k in ("F", "B")
        )
        after = np.sum([part_of(s, k, "")[CAUSES] for s in stages for k in ("before", "after", "update")], 0)
        high = forward - f[NET] if forward.sum() > f[NET].sum() + backward.sum() else backward
        resident = np.sum([s["resident", ""][NET] for s in stages], 0)
        end = np.zeros(len(KINDS)) if end is None else end
        return Load(
            resident,
            f[NET] - end,
            end,
            cast,
            _by_rows(f),
            _by_rows(b),
            high,
            after,
            float(part_of(stages[-1], "SEND_F", "last")[SENT]),
        )


def _by_rows(v: Vector) -> Vector:
    return np.stack([v[CAUSES] - v[FIXED], v[FIXED]])


@dataclass
class Estimates:
    """Estimates choices from the dry runs of their cores."""

    library: Library
    _loads: dict[object, tuple[tuple[Load, ...], tuple[int, ...]]] = field(default_factory=dict)
    _lines: dict[object, tuple[float, float]] = field(default_factory=dict)

    def __call__(self, c: Choice) -> Priced:
        """Raises ShardcError if compile refuses the core."""
        loads, counts = self._of(c)
        ranks = [self._rank(c, load, first=i == 0) for i, load in enumerate(loads)]
        kinds = max((k for k, _ in ranks), key=lambda v: float(v.sum()))
        spent = max((s for _, s in ranks), key=lambda s: sum(s.values()))
        return Priced(
            c.batch,
            sum(spent.values()),
            {k: float(n) for k, n in zip(KINDS, kinds, strict=True) if n > 0},
            spent,
            0,
            counts,
            False,
        )

    def _of(self, c: Choice) -> tuple[tuple[Load, ...], tuple[int, ...]]:
        folds = SCHEDULES[c.schedule].folds
        key = c.core, c.pp, c.per_rank, folds
        if key not in self._loads:
            core = self.library.core(c)
            self._loads[key] = _loads(core, c, self.library, folds)
        return self._loads[key]

    def _rank(self, c: Choice, x: Load, first: bool) -> tuple[Vector, dict[str, float]]:
        device, m = self.library.device, c.microbatches
        # memory
        state = x.resident.copy()
        p, o, g = (KIND[k] for k in ("parameters", "optimizer", "gradients"))
        cast = min(x.cast, x.resident[p])
        if c.zero:
            if c.zero == 3:
                state[p] /= c.sharded
            elif cast:  # whole in the dtype of products, and a part of the master weights; without casts both are one
                state[p] = cast + state[p] / c.sharded
            state[o] /= c.sharded
            state[g] /= c.sharded if c.zero > 1 else 1
        kept = x.kept.copy()
        # weights that are cast: a copy for all microbatches, unless they are stored in that dtype or gathered
        casts = cast * casts_kept(c.checkpoint)
        if self.library.microbatches == 1:  # it was counted as the microbatch's
            kept[KIND["activations"]] -= casts
        kept = np.where(GROW, kept * c.rows, 0)
        if not c.zero:
            state[p] += casts
        height = np.where(GROW, x.height * c.rows, 0)
        ends = np.where(GROW, x.end * c.rows, 0) * (c.microbatches if SCHEDULES[c.schedule].collects else 1)
        kinds = state + alive(c, first) * kept + ends + np.maximum(height, -kept - ends)
        # time
        forward, backward = (each * c.rows + fixed for each, fixed in (x.forward, x.backward))
        spent = dict(zip(WHAT, map(float, m * (forward + backward) + x.ends), strict=True))
        if c.dp * c.ep > 1 or (c.zero and c.cp > 1):
            spent["dp"] += self._sums(c, float(x.resident[g]), float(cast or x.resident[p]), forward, backward)
        spent["bubble"] = bubble(c, float(forward.sum()), float(backward.sum()))
        if c.pp > 1:
            ranks = (0, c.devices // c.pp)
            spent["bubble"] += 2 * (c.pp - 1) * collective_seconds(device, "send_recv", x.sent * c.rows, ranks)
        return np.maximum(kinds, 0), spent

    def _sums(self, c: Choice, grads: float, weights: float, forward: Vector, backward: Vector) -> float:
        """Seconds of collectives over the data axes that do not overlap, or of ZeRO's over the sequence's axis: what is
        not sharded there is summed in the dry run. grads, weights: bytes of a rank's gradients, and of weights as
        gathered.
        """
        if c.zero == 3:
            gather, scatter = self._comm(c, "all_gather", weights), self._comm(c, "reduce_scatter", grads)
            f, b = float(forward.sum()), float(backward.sum())
            return c.microbatches * (
                max(gather - f, 0.05 * gather) + max(gather + scatter - b, 0.05 * (gather + scatter))
            )
        late = max(self._comm(c, "reduce_scatter" if c.zero else "all_reduce", grads) - float(backward.sum()), 0.0)
        late *= c.microbatches if c.zero == 2 else 1
        if not c.zero:
            return late
        gather = self._comm(c, "all_gather", weights)  # of updated parameters, during the next step's first forward
        return late + max(gather - float(forward.sum()), 0.05 * gather)

    def _comm(self, c: Choice, kind: str, nbytes: float) -> float:
        """Seconds of a collective over the data axes, or the sequence's: linear in bytes."""
        key = kind, c.dp, c.cp, c.ep, c.tp
        if key not in self._lines:
            mesh = Mesh((("dp", c.dp), ("cp", c.cp), ("ep", c.ep), ("tp", c.tp)))
            ranks = mesh.group(0, ("dp", "ep") if c.dp * c.ep > 1 else ("cp",))
            none = collective_seconds(self.library.device, kind, 0, ranks)
            self._lines[key] = none, (collective_seconds(self.library.device, kind, 1e9, ranks) - none) / 1e9
        none, each = self._lines[key]
        return none + each * nbytes


def _loads(core: Stages, c: Choice, library: Library, folds: bool) -> tuple[tuple[Load, ...], tuple[int, ...]]:
    layers = library.subject.layers
    if core.whole is not None or layers is None:
        assert core.whole is not None
        share = {k: x / c.pp for k, x in core.whole.items()}
        return (Load.of([share], core.casts[0] / c.pp),), ()
    if c.pp == 1:
        whole = core.alone(layers.number)
        units = (layers.number - layers.first) / layers.period
        return (Load.of([whole], core.casts[0] + core.casts[2] + (units - 2) * core.casts[1]),), (layers.number,)
    counts = balanced(core, c.stages, layers.number)
    ranks = [0, c.pp // 2, c.pp - 1] if c.pp > 2 else [0, 1]
    loads = []
    for r in ranks:
        mine = [r, c.stages - 1 - r] if folds else list(range(r, c.stages, c.pp))
        cast = sum(core.casts[1] * counts[i] / layers.period for i in mine)
        cast += core.casts[0] - core.casts[1] if 0 in mine else 0
        cast += core.casts[2] - core.casts[1] if c.stages - 1 in mine else 0
        end = (
            part_of(core.last, "F", "middle")[NET] - part_of(core.one, "F", "middle")[NET]
            if c.stages - 1 in mine
            else None
        )
        loads.append(Load.of([core.at(i, c.stages, counts[i]) for i in mine], cast, end))
    return tuple(loads), counts


def alive(c: Choice, first: bool) -> float:
    """How many microbatches a rank keeps at once, all its stages counted as one: the first rank (most), or the last."""
    return 1.0 if c.pp == 1 else SCHEDULES[c.schedule].kept(c.pp, c.per_rank, c.microbatches, first)


def bubble(c: Choice, forward: float, backward: float) -> float:
    """Seconds in which a rank waits for others, where all stages are equal; forward, backward: of a microbatch on all
    stages of a rank.
    """
    if c.pp == 1:
        return 0.0
    if c.microbatches < c.pp:  # too few to fill the pipeline: nothing helps
        return (c.pp - 1) * (forward + backward)
    return SCHEDULES[c.schedule].idle(c.pp, c.per_rank, c.microbatches, forward, backward)
