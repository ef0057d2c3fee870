"""Read a box of a tensor without the rest: in memory, in files, or on a tape.

x.read((0, 16), (8, 4))     # rows 0 to 7, columns 16 to 19: [8, 4]
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.state.boxes import Numbers, index, whole


@dataclass(frozen=True)
class Sliced:
    """A tensor that is read by slice.

    read(offset, shape): returns a box of it, on the CPU; it may be the source's own memory. computed: the tensor is in
    memory, or computed as a whole, so that a slice costs no less. name: of a tensor that is exported.
    """

    shape: Numbers
    dtype: torch.dtype
    read: Callable[[Numbers, Numbers], Tensor]
    computed: bool = False
    name: str = ""

    def tensor(self) -> Tensor:
        """Return all of it."""
        return self.read(*whole(self.shape))


def in_memory(x: Tensor, *, computed: bool = False) -> Sliced:
    """Return a tensor in memory: a real one, or a file mapped into memory, read page by page."""
    return Sliced(tuple(x.shape), x.dtype, lambda *box: x.detach()[index(*box)], computed)


def in_memory_by_name(tensors: Mapping[str, Any], *, computed: bool = False) -> dict[str, Sliced]:
    """Return the tensors among these values; of one under several names, one object."""
    one = {id(x): in_memory(x, computed=computed) for x in tensors.values() if isinstance(x, Tensor)}
    return {n: one[id(x)] for n, x in tensors.items() if id(x) in one}


def cast(of: Sliced, dtype: torch.dtype) -> Sliced:
    """Return a tensor in another dtype."""
    return Sliced(of.shape, dtype, lambda *box: of.read(*box).to(dtype), of.computed)


def joined(members: Sequence[Sliced], dim: int, *, new: bool) -> Sliced:
    """Join tensors along a dim. new: a new dim (stack), or one of theirs (cat)."""
    shape, dtype = members[0].shape, members[0].dtype
    sizes = [1 if new else x.shape[dim] for x in members]

    def read(offset: Numbers, size: Numbers) -> Tensor:
        begin, behind = 0, size[dim + 1 :]
        slices = [] if size[dim] else [torch.empty(size, dtype=dtype)]
        for x, n in zip(members, sizes, strict=True):
            start, stop = max(offset[dim], begin), min(offset[dim] + size[dim], begin + n)
            if start < stop and new:
                slices.append(x.read((*offset[:dim], *offset[dim + 1 :]), (*size[:dim], *behind)).unsqueeze(dim))
            elif start < stop:
                at = (*offset[:dim], start - begin, *offset[dim + 1 :])
                slices.append(x.read(at, (*size[:dim], stop - start, *behind)))
            begin += n
        return torch.cat(slices, dim)

    joined_shape = (*shape[:dim], sum(sizes), *shape[dim + (not new) :])
    return Sliced(joined_shape, dtype, read, any(x.computed for x in members))


def stretches(shape: Numbers, offset: Numbers, size: Numbers) -> tuple[int, list[int]]:
    """Return a box's contiguous parts in row-major order: (elements of each, where each begins)."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    inner = len(shape)
    while inner and (inner == len(shape) or size[inner] == shape[inner]):
        inner -= 1  # this dim's range is contiguous, as all dims after it are whole
    first = sum(map(operator.mul, offset[inner:], strides[inner:]))
    outer = itertools.product(*(range(a, a + n) for a, n in zip(offset[:inner], size[:inner], strict=True)))
    return math.prod(size[inner:]), [first + sum(map(operator.mul, at, strides)) for at in outer]
