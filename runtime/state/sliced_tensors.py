"""Read a range of each dim of a tensor without the rest: in memory, in files, or on a tape.

x.read([(0, 8), (16, 4)])     # rows 0 to 7, columns 16 to 19: [8, 4]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Per dim (start, length).
Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Sliced:
    """A tensor that is read by slice.

    read: returns a slice, on the CPU; it may be the source's own memory. computed: the tensor is in memory, or computed
    as a whole, so that a slice costs no less. name: of a tensor that is exported.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Ranges], Tensor]
    computed: bool = False
    name: str = ""

    def tensor(self) -> Tensor:
        """Return all of it."""
        return self.read(whole(self.shape))


def whole(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges of all of a tensor."""
    return [(0, n) for n in shape]


def index(ranges: Ranges) -> tuple[slice, ...]:
    """Return the index of a tensor for these ranges."""
    return tuple(slice(start, start + n) for start, n in ranges)


def in_memory(x: Tensor, *, computed: bool = False) -> Sliced:
    """Return a tensor in memory: a real one, or a file mapped into memory, read page by page."""
    return Sliced(tuple(x.shape), x.dtype, lambda ranges: x.detach()[index(ranges)], computed)


def in_memory_by_name(tensors: Mapping[str, Any], *, computed: bool = False) -> dict[str, Sliced]:
    """Return the tensors among these values; of one under several names, one object."""
    one = {id(x): in_memory(x, computed=computed) for x in tensors.values() if isinstance(x, Tensor)}
    return {n: one[id(x)] for n, x in tensors.items() if id(x) in one}


def cast(of: Sliced, dtype: torch.dtype) -> Sliced:
    """Return a tensor in another dtype."""
    return Sliced(of.shape, dtype, lambda ranges: of.read(ranges).to(dtype), of.computed)


def joined(members: Sequence[Sliced], dim: int, *, new: bool) -> Sliced:
    """Join tensors along a dim. new: a new dim (stack), or one of theirs (cat)."""
    shape, dtype = members[0].shape, members[0].dtype
    sizes = [1 if new else x.shape[dim] for x in members]

    def read(ranges: Ranges) -> Tensor:
        (first, count), begin = ranges[dim], 0
        slices = [torch.empty([n for _, n in ranges], dtype=dtype)] if not count else []
        for x, size in zip(members, sizes, strict=True):
            start, stop = max(first, begin), min(first + count, begin + size)
            if start < stop:
                part = x.read([*ranges[:dim], *([(start - begin, stop - start)] * (not new)), *ranges[dim + 1 :]])
                slices.append(part.unsqueeze(dim) if new else part)
            begin += size
        return torch.cat(slices, dim)

    joined_shape = (*shape[:dim], sum(sizes), *shape[dim + (not new) :])
    return Sliced(joined_shape, dtype, read, any(x.computed for x in members))


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
