"""Define the work of a rank in a part of a step, as plain values: ops, collectives and storages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shardc.ir.metadata import CommRecord
from shardc.ir.offload import HOST_LINK

if TYPE_CHECKING:
    import torch


class Storage:
    """One storage. op: its producer; shape, dtype: of the first tensor in it. Unset if read from a disk."""

    __slots__ = ("dtype", "kind", "nbytes", "op", "shape")

    def __init__(
        self,
        nbytes: int,
        kind: str,
        op: str = "",
        shape: tuple[int, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        self.nbytes, self.kind, self.op, self.shape, self.dtype = nbytes, kind, op, shape, dtype


class Op(NamedTuple):
    """An op that ran. traffic: bytes of memory that it reads and writes.

    dtype: the name of its first floating operand's, "bfloat16"; for a product with block scales, that of the scales.
    name: as in torch, "mm"; again: a forward op that backward recomputes. of, shape: for an op with products, the
    program's op that it belongs to, and its result's shape. matrices: (count, rows, columns) of the products' results,
    of attention the scores. attention: it is an attention kernel; masked: flops that such a kernel skips, as a mask
    empties them. aligned: all rows of a product's matrices begin at multiples of this many bytes, 16 at most.
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
    aligned: int = 16

    def computed(self, left_out: float = 1.0) -> float:
        """Return its flops without those that its kernel skips. left_out: the share of `masked` that it skips."""
        return self.flops - self.masked * left_out

    def of_rows(self, times: int) -> Op:
        """Return about the op in a batch with `times` as many rows: it also reads weights so many times."""
        return self._replace(flops=self.flops * times, traffic=self.traffic * times, masked=self.masked * times)


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
