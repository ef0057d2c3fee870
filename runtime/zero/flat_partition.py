"""Compute the layout of a bucket's flat buffer, and the part that each rank of the data axis keeps.

    parameters of 5, 3 and 4 elements, 4 ranks    a a a a | a - - - | b b b - | c c c c    aligned to 4 elements
    the same, 2 ranks                             a a a a a - - - | b b b - c c c c        each rank keeps 8 elements

Parameters and parts begin at multiples of 16 bytes, for kernels that read 16 bytes at once (grouped products reject
other addresses). A bucket has as many parts as ranks. The gaps are padding: collectives send it, ops never use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

from shardc.ir.program import Program
from shardc.ir.stored import Bucket, Param

#: In bytes.
ALIGNMENT = 16


@dataclass(frozen=True)
class Flat:
    """The layout of a bucket's flat buffer: local shapes, `ranks` equal parts; all start at multiples of `aligned`."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    ranks: int = 1
    aligned: int = 1

    @classmethod
    def of(cls, program: Program, bucket: Bucket) -> Flat:
        params = [program.params_by_name[n] for n in bucket.params]
        shapes = tuple(p.value.local_shape(program.mesh) for p in params)
        # parameters as stored, as ops take them, and their gradients have one layout
        dtypes = {p.dtype for p in params} | {bucket.dtype, bucket.compute or bucket.dtype}
        aligned = max(ALIGNMENT // min(d.itemsize for d in dtypes), 1)
        return cls(bucket.params, shapes, program.mesh.size(bucket.shard) if bucket.shard else 1, aligned)

    @cached_property
    def sizes(self) -> list[int]:
        return [math.prod(s) for s in self.shapes]

    def _up(self, elements: int) -> int:
        return -(-elements // self.aligned) * self.aligned

    @cached_property
    def starts(self) -> list[int]:
        """The offset of each parameter in the buffer."""
        return list(accumulate(map(self._up, self.sizes), initial=0))[:-1]

    @cached_property
    def part(self) -> int:
        """Elements that each rank keeps."""
        return self._up(-(-sum(map(self._up, self.sizes)) // self.ranks))

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """The padding of the buffer, (start, stop) of each stretch."""
        ends = [start + size for start, size in zip(self.starts, self.sizes, strict=True)]
        return [(end, start) for end, start in zip(ends, [*self.starts[1:], self.padded], strict=True) if end < start]

    @cached_property
    def padded(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.part * self.ranks

    def shards(self, rank: int) -> dict[str, FlatShard]:
        """Return the shard of each parameter's flattened local part that a rank keeps."""
        low, high = rank * self.part, (rank + 1) * self.part
        shards = {}
        for name, shape, start, size in zip(self.names, self.shapes, self.starts, self.sizes, strict=True):
            begin, end = max(start, low), min(start + size, high)
            shards[name] = FlatShard(shape, begin - start, end - start) if begin < end else FlatShard(shape, 0, 0)
        return shards


class FlatShards:
    """The flat shard of each parameter on each rank."""

    def __init__(self, program: Program) -> None:
        self._program = program
        flat = cache(lambda bucket: Flat.of(program, program.buckets[bucket]))
        self._place = cache(lambda axis, rank: program.mesh.group(rank, (axis,)).index(rank))
        self._shards = cache(lambda bucket, place: flat(bucket).shards(place))

    def of(self, p: Param, rank: int) -> FlatShard | None:
        """Return the shard of a parameter's flattened local part that a rank keeps; None: all of it."""
        bucket = self._program.bucket(p)
        if bucket is None or not bucket.zero:
            return None
        shards: dict[str, FlatShard] = self._shards(p.bucket, self._place(bucket.shard, rank))
        return shards[p.name]


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
        """Return contiguous boxes of the local part, in order: per dim (start, length). At most 2·ndim - 1."""
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
    """Return (first element, number of elements) of a contiguous box in a flattened tensor of `shape`."""
    first = 0
    for (start, _), n in zip(box, shape, strict=True):
        first = first * n + start
    return first, math.prod(n for _, n in box)
