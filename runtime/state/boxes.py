"""Find the boxes of global tensors that a rank writes into a checkpoint, and reads from one.

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
from shardc.runtime.state import disk_calls
from shardc.runtime.state.checkpoint_index import Numbers, Stored
from shardc.runtime.state.tensor_file import Entry, header, stored_as
from shardc.runtime.zero.flat_partition import FlatShard, elements

# --- what one rank writes: slices of its tensors, and the files that hold them

#: Maximal bytes of a slice, which is read, checked and held at once.
SLICE = 64 << 20


@dataclass
class Piece:
    """A slice that this rank writes: a box of the tensor `key`. read: returns it, in its shape and dtype."""

    key: str
    dtype: torch.dtype
    offset: Numbers
    shape: Numbers
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Plan:
    """The tensors of this rank, and the slices that it writes, by kind of file: "model", "optimizer".

    facts: model, program, mesh, extra, optimizer, as in `checkpoint_index.Index`.
    """

    tensors: dict[str, Stored]
    pieces: dict[str, list[Piece]]
    facts: dict[str, Any]

    def add(self, piece: Piece) -> None:
        """Add a slice, cut into pieces that are not too large."""
        pieces = self.pieces.setdefault(piece.key.partition(".")[0], [])
        for start, shape in cuts(piece.shape, piece.dtype.itemsize, SLICE):
            index = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
            offset = tuple(a + b for a, b in zip(piece.offset, start, strict=True))
            pieces.append(Piece(piece.key, piece.dtype, offset, shape, functools.partial(_cut, piece.read, index)))

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for each in self.pieces.values() for p in each)


def _cut(read: Callable[[], Tensor], index: tuple[slice, ...]) -> Tensor:
    return read()[index]


def planned(parts: Mapping[str, Part], facts: dict[str, Any], mesh: Any) -> Plan:
    """Plan what this rank writes of its parts: those that no other replica writes."""
    plan = Plan({}, {}, facts)
    for key, part in parts.items():
        dtype = part.local.dtype
        plan.tensors[key] = Stored(dtype, part.shape)
        if part.written(mesh.layout, mesh.rank):
            for box in part.boxes(mesh.layout, mesh.rank):
                read = functools.partial(box.of, part.local.detach())
                plan.add(Piece(key, dtype, box.offset, box.shape, read))
    return plan


@dataclass
class Draft:
    """A file to write: its first bytes, and pieces with their places in it."""

    head: bytes
    pieces: list[tuple[Piece, Entry]]

    def copy_to_host(self) -> None:
        """Copy the pieces to host memory, laid out as in the file, so that training may continue.

        Pinned if they come from a device: torch keeps pinned memory, and the next save reuses it.
        """
        start, stop = len(self.head), self.pieces[-1][1].stop
        tensors = [piece.read() for piece, _ in self.pieces]
        devices = {x.device for x in tensors if x.device.type == "cuda"}
        memory = disk_calls.aligned(stop - start, start, pinned=bool(devices))
        for (piece, entry), x in zip(self.pieces, tensors, strict=True):
            copy = memory[entry.start - start : entry.stop - start]
            copy.copy_(x.detach().contiguous().view(-1).view(torch.uint8), non_blocking=bool(devices))
            piece.read = copy.detach
        for device in devices:
            torch.cuda.synchronize(device)


def drafts(plan: Plan, save: Mapping[str, str]) -> dict[str, Draft]:
    """Return the files of this rank, by kind. save: facts about the save for their headers."""
    files: dict[str, Draft] = {}
    for kind, pieces in plan.pieces.items():
        pieces = sorted(pieces, key=lambda p: -p.dtype.itemsize)  # so that each begins aligned for its dtype
        entries = [Entry(_name(plan, p), *stored_as(p.dtype, p.shape)) for p in pieces]
        head, entries = header(entries, dict(save))
        files[kind] = Draft(head, list(zip(pieces, entries, strict=True)))
    return files


def _name(plan: Plan, piece: Piece) -> str:
    name = piece.key.partition(".")[2]
    if piece.shape == plan.tensors[piece.key].shape:
        return name
    return f"{name}[{','.join(f'{a}:{a + n}' for a, n in zip(piece.offset, piece.shape, strict=True))}]"


# --- boxes

Shards = Mapping[str, FlatShard]


@dataclass(frozen=True)
class Box:
    """A box of a global tensor, and its place in a rank's local tensor.

    offset, shape: in the global tensor. index: in the local tensor. flat_range: (first element, number of elements) of
    a flat local tensor, which is first viewed as `form`.
    """

    offset: Numbers
    shape: Numbers
    index: tuple[Any, ...]
    flat_range: tuple[int, int] | None = None
    form: Numbers = ()

    def of(self, local: Tensor) -> Tensor:
        """Return a view of the box in a local tensor."""
        if self.flat_range is not None:
            first, count = self.flat_range
            local = local[first : first + count].view(self.form)
        return local[self.index]


@dataclass(frozen=True)
class Part:
    """This rank's part of a global tensor.

    shard: local is 1-d, this flat shard of the local part; None: it is the local part. replicas: the axes whose ranks
    have the same part. elsewhere: another pipeline stage's rank writes this part. stack: local is of a stack of several
    model parameters, of this shape, and this is the part of entry `member`.
    """

    local: Tensor
    shape: Numbers
    layout: Layout = field(default_factory=Layout)
    shard: FlatShard | None = None
    replicas: tuple[str, ...] = ()
    elsewhere: bool = False
    stack: Numbers = ()
    member: int = 0

    def boxes(self, mesh: Mesh, rank: int) -> Sequence[Box]:
        """Return the boxes of the part that have elements."""
        boxes = boxes_of(self.stack or self.shape, self.layout, self.shard, mesh, rank)
        if not self.stack:
            return boxes
        result = []
        for box in boxes:
            place = self.member - box.offset[0]
            if 0 <= place < box.shape[0]:
                first, *rest = box.index
                index = ((first.start or 0) + place, *rest)
                result.append(Box(box.offset[1:], box.shape[1:], index, box.flat_range, box.form))
        return result

    def written(self, mesh: Mesh, rank: int) -> bool:
        """Return whether this rank writes the part, and no other replica."""
        coords = mesh.coords(rank)
        return not self.elsewhere and not any(coords[a] for a in self.replicas)


def by_name(p: Param, part: Part) -> dict[str, Part]:
    """Return {checkpoint name: part}: one name, or for a stack one per member."""
    if not p.members:
        return {p.fqn: part}
    return {n: replace(part, shape=p.shape[1:], stack=p.shape, member=i) for i, n in enumerate(p.members)}


@functools.lru_cache(maxsize=1 << 16)  # a tensor's moments have its boxes, in this save and in the next one
def boxes_of(shape: Numbers, layout: Layout, shard: FlatShard | None, mesh: Mesh, rank: int) -> tuple[Box, ...]:
    """Return the boxes of a global tensor that a rank has. shard: the flat shard that it keeps; None: all."""
    return tuple(_each_box(shape, layout, shard, mesh, mesh.coords(rank)))


def _each_box(
    shape: Numbers, layout: Layout, shard: FlatShard | None, mesh: Mesh, coords: Mapping[str, int]
) -> Iterator[Box]:
    if 0 in shape:
        return
    if shard is None:
        for box in layout.boxes(shape, mesh, coords):
            yield _placed(box)
        return
    for stretch in shard.boxes():
        first, count = elements(stretch, shard.shape)
        form = tuple(n for _, n in stretch)
        for box in layout.boxes(shape, mesh, coords):
            common = [_common(mine, has) for mine, has in zip(stretch, box, strict=True)]
            if all(n > 0 for _, _, n in common):
                yield _placed(common, (first - shard.start, count), form)


def _placed(box: Iterable[tuple[int, int, int]], flat_range: tuple[int, int] | None = None, form: Numbers = ()) -> Box:
    dims = list(box)
    index = tuple(slice(a, a + n) for a, _, n in dims)
    return Box(tuple(g for _, g, _ in dims), tuple(n for _, _, n in dims), index, flat_range, form)


def _common(stretch: tuple[int, int], box: tuple[int, int, int]) -> tuple[int, int, int]:
    """Intersect a range with a box dim: (start in the range, global start, length)."""
    (a, n), (b, g, m) = stretch, box
    start, stop = max(a, b), min(a + n, b + m)
    return start - a, g + start - b, stop - start


# --- arithmetic of boxes, each an offset and a shape


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
        yield (0,) * len(shape), shape
    elif row > limit:
        for i in range(shape[0]):
            for offset, size in cuts(shape[1:], itemsize, limit):
                yield (i, *offset), (1, *size)
    else:
        rows = limit // row
        for i in range(0, shape[0], rows):
            yield (i, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - i), *shape[1:])


# --- a program's tensors


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
