"""Define pipeline schedules as data: which rank runs which action when.

Pure Python that imports nothing of shardc but errors and text_file, so that specs, passes, plans and the interpreter
can all read SCHEDULES.

    s = make("1f1b", stages=4, ranks=4, microbatches=8, edges=[(0, 1), (1, 2), (2, 3), (0, 3)])
    print(s)                        # a line a rank; parse(str(s)) == s
    prove(s, edges).live            # raises ShardcError, or returns the peak activations of each rank
    timeline(s, costs).bubble()     # start and end of every action

    actions                               Action, Schedule, Link: the parts of a schedule
    gpipe, one_f_one_b, zb_h1, zb_v,      the order of each: (stages, ranks, microbatches) -> F, B, I, W and pairs of
    dualpipe_v                            each rank
    sends                                 adds sends, receives, REDUCE and STEP
    proof                                 complete, in legal order, no deadlock
    text, timeline                        files of schedules; when each action runs

A new schedule is a function in a new file and a line in SCHEDULES: the spec takes its name, the planner tries it. Its
stages may be connected in any way: an order that is legal where each stage uses the one before is legal for all edges
that go forward.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardc import text_file
from shardc.errors import ShardcError
from shardc.runtime.schedule.actions import Action, Edges, Kind, Link, Schedule, computed, links, live, pair
from shardc.runtime.schedule.dualpipe_v import dualpipe_v, dualpipe_v_idle, dualpipe_v_kept
from shardc.runtime.schedule.gpipe import gpipe, gpipe_kept
from shardc.runtime.schedule.one_f_one_b import one_f_one_b, one_f_one_b_idle, one_f_one_b_kept
from shardc.runtime.schedule.proof import Proof, prove
from shardc.runtime.schedule.sends import fill
from shardc.runtime.schedule.text import parse
from shardc.runtime.schedule.timeline import Costs, Slot, Timeline, timeline
from shardc.runtime.schedule.zb_h1 import zb_h1, zb_h1_idle, zb_h1_kept
from shardc.runtime.schedule.zb_v import zb_v, zb_v_idle, zb_v_kept

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Edges",
    "Kind",
    "Link",
    "Maker",
    "Proof",
    "Schedule",
    "Slot",
    "Timeline",
    "alone",
    "computed",
    "default_stages",
    "fill",
    "forward_only",
    "live",
    "load",
    "make",
    "of",
    "pair",
    "parse",
    "prove",
    "side_by_side",
    "timeline",
    "two_forwards",
]


@dataclass(frozen=True)
class Maker:
    """How a schedule is made, and estimates by which a plan chooses the schedules to price exactly.

    order: (stages, ranks, microbatches) -> F, B, I, W and pairs of each rank.
    per_rank: numbers of stages on a rank that a plan tries; the first is the default of a spec.
    only: the order exists only for the numbers in per_rank.
    kept, idle: estimates for plans, by default those of 1F1B: for `ranks` ranks with `per_rank` equal stages each, and
    at least as many microbatches as ranks.
    kept: (ranks, per_rank, microbatches, first) -> the number of microbatches whose activations a rank keeps at once,
    all its stages counted as one. first: of the first rank; else of the last. Ranks between are interpolated linearly.
    idle: (ranks, per_rank, microbatches, forward, backward, weights) -> seconds that a rank waits for others in a step.
    forward, backward: seconds of one microbatch on all stages of a rank; weights: the part of backward for the
    gradients of weights.
    """

    order: Callable[[int, int, int], list[list[Action]]]
    per_rank: tuple[int, ...] = (1,)
    only: bool = False
    kept: Callable[[int, int, int, bool], float] = one_f_one_b_kept
    idle: Callable[[int, int, int, float, float, float], float] = one_f_one_b_idle

    @cached_property
    def _small(self) -> list[list[Action]]:
        """The order of two ranks and two microbatches, which shows the kind of the schedule."""
        return self.order(2 * self.per_rank[0], 2, 2)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs (I) and of weights (W) are separate actions."""
        return any(a.kind == "I" for row in self._small for a in row)

    @cached_property
    def pairs(self) -> bool:
        """Whether a forward runs beside a backward of another microbatch. (It needs more than two of them.)"""
        ranks = 2
        return any(a.kind == "FB" for row in self.order(ranks * self.per_rank[0], ranks, 8) for a in row)

    @cached_property
    def folds(self) -> bool:
        """Whether the first rank also has the last stage, the second the one before, and so on."""
        last = 2 * self.per_rank[0] - 1
        return any(a.stage == last for a in computed(self._small[0]))


#: By name in a spec. 1f1b with several stages a rank is interleaved, and interleaved with one is 1f1b.
SCHEDULES = {
    "gpipe": Maker(gpipe, kept=gpipe_kept),
    "1f1b": Maker(one_f_one_b),
    "interleaved": Maker(one_f_one_b, per_rank=(2, 3, 4)),
    "zb-h1": Maker(zb_h1, kept=zb_h1_kept, idle=zb_h1_idle),
    "zb-v": Maker(zb_v, per_rank=(2,), only=True, kept=zb_v_kept, idle=zb_v_idle),
    "dualpipe-v": Maker(dualpipe_v, per_rank=(2,), only=True, kept=dualpipe_v_kept, idle=dualpipe_v_idle),
}


def default_stages(schedule: str, ranks: int) -> int:
    """Return the stages of a pipeline whose spec has no number, by its schedule; one a rank for a file."""
    return ranks * (SCHEDULES[schedule].per_rank[0] if schedule in SCHEDULES else 1)


def make(
    name: str, *, stages: int, ranks: int, microbatches: int, edges: Edges | None = None, where: str = ""
) -> Schedule:
    """Make a schedule of SCHEDULES, with its sends and receives.

    edges: which stages use values of which others; None: each uses the one before. Raises ShardcError, at `where`, for
    an unknown name, and for numbers of stages that the schedule does not support.
    """
    if name not in SCHEDULES:
        raise ShardcError(f"unknown schedule {name!r}", where=where, fix=f"one of {', '.join(SCHEDULES)}")
    if min(stages, ranks, microbatches) < 1 or stages % ranks:
        fault = f"{stages} stages on {ranks} ranks with {microbatches} microbatches"
        raise ShardcError(
            fault, where=where, fix="give every rank the same number of stages, and at least one microbatch"
        )
    maker = SCHEDULES[name]
    if maker.only and stages // ranks not in maker.per_rank:
        numbers = " or ".join(map(str, maker.per_rank))
        fault = f"{name} has {numbers} stages on each rank, not {stages // ranks}"
        fix = f"write `stages: {maker.per_rank[0] * ranks}`, or another schedule"
        raise ShardcError(fault, where=where, fix=fix)
    order = maker.order(stages, ranks, microbatches)
    linked = links(edges, stages)
    return fill(Schedule.of(name, [_whole(row, linked) for row in order]), linked)


def load(schedule: str, *, stages: int, ranks: int, microbatches: int, edges: Edges, where: str = "") -> Schedule:
    """Return the schedule that a spec names, proven: of SCHEDULES, or from a file.

    A file's path is relative to the working directory or to the spec. where: its place in the spec, as "spec.yaml:4:1".
    Raises ShardcError for what `make`, `parse` and `prove` reject, and for a file of other sizes.
    """
    linked = links(edges, stages)
    if schedule in SCHEDULES:
        filled = make(schedule, stages=stages, ranks=ranks, microbatches=microbatches, edges=linked, where=where)
    else:
        read = replace(parse(_read(schedule, where), schedule), name=schedule)  # replaces the name in the file
        for kind, has, wants in (
            ("ranks", read.ranks, ranks),
            ("stages", read.stages, stages),
            ("microbatches", read.microbatches, microbatches),
        ):
            if has != wants:
                raise ShardcError(
                    f"{schedule} has {has} {kind}, but the spec needs {wants}",
                    where=where,
                    fix=f"change the number of {kind} in the file or in the spec",
                )
        prove(read, linked)
        filled = fill(read, linked)
    prove(filled, linked)
    return filled


def _read(path: str, where: str) -> str:
    beside = Path(where.rsplit(":", 2)[0]).parent / path
    file = beside if not os.path.exists(path) and os.path.exists(beside) else Path(path)
    return text_file.read(file, "schedule", where=where, fix=f"one of {', '.join(SCHEDULES)}, or a text file")


def _whole(order: list[Action], edges: tuple[Link, ...]) -> list[Action]:
    """Merge I and a directly following W to B, in stages that send no gradients: no stage waits for I."""
    sending = {e.target for e in edges if e.gradient}
    merged: list[Action] = []
    for a in order:
        if a.kind == "W" and a.stage not in sending and merged[-1] == a._replace(kind="I"):
            merged[-1] = a._replace(kind="B")
        else:
            merged.append(a)
    return merged


def alone(microbatches: int) -> Schedule:
    """Return the schedule of one stage on one rank."""
    return make("1f1b", stages=1, ranks=1, microbatches=microbatches)


_BOTH: tuple[Kind, Kind] = ("F", "B")


def side_by_side(microbatches: int) -> Schedule:
    """Return one stage on one rank, with each forward beside the backward of the microbatch before."""
    forward, backward = ([Action(kind, 0, m) for m in range(microbatches)] for kind in _BOTH)
    pairs = (pair(f, b) for f, b in zip(forward[1:], backward, strict=False))
    return fill(Schedule.of("side by side", [[forward[0], *pairs, backward[-1]]]))


def two_forwards(microbatches: int) -> Schedule:
    """Return one stage on one rank: the forwards of two microbatches side by side, then their backwards.

    The last one of an odd number runs separately.
    """
    forward, backward = ([Action(kind, 0, m) for m in range(microbatches)] for kind in _BOTH)
    actions: list[Action] = []
    for m in range(0, microbatches, 2):
        some = forward[m : m + 2]
        actions += [pair(*some)] if len(some) == 2 else some
        actions += backward[m : m + 2]
    return fill(Schedule.of("two forwards", [actions]))


#: Schedules without a pipeline, by the kind of their only pair.
_OF_PAIRS: dict[str, Callable[[int], Schedule]] = {"FB": side_by_side, "FF": two_forwards}


def of(program: Any) -> Schedule:
    """Return the schedule of a program's step, also without a pipeline; only forwards if forward-only."""
    if program.schedule is not None:
        schedule: Schedule = program.schedule
        return schedule
    if program.pairs:
        return _OF_PAIRS[program.pairs[0].kind](program.microbatches)
    one = alone(program.microbatches)
    return forward_only(one) if program.forward_only else one


def shortened(schedule: Schedule, microbatches: int) -> Schedule:
    """Return the same actions of the first microbatches alone. Legal if the whole schedule is."""
    kept = tuple(tuple(x for a in row for x in a.among(lambda m: m < microbatches)) for row in schedule.actions)
    return replace(schedule, microbatches=microbatches, actions=kept, where=())


def forward_only(schedule: Schedule, edges: Edges | None = None) -> Schedule:
    """Return the same forwards in the same order, for evaluation. Legal if the whole schedule is."""
    kept = tuple(tuple(a for a in computed(row) if a.kind == "F") for row in schedule.actions)
    forward_edges = [e._replace(gradient=False) for e in links(edges, schedule.stages)]
    return fill(replace(schedule, name=f"{schedule.name}, forward only", actions=kept, where=()), forward_edges)
