"""Define the work of a rank in a part of a step, as plain values: ops, collectives and storages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shardc.ir.metadata import HOST_LINK, CommRecord

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class Storage:
    """One storage. op: its producer; shape, dtype: of the first tensor in it.

    still: its size does not grow with a batch's rows, for any kind.
    """

    nbytes: int
    kind: str
    op: str = ""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    still: bool = False


class Op(NamedTuple):
    """An op that ran. traffic: bytes of memory that it reads and writes.

    dtype: the name of its first floating operand's, "bfloat16"; for a product with block scales, that of the scales.
    name: as in torch, "mm"; again: a forward op that backward recomputes. of, shape: for an op with products, the
    program's op that it belongs to, and its result's shape. matrices: (count, rows, columns) of the products' results,
    of attention the scores. attention: it is an attention kernel; masked: flops that such a kernel skips, as a mask
    empties them. aligned: all rows of a product's matrices begin at multiples of this many bytes, 16 at most.

    still: the part of the traffic that does not grow with a batch's rows: weights and their gradients. grows: the index
    in `matrices` of the number that grows with rows, 0 or 1; None: none does, as rows are summed over.
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
        """Return its flops without those that its kernel skips. left_out: the share of `masked` that it skips."""
        return self.flops - self.masked * left_out

    def of_rows(self, times: int) -> Op:
        """Return the op in a batch with `times` as many rows."""
        moved = self.traffic - self.still
        if not moved:  # its operands do not grow either
            return self
        flops, traffic, masked = self.flops * times, self.still + moved * times, self.masked * times
        matrices = self.matrices
        if matrices and self.grows is not None:
            count, m, n = matrices
            matrices = (count * times, m, n) if self.grows == 0 else (count, m * times, n)
        return self._replace(flops=flops, traffic=traffic, matrices=matrices, masked=masked)


class Sent(NamedTuple):
    """A collective. key: it overlaps with later work until `Waited` of that key; None: the next op waits.

    after: the key of another collective that must end before this one begins.
    """

    record: CommRecord
    key: int | None = None
    after: int | None = None


class Waited(NamedTuple):
    """The rank waits for the collective of that key."""

    key: int


@dataclass
class Part:
    """A part of a step. changes: (+1 allocated or -1 freed, storage), in order. work: what takes time, in order."""

    name: str
    changes: list[tuple[int, Storage]] = field(default_factory=list)
    work: list[Op | Sent | Waited] = field(default_factory=list)

    @property
    def flops(self) -> int:
        return sum(w.flops for w in self.work if isinstance(w, Op))

    @property
    def sent(self) -> list[CommRecord]:
        """The collectives that it starts, without copies to the host."""
        return [w.record for w in self.work if isinstance(w, Sent) and w.record.axes != HOST_LINK]
