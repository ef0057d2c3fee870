"""Simulate torch's GPU allocator, which reserves more than the bytes of a step's tensors.

It allocates blocks, cuts them, and keeps those that are freed:

    reserved ┌───────────┬──────────────────────┬───────────┐   segments, as allocated from CUDA
             │ h │ h │   │ w      │ scores │    │ logits    │   blocks of them: live, or free for the next tensor
             └───────────┴──────────────────────┴───────────┘

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13 with default settings: no expandable_segments).
Sizes are rounded up to 512 bytes. Up to 1 MiB comes from segments of 2 MiB, up to 10 MiB from segments of 20 MiB; a
larger tensor gets its own segment, rounded up to 2 MiB. The smallest free block that is large enough is used, and cut
if enough is left. Free neighbours are merged. If CUDA has no more memory, segments that are entirely free are returned.
(Similar: Gao et al. 2020, "Estimating GPU Memory Consumption of Deep Learning Models".)
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 2**20
#: Bytes to a multiple of which an allocation is rounded, as by CUDA's allocator.
ROUND, _SMALL, _SMALL_SEGMENT = 512, MIB, 2 * MIB
_MIDDLE, _MIDDLE_SEGMENT, _ROUND_LARGE = 10 * MIB, 20 * MIB, 2 * MIB


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of a segment. before, after: its neighbours there."""

    address: int
    size: int
    small: bool
    before: Block | None = None
    after: Block | None = None
    free: bool = False


class CachingAllocator:
    """The allocator of one GPU. limit: bytes of the GPU. .reserved: bytes of its segments now.

    .peak: the most so far; it exceeds the limit if the GPU is too small.

    >>> a = CachingAllocator()
    >>> x = a.allocate(12 * MIB)
    >>> a.free(x)
    >>> y, z = a.allocate(8 * MIB), a.allocate(8 * MIB)     # x's segment, cut; the rest is too small for z
    >>> a.reserved // MIB
    32
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit, self.reserved, self.peak = limit, 0, 0
        self._address = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, address), by whether small
        self._at: dict[int, Block] = {}  # free blocks, by address

    def allocate(self, nbytes: int) -> Block:
        size = max(-(-nbytes // ROUND), 1) * ROUND
        small = size <= _SMALL
        free = self._free[small]
        if (i := bisect_left(free, (size, 0))) < len(free):
            block = self._remove_free(self._at[free[i][1]])
        else:
            block = self._segment(size, small)
        if block.size - size >= (ROUND if small else _SMALL + 1):
            rest = Block(block.address + size, block.size - size, small, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            self._free_block(rest)
        return block

    def free(self, block: Block) -> None:
        if (after := block.after) is not None and after.free:
            self._remove_free(after)
            self._merge(block, after)
        if (before := block.before) is not None and before.free:
            self._remove_free(before)
            self._merge(before, block)
            block = before
        self._free_block(block)

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            segment = _SMALL_SEGMENT
        elif size < _MIDDLE:
            segment = _MIDDLE_SEGMENT
        else:
            segment = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        if self.reserved + segment > self.limit:
            self._release_free()
        self.reserved += segment
        self.peak = max(self.peak, self.reserved)
        self._address += segment
        return Block(self._address - segment, segment, small)

    def _release_free(self) -> None:
        """Return segments that are entirely free."""
        for block in [b for b in self._at.values() if b.before is None and b.after is None]:
            self._remove_free(block)
            self.reserved -= block.size

    def _free_block(self, block: Block) -> None:
        block.free = True
        self._at[block.address] = block
        insort(self._free[block.small], (block.size, block.address))

    def _remove_free(self, block: Block) -> Block:
        block.free = False
        del self._at[block.address]
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.address))]
        return block

    def _merge(self, first: Block, second: Block) -> None:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
