"""A first price of every choice: arithmetic on the dry run of one microbatch, for thousands of choices a second.

    memory   state at this ZeRO and data axis + microbatches that the schedule keeps × bytes of each + the highest
             moment of a backward
    time     microbatches × the slowest stage + the schedule's bubble + gradient sums that backward does not hide

The estimates only decide which choices are then priced exactly (shardc.plan.exact_price): users see exact prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardc.ir.mesh import Mesh
from shardc.machine.collectives import collective_seconds
from shardc.plan.columns import COLLECTIVES, OF_EXPERTS, Columns
from shardc.plan.data_sums import exposed, passing
from shardc.plan.dry_runs import Library, Stages
from shardc.plan.rank_loads import KIND, Each, Summed, loads_of
from shardc.plan.space import Choice, Keep, casts_kept
from shardc.plan.stage_vectors import GROW, N, Vector
from shardc.runtime.schedule import SCHEDULES

_STILL = np.arange(N) == KIND["still"]


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
        sums = Summed.of(core)
        loads = [loads_of(sums, t.choices[i], self.library, SCHEDULES[t.choices[i].schedule].folds) for i in t.firsts]
        ranks = [[some[min(at, len(some) - 1)] for some in loads] for at in range(max(map(len, loads)))]
        each = [self._rank(t, Each.of(mine, t.group, self.library.device), keep) for mine in ranks]
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

    def _rank(self, t: Columns, x: Each, keep: Keep) -> _Rank:
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
        buckets = passing(t, x, whole)
        most += buckets
        kinds[:, g] += buckets
        # time
        f, b = (np.maximum((v * t.of_rows).sum(1), 0) for v in (x.forward, x.backward))  # bounds may be below
        # with ZeRO weights are there in the dtype of products: no microbatch casts them, nor their gradients
        ends = (x.ends * t.of_rows).sum(1) - np.where(t.zero > 0, x.casting * casts_kept(keep), 0)
        casting = x.casting * (1 - casts_kept(keep))
        f -= np.where(t.zero > 0, np.minimum(casting, f), 0)
        b -= np.where(t.zero > 0, np.minimum(casting + x.widening, b), 0)
        # gradients of weights take as long as forward: as many products
        w = np.minimum(f, b / 2)
        again = np.where(cast > 0, cast, whole)
        slower = 1 - self.library.device.reaches.computing
        of_step, of_forward, of_backward = exposed(t, x, whole, again, f, b, slower)
        send = t.taken("send_recv", x.sent * rows, np.ones(len(rows)))
        actions = np.stack([f + of_forward, b + of_backward, b - w, w + of_backward])
        return _Rank(actions, send, ends + of_step, np.maximum(most, np.maximum(kinds, 0).sum(1)))

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
