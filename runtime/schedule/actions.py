"""Define the actions of a pipeline's schedule: data that prints, and parses back (text.py).

    2F0             stage 2 forward, microbatch 0
    2B0             its whole backward; or, split in two:
    2I0 2W0         the gradients of its inputs, which the stage before waits for, and later those of its weights
    0F3+3B0         a forward and a backward of two microbatches, one beside the other (an overlapped pair): as one text
    0F2+0F3         one graph of both (shardc.passes.joint.pair); or two forwards
    1SEND_F0>2      the result of 1F0 leaves for stage 2         2RECV_F0<1    and is received there, for 2F0
    2SEND_B0>1      the gradients of it leave for stage 1        1RECV_B0<2    and are received there, for 1B0 or 1I0
    2REDUCE         stage 2's gradients, of all microbatches now, are reduced over the data axes
    STEP            tied weights' gradients are summed over the stages, norms taken, weights updated; every rank's last

The letters are those of torch.distributed.pipelining and of "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241),
whose B is I here. A send is started and not waited for; a receive is posted in its place, and waited for by the
action that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from shardc.errors import ShardcError

Kind = Literal["F", "B", "I", "W", "FB", "FF", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE", "STEP"]

#: A forward beside a backward, and beside another forward.
PAIRS: frozenset[Kind] = frozenset(("FB", "FF"))
COMPUTE: frozenset[Kind] = frozenset(("F", "B", "I", "W", *PAIRS))
SENDS: frozenset[Kind] = frozenset(("SEND_F", "SEND_B"))
RECEIVES: frozenset[Kind] = frozenset(("RECV_F", "RECV_B"))
_OTHER_END: dict[Kind, Kind] = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}


class Action(NamedTuple):
    """One action. stage: -1 for STEP. microbatch: -1 for REDUCE and STEP.

    peer: the other stage of a send or receive, else -1. In a pair, stage and microbatch are those of its first half, a
    forward; other: (stage, microbatch) of its second.
    """

    kind: Kind
    stage: int = -1
    microbatch: int = -1
    peer: int = -1
    other: tuple[int, int] = (-1, -1)

    @property
    def parts(self) -> tuple[Action, ...]:
        """The two halves of a pair; of any other action, itself."""
        if self.kind not in PAIRS:
            return (self,)
        then: Kind = "B" if self.kind == "FB" else "F"
        return Action("F", self.stage, self.microbatch), Action(then, *self.other)

    @property
    def of_pair(self) -> tuple[str, int, int]:
        """The kind of a pair, and the stages of its halves."""
        return self.kind, self.stage, self.other[0]

    def among(self, there: Callable[[int], bool]) -> tuple[Action, ...]:
        """Return the action, or its remaining halves if some microbatches are missing. there: which exist."""
        left = tuple(p for p in self.parts if there(p.microbatch))
        return (self,) if len(left) == len(self.parts) else left

    def __str__(self) -> str:
        if self.kind in PAIRS:
            return "+".join(map(str, self.parts))
        if self.kind == "STEP":
            return "STEP"
        if self.kind == "REDUCE":
            return f"{self.stage}REDUCE"
        head = f"{self.stage}{self.kind}{self.microbatch}"
        return head if self.peer < 0 else f"{head}{'>' if self.kind in SENDS else '<'}{self.peer}"

    def other_end(self) -> Action:
        """Return the receive of a send, or the send of a receive."""
        return Action(_OTHER_END[self.kind], self.peer, self.microbatch, self.stage)


def pair(forward: Action, then: Action) -> Action:
    """Return one action that runs an F beside a B, or beside another F."""
    assert forward.kind == "F"
    assert then.kind in ("B", "F")
    return forward._replace(kind="FB" if then.kind == "B" else "FF", other=(then.stage, then.microbatch))


def computed(actions: Iterable[Action]) -> Iterator[Action]:
    """Yield the actions, pairs as their two halves."""
    return (p for a in actions for p in a.parts)


class Link(NamedTuple):
    """Stage `target` uses values of an earlier stage `source`. gradient: gradients of some come back."""

    source: int
    target: int
    gradient: bool = True


class Crossing(Protocol):
    """A link of a program: shardc.ir.stage.Edge."""

    @property
    def source(self) -> int: ...
    @property
    def target(self) -> int: ...
    @property
    def gradient(self) -> bool: ...


Edges = Iterable[Crossing | tuple[int, int]]


def links(edges: Edges | None, stages: int) -> tuple[Link, ...]:
    """Return edges as sorted Links; None: each stage uses the one before. Raises ShardcError if illegal."""
    pairs: Edges = ((s, s + 1) for s in range(stages - 1)) if edges is None else edges
    linked = {Link(*e) if isinstance(e, tuple) else Link(e.source, e.target, e.gradient) for e in pairs}
    for e in linked:
        if not 0 <= e.source < e.target < stages:
            fault = f"an edge from stage {e.source} to stage {e.target} of {stages}"
            raise ShardcError(fault, where="edges", fix="an edge goes from a stage to a later one")
    return tuple(sorted(linked))


@dataclass(frozen=True)
class Schedule:
    """A schedule. placement: the rank of each stage on the pipeline's axis. actions: by rank, in order.

    where: for errors, the place of every action in the file it was read from.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    where: tuple[tuple[str, ...], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def of(name: str, actions: Sequence[Sequence[Action]], where: tuple[tuple[str, ...], ...] = ()) -> Schedule:
        """Make a schedule. A stage belongs to the rank that has its first action; -1 if none has."""
        placement: dict[int, int] = {}
        for rank, row in enumerate(actions):
            for a in computed(row):
                placement.setdefault(a.stage, rank)
        placement.pop(-1, None)
        stages = range(max(placement, default=-1) + 1)
        microbatches = max((a.microbatch for row in actions for a in computed(row)), default=-1) + 1
        return Schedule(
            name, microbatches, tuple(placement.get(s, -1) for s in stages), tuple(map(tuple, actions)), where
        )

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def ranks(self) -> int:
        return len(self.actions)

    def __repr__(self) -> str:
        return f"<Schedule {self.name}: {self.sizes}>"

    @property
    def sizes(self) -> str:
        counts = (self.stages, "stage", "s"), (self.ranks, "rank", "s"), (self.microbatches, "microbatch", "es")
        stages, ranks, microbatches = (f"{n} {noun}{many if n != 1 else ''}" for n, noun, many in counts)
        return f"{stages} on {ranks}, {microbatches}"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(s for s, r in enumerate(self.placement) if r == rank)

    def place(self, rank: int, index: int) -> str:
        """Return the place of an action, for errors."""
        return self.where[rank][index] if self.where else f"{self.name}: rank {rank}, action {index + 1}"

    def __iter__(self) -> Iterator[tuple[int, int, Action]]:
        """Yield (rank, position, action) of all actions."""
        return ((r, i, a) for r, row in enumerate(self.actions) for i, a in enumerate(row))

    def parts(self) -> Iterator[tuple[int, int, Action]]:
        """Yield the same, with a pair as its two halves, which have one position."""
        return ((rank, i, part) for rank, i, a in self for part in a.parts)

    def pairs(self) -> tuple[tuple[str, int, int], ...]:
        """Return (kind, stage of the first half, of the second) of all pairs."""
        return tuple(sorted({a.of_pair for _, _, a in self if a.kind in PAIRS}))

    def __str__(self) -> str:
        rows = (f"rank {r}: {' '.join(map(str, row))}".rstrip() for r, row in enumerate(self.actions))
        return "\n".join([f"# {self.name}: {self.sizes}", *rows, ""])


def live(actions: Iterable[Action]) -> int:
    """Return the largest number of (stage, microbatch) whose activations a rank has at once.

    They are live from F to B, or W where backward is split.
    """
    now = peak = 0
    for a in computed(actions):
        if a.kind == "F":
            now += 1
            peak = max(peak, now)
        elif a.kind in ("B", "W"):
            now -= 1
    return peak
