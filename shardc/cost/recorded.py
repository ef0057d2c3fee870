"""What a dry run of one rank found out, as plain values: storages made and freed, ops, collectives, by part of a step.

Nothing here runs a program: what is known already is priced from these alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shardc.ir.comm_record import CommRecord
from shardc.ir.units import plural
from shardc.runtime.schedule.actions import PAIRS, Action

if TYPE_CHECKING:
    import torch


#: Kinds in the order in which they are shown.
KINDS = (
    "parameters",
    "optimizer",
    "gradients",
    "buffers",
    "inputs",
    "activations",
    "gathered",
    "communication",
    "temporaries",
)
#: The kind of what is kept in the machine's memory or in files: not a part of the device's memory.
HOST = "host"
#: Kinds of what stays from step to step.
RESIDENT = ("parameters", "optimizer", "buffers")


class Storage:
    """One storage. op: what made it; shape, dtype: of the first tensor in it. Those that were read from a disk have
    neither of the three. still: it is no larger where a batch has more rows, whatever its kind.
    """

    __slots__ = ("dtype", "kind", "nbytes", "op", "shape", "still")

    def __init__(
        self,
        nbytes: int,
        kind: str,
        op: str = "",
        shape: tuple[int, ...] = (),
        dtype: torch.dtype | None = None,
        still: bool = False,
    ) -> None:
        self.nbytes, self.kind, self.op, self.shape, self.dtype, self.still = nbytes, kind, op, shape, dtype, still


class Op(NamedTuple):
    """An op that ran. traffic: bytes of memory that it reads and writes. dtype: the name of its first floating
    operand's, "bfloat16"; of a product with scales for blocks, that of the scales. name: as torch calls it, "mm";
    again: it is of forward, and runs once more in backward.

    of, shape: of an op with products, the program's op that it belongs to, and its result's shape. matrices: (how many,
    rows, columns) of the products' results, of attention the scores. attention: it is a kernel for it; masked: flops of
    its kind that a kernel leaves out, as a mask empties them. aligned: bytes of which all rows of a product's matrices
    begin at multiples, 16 at most.

    still: of the traffic, what is no more where a batch has more rows: weights and their gradients. grows: of
    `matrices`, the index of the number that grows with rows, the first or the second; None: none does, as rows are
    what is summed over.
    """

    flops: int
    traffic: int
    dtype: str
    of: str = ""
    shape: tuple[int, ...] = ()
    matrices: tuple[int, int, int] | tuple[()] = ()
    attention: bool = False
    masked: int = 0
    name: str = ""
    again: bool = False
    still: int = 0
    grows: int | None = 0
    aligned: int = 16

    def of_rows(self, times: int) -> Op:
        """The op in a batch of so many times the rows."""
        moved = self.traffic - self.still
        if not moved:  # not even its operands grow
            return self
        flops, traffic, masked = self.flops * times, self.still + moved * times, self.masked * times
        matrices = self.matrices
        if matrices and self.grows is not None:
            many, m, n = matrices
            matrices = (many * times, m, n) if self.grows == 0 else (many, m * times, n)
        return self._replace(flops=flops, traffic=traffic, matrices=matrices, masked=masked)


class Sent(NamedTuple):
    """A collective. key: names one that overlaps with what comes next, until `Waited` of that key; None: the next op
    waits for it. after: the key of another one that it begins after.
    """

    record: CommRecord
    key: int | None = None
    after: int | None = None


class Waited(NamedTuple):
    """The rank waits for the collective of that key."""

    key: int


@dataclass
class Part:
    """A part of a step. changes: (+1 allocated or -1 freed, storage), in order. work: what takes time, in order. sent:
    the collectives.
    """

    name: str
    changes: list[tuple[int, Storage]] = field(default_factory=list)
    work: list[Op | Sent | Waited] = field(default_factory=list)
    sent: tuple[CommRecord, ...] = ()

    @property
    def flops(self) -> int:
        return sum(w.flops for w in self.work if isinstance(w, Op))


@dataclass(frozen=True)
class DryRun:
    """What one rank does in a step; of a forward-only program that is a forward. at: its coordinate on the pipeline's
    axis. resident: what is stored before a step.

    before: what comes before the first action (taking the batch). actions: those that were run, with what each does.
    after: sums and norms. update: the optimizer's step. optimizer: the name of its class.
    """

    at: int
    rank: int
    resident: tuple[Storage, ...]
    before: Part
    actions: tuple[tuple[Action, Part], ...]
    after: Part
    update: Part
    optimizer: str = ""

    def __repr__(self) -> str:
        return f"<DryRun of rank {self.rank}: {plural(len(self.actions), 'action')}>"


def parts(r: DryRun, actions: tuple[Action, ...]) -> Iterator[tuple[Action | None, Part]]:
    """The parts of a whole step. An action that was not run does what the same action of another microbatch did."""
    ran = dict(r.actions)
    microbatches = sorted({a.microbatch for a, _ in r.actions if a.microbatch >= 0})
    middle = microbatches[len(microbatches) // 2]  # neither the first one, which makes gradients, nor the last
    alike: dict[tuple[str, int, int, int], Part] = {}
    for a, part in r.actions:
        of_pair = a.kind in PAIRS and microbatches[-1] not in (a.microbatch, a.other[1])
        if _kind(a) not in alike or a.microbatch == middle or of_pair:
            alike[_kind(a)] = part
    yield None, r.before
    for a in actions:
        yield a, ran[a] if a in ran else alike[_kind(a)]
    yield None, r.after
    yield None, r.update


def _kind(a: Action) -> tuple[str, int, int, int]:
    """Equal for actions that differ in their microbatches alone."""
    return a.kind, a.stage, a.peer, a.other[0]
