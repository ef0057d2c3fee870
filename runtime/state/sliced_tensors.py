"""Tensors of which a range of each dim can be read without the rest, wherever they lie: in memory, in files
(weight_files.py), on the tape of a constructor.

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
        """The slice, on the CPU; it may be the source's own memory."""
        ...


def whole(shape: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges of all of a tensor."""
    return [(0, n) for n in shape]


def index(ranges: Ranges) -> tuple[slice, ...]:
    """What to index a tensor with for these ranges of it."""
    return tuple(slice(start, start + n) for start, n in ranges)


@dataclass(frozen=True)
class InMemory:
    """A tensor that is there: a real one, or one that the system reads page by page (a file mapped into memory)."""

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
    """Another tensor, of another dtype."""

    of: Sliced
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def read(self, ranges: Ranges) -> Tensor:
        return self.of.read(ranges).to(self.dtype)


@dataclass(frozen=True)
class Joined:
    """Tensors along a dim, as one. new: it is a dim that they do not have (stack), or one of theirs (cat)."""

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
        found = [torch.empty([n for _, n in ranges], dtype=self.dtype)] if not count else []
        for x in self.members:
            size = 1 if self.new else x.shape[d]
            start, stop = max(first, begin), min(first + count, begin + size)
            if start < stop:
                read = x.read([*ranges[:d], *([(start - begin, stop - start)] * (not self.new)), *ranges[d + 1 :]])
                found.append(read.unsqueeze(d) if self.new else read)
            begin += size
        return torch.cat(found, d)


def stretches(shape: Sequence[int], ranges: Ranges) -> tuple[int, list[int]]:
    """Where a slice of a tensor lies in row-major order: (elements of each contiguous stretch, where each begins)."""
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
