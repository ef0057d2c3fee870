"""Read a range of each dim of a tensor without the rest: in memory, in files, or on a tape.

x.read([(0, 8), (16, 4)])     # rows 0 to 7, columns 16 to 19: [8, 4]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

#: Per dim (start, length).
Ranges = Sequence[tuple[int, int]]


class Sliced(Protocol):
    """A tensor that is read by slice."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, ranges: Ranges) -> Tensor:
        """Return the slice, on the CPU; it may be the source's own memory."""
        ...


def whole(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges of all of a tensor."""
    return [(0, n) for n in shape]


def index(ranges: Ranges) -> tuple[slice, ...]:
    """Return the index of a tensor for these ranges."""
    return tuple(slice(start, start + n) for start, n in ranges)


@dataclass(frozen=True)
class InMemory:
    """A tensor in memory: a real one, or a file mapped into memory, read page by page."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, ranges: Ranges) -> Tensor:
        return self.tensor.detach()[index(ranges)]


@dataclass(frozen=True)
class Cast:
    """Another tensor, with another dtype."""

    of: Sliced
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def read(self, ranges: Ranges) -> Tensor:
        return self.of.read(ranges).to(self.dtype)


@dataclass(frozen=True)
class Joined:
    """Tensors joined along a dim. new: a new dim (stack), or one of theirs (cat)."""

    members: Sequence[Sliced]
    dim: int
    new: bool

    @property
    def shape(self) -> tuple[int, ...]:
        before, after = self.members[0].shape[: self.dim], self.members[0].shape[self.dim + (not self.new) :]
        return (*before, sum(1 if self.new else x.shape[self.dim] for x in self.members), *after)

    @property
    def dtype(self) -> torch.dtype:
        return self.members[0].dtype

    def read(self, ranges: Ranges) -> Tensor:
        d, (first, count), begin = self.dim, ranges[self.dim], 0
        pieces = [torch.empty([n for _, n in ranges], dtype=self.dtype)] if not count else []
        for x in self.members:
            size = 1 if self.new else x.shape[d]
            start, stop = max(first, begin), min(first + count, begin + size)
            if start < stop:
                read = x.read([*ranges[:d], *([(start - begin, stop - start)] * (not self.new)), *ranges[d + 1 :]])
                pieces.append(read.unsqueeze(d) if self.new else read)
            begin += size
        return torch.cat(pieces, d)


def stretches(shape: Sequence[int], ranges: Ranges) -> tuple[int, list[int]]:
    """Return a slice's contiguous ranges in row-major order: (elements of each, where each begins)."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    inner = len(shape)
    while inner and (inner == len(shape) or ranges[inner][1] == shape[inner]):
        inner -= 1  # this dim's range is contiguous, as all dims after it are whole
    length = math.prod(n for _, n in ranges[inner:])
    starts = [sum(ranges[d][0] * strides[d] for d in range(inner, len(shape)))]
    for d in range(inner - 1, -1, -1):
        first, n = ranges[d]
        starts = [(first + i) * strides[d] + s for i in range(n) for s in starts]
    return length, starts
