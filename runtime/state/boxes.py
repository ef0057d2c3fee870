"""Find the boxes of global tensors that a rank has: what it writes into a checkpoint, reads from one, sends to others.

x.read((0, 16), (8, 4)) of a `Sliced` tensor x     # rows 0 to 7, columns 16 to 19: [8, 4]

A rank's part is one or more boxes (`Layout.boxes`: several for fused weights). With ZeRO a rank has a flat shard of its
part: several boxes again. The first rank that has a box writes it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.runtime.zero.flat_partition import FlatShard, elements

Numbers = tuple[int, ...]
Shards = Mapping[str, FlatShard]

# --- arithmetic of boxes, each an offset and a shape


def overlap(offset: Numbers, shape: Numbers, other: Numbers, of: Numbers) -> tuple[Numbers, Numbers] | None:
    """Return the intersection of two boxes; None if it is empty."""
    start = tuple(map(max, offset, other))
    size = tuple(min(a + n, b + m) - s for a, n, b, m, s in zip(offset, shape, other, of, start, strict=True))
    return (start, size) if all(n > 0 for n in size) else None


def index(offset: Sequence[int], shape: Numbers) -> tuple[slice, ...]:
    """Return the index of a box in a tensor."""
    return tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))


def whole(shape: Numbers) -> tuple[Numbers, Numbers]:
    """Return the box that is all of a tensor."""
    return (0,) * len(shape), shape


def disjoint(boxes: Iterable[tuple[Numbers, Numbers]]) -> bool:
    """Return whether no two boxes share an element."""
    behind: list[tuple[Numbers, Numbers]] = []
    for offset, shape in sorted(boxes):
        behind = [(o, s) for o, s in behind if not shape or o[0] + s[0] > offset[0]]
        if any(overlap(offset, shape, o, s) is not None for o, s in behind):
            return False
        behind.append((offset, shape))
    return True


def without(offset: Numbers, shape: Numbers, start: Numbers, size: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield the boxes that remain of a box after a box inside it is removed."""
    for d, (a, n, b, m) in enumerate(zip(offset, shape, start, size, strict=True)):
        for first, count in ((a, b - a), (b + m, a + n - b - m)):  # before it in this dim, and behind it
            if count:
                yield (*start[:d], first, *offset[d + 1 :]), (*size[:d], count, *shape[d + 1 :])


def cuts(shape: Numbers, itemsize: int, limit: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield boxes of at most `limit` bytes, or one element, that make up a tensor: rows in order."""
    row = math.prod(shape[1:]) * itemsize
    if not shape or shape[0] * row <= limit:
        yield whole(shape)
    elif row > limit:
        for i in range(shape[0]):
            for offset, size in cuts(shape[1:], itemsize, limit):
                yield (i, *offset), (1, *size)
    else:
        rows = limit // row
        for i in range(0, shape[0], rows):
            yield (i, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - i), *shape[1:])


@dataclass(frozen=True)
class Box:
    """A box of a global tensor, and its place in a tensor that has it.

    offset, shape: in the global tensor. start: in the local tensor, which may have one more dim, of a stack's entries.
    form: of a flat local tensor, whose elements from `first` on are viewed so before.
    """

    offset: Numbers
    shape: Numbers
    start: Numbers
    form: Numbers | None = None
    first: int = 0

    @classmethod
    def alone(cls, offset: Numbers, shape: Numbers) -> Box:
        """Return the box for a local tensor that is exactly this box."""
        return cls(offset, shape, (0,) * len(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, local: Tensor) -> Tensor:
        """Return a view of the box in a local tensor."""
        if self.form is not None:
            local = local[self.first : self.first + math.prod(self.form)].view(self.form)
        stack = len(self.start) - len(self.shape)
        at: tuple[Any, ...] = (*self.start[:stack], *index(self.start[stack:], self.shape))
        return local[at]

    def inside(self, offset: Numbers, shape: Numbers) -> Box | None:
        """Return its intersection with another box of the global tensor; None if it is empty."""
        if (common := overlap(self.offset, self.shape, offset, shape)) is None:
            return None
        stack = len(self.start) - len(self.shape)
        moved = (a + b - c for a, b, c in zip(self.start[stack:], common[0], self.offset, strict=True))
        return replace(self, offset=common[0], shape=common[1], start=(*self.start[:stack], *moved))

    def cut(self, itemsize: int, limit: int) -> Iterator[Box]:
        """Yield its parts of at most `limit` bytes, or of one element."""
        for start, shape in cuts(self.shape, itemsize, limit):
            part = self.inside(tuple(map(sum, zip(self.offset, start, strict=True))), shape)
            assert part is not None
            yield part

    def within(self, offset: Numbers) -> tuple[slice, ...]:
        """Return its index in a tensor that begins at this offset of the global one."""
        return index([a - b for a, b in zip(self.offset, offset, strict=True)], self.shape)


@functools.lru_cache(maxsize=1 << 16)  # a tensor's moments have its boxes, in this save and in the next one
def boxes_of(
    shape: Numbers, layout: Layout, shard: FlatShard | None, mesh: Mesh, rank: int, member: int | None = None
) -> tuple[Box, ...]:
    """Return the boxes of a global tensor that a rank has, those with elements.

    shard: the flat shard that it keeps; None: all. member: of this entry of a stack, which has one dim less.
    """
    boxes = _each_box(shape, layout, shard, mesh, mesh.coords(rank)) if 0 not in shape else ()
    if member is None:
        return tuple(boxes)
    of_member = (b.inside((member, *(0,) * (len(shape) - 1)), (1, *shape[1:])) for b in boxes)
    return tuple(replace(b, offset=b.offset[1:], shape=b.shape[1:]) for b in of_member if b is not None)


def _each_box(
    shape: Numbers, layout: Layout, shard: FlatShard | None, mesh: Mesh, coords: Mapping[str, int]
) -> Iterator[Box]:
    columns = (_columns(box, 1, 2, 0) for box in layout.boxes(shape, mesh, coords))
    held = [Box(offset, size, start) for offset, size, start in columns]
    if shard is None:
        yield from held
        return
    for stretch in shard.boxes():
        (start, form), (element, _) = _columns(stretch, 0, 1), elements(stretch, shard.shape)
        for box in held:
            if (common := overlap(start, form, box.start, box.shape)) is not None:
                offset = tuple(a + b - c for a, b, c in zip(box.offset, common[0], box.start, strict=True))
                inside = tuple(a - b for a, b in zip(common[0], start, strict=True))
                yield Box(offset, common[1], inside, form, element - shard.start)


def _columns(rows: Sequence[Sequence[int]], *columns: int) -> list[Numbers]:
    return [tuple(row[c] for row in rows) for c in columns]


# --- tensors of which a box is read without the rest: in memory, in files, or on a tape


@dataclass(frozen=True)
class Sliced:
    """A tensor that is read by slice.

    read(offset, shape): returns a box of it, on the CPU; it may be the source's own memory. computed: the tensor is in
    memory, or computed as a whole, so that a slice costs no less. name: of a tensor that is exported. drawn():
    whether it has random numbers, which no file has.
    """

    shape: Numbers
    dtype: torch.dtype
    read: Callable[[Numbers, Numbers], Tensor]
    computed: bool = False
    name: str = ""
    drawn: Callable[[], bool] = bool

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


# --- what a rank has of a program's tensors


@dataclass(frozen=True)
class Part:
    """This rank's part of a global tensor.

    stored: shape of the global tensor that `local` is a part of. shard: local is 1-d, this flat shard of the local
    part; None: it is the local part. written: this rank writes it, and no other one that has the same part. member:
    that tensor is a stack of several model parameters, and this is the part of one of them.
    """

    local: Tensor
    stored: Numbers
    layout: Layout = field(default_factory=Layout)
    shard: FlatShard | None = None
    written: bool = True
    member: int | None = None

    @property
    def shape(self) -> Numbers:
        """The shape of the whole tensor."""
        return self.stored if self.member is None else self.stored[1:]

    def boxes(self, mesh: Mesh, rank: int) -> Sequence[Box]:
        """Return the boxes of the part that have elements."""
        return boxes_of(self.stored, self.layout, self.shard, mesh, rank, self.member)


def replicas(program: Program, layout: Layout, cut: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the axes whose ranks hold the same part."""
    split = {a for a, _ in layout.shards()} | set(cut) | {program.axis}
    return tuple(a for a in program.mesh.names if a not in split)


def cut_axes(program: Program, p: Param) -> tuple[str, ...]:
    """Return the axes over which ZeRO splits a parameter into flat shards."""
    bucket = program.bucket(p)
    return program.mesh.digits(bucket.shard) if bucket is not None and bucket.zero else ()


def copied(program: Program, x: Param | Buffer, mesh: Any) -> bool:
    """Return whether another pipeline stage is the first that holds the tensor."""
    return bool(program.axis) and mesh.coordinate(program.axis) != program.holders(x)[0]


def kept(program: Program) -> list[Buffer]:
    return [b for b in program.buffers if b.fqn and (b.persistent or b.updated)]
