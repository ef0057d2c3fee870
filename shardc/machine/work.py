"""What a rank does in a part of a step, as plain values: ops that run, collectives that begin and are waited for, and
storages that are made and freed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shardc.ir.comm_record import CommRecord

if TYPE_CHECKING:
    import torch


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

    def computed(self, left_out: float = 1.0) -> float:
        """Its flops without those that its kernel leaves out. left_out: the share of these that it does leave out."""
        return self.flops - self.masked * left_out

    def of_rows(self, times: int) -> Op:
        """The op in a batch of so many times the rows."""
        moved = self.traffic - self.still
        if not moved:  # not even its operands grow
            return self
        flops, traffic, masked = self.flops * times, self.still + moved * times, self.masked * times
        matrices = self.matrices
        if matrices and self.grows is not None:
            count, m, n = matrices
            matrices = (count * times, m, n) if self.grows == 0 else (count, m * times, n)
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
