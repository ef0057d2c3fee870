"""Pipeline schedules as data: which rank runs which action when. Pure Python; `schedule_actions` says what an action
is.

    s = make("1f1b", stages=4, ranks=4, microbatches=8, edges=[(0, 1), (1, 2), (2, 3), (0, 3)])
    print(s)                        # a line a rank; parse(str(s)) == s
    prove(s, edges).live            # raises ShardcError, or returns the peak activations of each rank
    timeline(s, costs).bubble()     # start and end of every action

    schedule_gpipe, _1f1b, _zb_h1, _zb_v    who computes what in which order: (stages, ranks, microbatches) -> actions of each rank
    schedule_fill                           adds sends, receives, REDUCE and STEP
    schedule_prove, _time, _text            what it says they do

A new schedule is a function in a file of its own and a line in SCHEDULES. Its stages may be connected in any way: what
is legal where each stage uses the one before is legal for all edges from earlier to later stages.
"""  # noqa: E501 (a table)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shardc.errors import ShardcError
from shardc.runtime.schedule.actions import Action, Edges, Kind, Link, Schedule, links, live
from shardc.runtime.schedule.gpipe import gpipe
from shardc.runtime.schedule.one_f_one_b import one_f_one_b
from shardc.runtime.schedule.proof import Proof, prove
from shardc.runtime.schedule.sends import fill
from shardc.runtime.schedule.text import parse
from shardc.runtime.schedule.timeline import Costs, Slot, Timeline, timeline
from shardc.runtime.schedule.zb_h1 import zb_h1
from shardc.runtime.schedule.zb_v import zb_v

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Edges",
    "Kind",
    "Link",
    "Proof",
    "Schedule",
    "Slot",
    "Timeline",
    "alone",
    "fill",
    "forward_only",
    "live",
    "load",
    "make",
    "parse",
    "prove",
    "timeline",
]


@dataclass(frozen=True)
class Maker:
    """order: (stages, ranks, microbatches) -> F, B, I and W of each rank. per_rank: how many stages a rank has; None:
    any number.
    """

    order: Callable[[int, int, int], list[list[Action]]]
    per_rank: int | None = None


#: By the name in a spec. 1f1b is interleaved with several stages a rank, and interleaved is 1f1b with one.
SCHEDULES = {
    "gpipe": Maker(gpipe),
    "1f1b": Maker(one_f_one_b),
    "interleaved": Maker(one_f_one_b),
    "zb-h1": Maker(zb_h1),
    "zb-v": Maker(zb_v, per_rank=2),
}


def make(
    name: str, *, stages: int, ranks: int, microbatches: int, edges: Edges | None = None, where: str = ""
) -> Schedule:
    """A schedule of SCHEDULES, with its sends and receives. edges: which stages use values of which others; None: each
    the
    one before.

    Raises ShardcError, at `where`, for an unknown name, and for numbers of stages that the schedule cannot have.
    """
    if name not in SCHEDULES:
        raise ShardcError(f"unknown schedule {name!r}", where=where, fix=f"one of {', '.join(SCHEDULES)}")
    if min(stages, ranks, microbatches) < 1 or stages % ranks:
        what = f"{stages} stages on {ranks} ranks with {microbatches} microbatches"
        raise ShardcError(
            what, where=where, fix="give every rank as many stages as the others, and at least one microbatch"
        )
    maker = SCHEDULES[name]
    if maker.per_rank not in (None, stages // ranks):
        what = f"{name} has {maker.per_rank} stages on each rank, not {stages // ranks}"
        raise ShardcError(what, where=where, fix=f"write `stages: {maker.per_rank * ranks}`, or another schedule")
    order = maker.order(stages, ranks, microbatches)
    given = links(edges, stages)
    return fill(Schedule.of(name, [_whole(each, given) for each in order]), given)


def load(asked: str, *, stages: int, ranks: int, microbatches: int, edges: Edges, where: str = "") -> Schedule:
    """What `schedule:` of a spec asks for, proven: a name of SCHEDULES, or the path of a file, from here or from where
    the
    spec is.

    where: "spec.yaml:4:1" of the asking. Raises ShardcError for what `make`, `parse` and `prove` do not take, and for a
    file of other sizes."""
    given = links(edges, stages)
    if asked in SCHEDULES:
        made = make(asked, stages=stages, ranks=ranks, microbatches=microbatches, edges=given, where=where)
    else:
        read = replace(parse(_read(asked, where), asked), name=asked)  # whatever it was printed from
        for what, has, wants in (
            ("ranks", read.ranks, ranks),
            ("stages", read.stages, stages),
            ("microbatches", read.microbatches, microbatches),
        ):
            if has != wants:
                raise ShardcError(
                    f"{asked} has {has} {what}, and the spec {wants}",
                    where=where,
                    fix=f"change the file's {what} or the spec's",
                )
        prove(read, given)
        made = fill(read, given)
    prove(made, given)
    return made


def _read(path: str, where: str) -> str:
    beside = Path(where.rsplit(":", 2)[0]).parent / path
    file = beside if not Path(path).exists() and beside.exists() else Path(path)
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ShardcError(
            f"the schedule {path} cannot be read: {e}",
            where=where,
            fix=f"one of {', '.join(SCHEDULES)}, or a text file",
        ) from None


def _whole(order: list[Action], edges: tuple[Link, ...]) -> list[Action]:
    """I with its W right behind is B in a stage that sends no gradients: nobody waits for I."""
    sending = {e.target for e in edges if e.gradient}
    made: list[Action] = []
    for a in order:
        if a.kind == "W" and a.stage not in sending and made[-1] == a._replace(kind="I"):
            made[-1] = a._replace(kind="B")
        else:
            made.append(a)
    return made


def alone(microbatches: int) -> Schedule:
    """One stage on one rank."""
    return make("1f1b", stages=1, ranks=1, microbatches=microbatches)


def forward_only(schedule: Schedule, edges: Edges | None = None) -> Schedule:
    """The same forwards in the same order and nothing else: for evaluation. Legal where the whole is; `prove(...,
    training=False)`.
    """
    kept = tuple(tuple(a for a in each if a.kind == "F") for each in schedule.actions)
    there = [e._replace(gradient=False) for e in links(edges, schedule.stages)]
    return fill(replace(schedule, name=f"{schedule.name}, forward only", actions=kept, where=()), there)
