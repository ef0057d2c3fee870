"""How a bucket's parameters are laid out in one flat buffer, and which part of it each rank of the data axis keeps.
Pure arithmetic.

    parameters of 5, 3 and 4 elements, 3 ranks    a a a a | a - - - | b b b - | c c c c    aligned to 4 elements
    the same, 2 ranks                             a a a a a - - - | b b b - c c c c        each rank keeps 8 elements

A parameter and a part begin at multiples of 16 bytes, as kernels that read 16 bytes at once want it (grouped products
refuse other addresses), and a bucket has as many parts as ranks: what is in between is padding, which nobody reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from shardc.ir.buckets import Bucket
from shardc.ir.program import Program
from shardc.ir.stored import Param

#: Bytes.
ALIGNMENT = 16


@dataclass(frozen=True)
class Flat:
    """names: the bucket's parameters; shapes: of their local parts; ranks: that keep a part each. aligned: parameters
    and parts begin at multiples of so many elements.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    ranks: int = 1
    aligned: int = 1

    @classmethod
    def of(cls, program: Program, bucket: Bucket) -> Flat:
        params = [program.placed_params[n] for n in bucket.params]
        shapes = tuple(p.value.local_shape(program.mesh) for p in params)
        # parameters as stored, as ops take them, and their gradients lie alike
        dtypes = (
            {p.dtype for p in params} | {bucket.dtype} | ({bucket.compute} if bucket.compute is not None else set())
        )
        aligned = max(ALIGNMENT // min(d.itemsize for d in dtypes), 1)
        return cls(bucket.params, shapes, program.mesh.size(bucket.shard) if bucket.shard else 1, aligned)

    @property
    def sizes(self) -> list[int]:
        return [math.prod(s) for s in self.shapes]

    def _up(self, elements: int) -> int:
        return -(-elements // self.aligned) * self.aligned

    @property
    def starts(self) -> list[int]:
        """Where each parameter begins in the buffer."""
        return list(accumulate(map(self._up, self.sizes), initial=0))[:-1]

    @property
    def part(self) -> int:
        """Elements that each rank keeps."""
        return self._up(-(-sum(map(self._up, self.sizes)) // self.ranks))

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The padding of the buffer, (start, stop) of each stretch."""
        ends = [start + size for start, size in zip(self.starts, self.sizes, strict=True)]
        return [(end, start) for end, start in zip(ends, [*self.starts[1:], self.padded], strict=True) if end < start]

    @property
    def padded(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.part * self.ranks

    def runs(self, rank: int) -> dict[str, FlatShard]:
        """The stretch of each parameter's flattened local part that a rank keeps."""
        low, high = rank * self.part, (rank + 1) * self.part
        runs = {}
        for name, shape, start, size in zip(self.names, self.shapes, self.starts, self.sizes, strict=True):
            begin, end = max(start, low), min(start + size, high)
            runs[name] = FlatShard(shape, begin - start, end - start) if begin < end else FlatShard(shape, 0, 0)
        return runs


class Stretches:
    """What ZeRO leaves to each rank of a program's parameters."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._flats: dict[int, Flat] = {}
        self._runs: dict[tuple[int, int], dict[str, FlatShard]] = {}
        self._places: dict[tuple[str, int], int] = {}

    def of(self, p: Param, rank: int) -> FlatShard | None:
        """The stretch of a parameter's flattened local part that a rank keeps; None: all of it."""
        bucket = self._program.bucket(p)
        if bucket is None or not bucket.zero:
            return None
        if p.bucket not in self._flats:
            self._flats[p.bucket] = Flat.of(self._program, bucket)
        if (bucket.shard, rank) not in self._places:
            group = self._program.mesh.group(rank, (bucket.shard,))
            self._places[bucket.shard, rank] = group.index(rank)
        place = self._places[bucket.shard, rank]
        if (p.bucket, place) not in self._runs:
            self._runs[p.bucket, place] = self._flats[p.bucket].runs(place)
        return self._runs[p.bucket, place][p.name]


@dataclass(frozen=True)
class FlatShard:
    """The elements start .. stop of a parameter's flattened local part, of `shape`."""

    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def boxes(self) -> list[tuple[tuple[int, int], ...]]:
        """The shard as boxes of the local part: per dim (start, length). At most 2·ndim - 1, in order; each is one
        stretch of memory.
        """
        return _boxes(self.shape, self.start, self.stop)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[tuple[int, int], ...]]:
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        index = start // row
        return [((index, 1), *box) for box in _boxes(shape[1:], start - index * row, stop - index * row)]
    head = [((first - 1, 1), *box) for box in _boxes(shape[1:], start - (first - 1) * row, row)] if start % row else []
    body = [((first, last - first), *((0, n) for n in shape[1:]))] if first < last else []
    tail = [((last, 1), *box) for box in _boxes(shape[1:], 0, stop - last * row)] if stop % row else []
    return head + body + tail


def elements(box: tuple[tuple[int, int], ...], shape: tuple[int, ...]) -> tuple[int, int]:
    """(first element, number of elements) of a box that is one stretch of memory, in a flattened tensor of `shape`."""
    first = 0
    for (start, _), n in zip(box, shape, strict=True):
        first = first * n + start
    return first, math.prod(n for _, n in box)
