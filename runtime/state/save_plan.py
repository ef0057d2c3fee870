"""What one rank writes into a checkpoint: slices of its tensors (`Plan`), and the files that hold them (`Draft`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.state import disk_calls
from shardc.runtime.state.boxes import Numbers, Part, cuts
from shardc.runtime.state.checkpoint_index import Stored
from shardc.runtime.state.tensor_file import Entry, header, stored_as

#: Bytes of a slice at most: what is read, checked and held at once.
SLICE = 64 << 20


@dataclass
class Piece:
    """A slice that this rank writes: a box of the tensor `key`. read: gives it, a tensor of its shape and dtype."""

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
    """What this rank has, and what of it it writes, by kind: "model", "optimizer". facts: model, program, mesh, extra,
    optimizer, as in `checkpoint_index.Index`.
    """

    tensors: dict[str, Stored]
    pieces: dict[str, list[Piece]]
    facts: dict[str, Any]

    def add(self, piece: Piece) -> None:
        """A slice, cut into some that are not too large."""
        mine = self.pieces.setdefault(piece.key.partition(".")[0], [])
        for start, shape in cuts(piece.shape, piece.dtype.itemsize, SLICE):
            index = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
            offset = tuple(a + b for a, b in zip(piece.offset, start, strict=True))
            mine.append(Piece(piece.key, piece.dtype, offset, shape, functools.partial(_cut, piece.read, index)))

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for each in self.pieces.values() for p in each)


def _cut(read: Callable[[], Tensor], index: tuple[slice, ...]) -> Tensor:
    return read()[index]


def planned(parts: Mapping[str, Part], facts: dict[str, Any], mesh: Any) -> Plan:
    """What this rank writes of its parts: those that no other replica writes."""
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
        """Into memory of the host, in which it lies as in the file, so that training may go on. Pinned where it comes
        from a device: torch keeps pinned memory, and the next save finds it again.
        """
        start, stop = len(self.head), self.pieces[-1][1].stop
        tensors = [piece.read() for piece, _ in self.pieces]
        devices = {x.device for x in tensors if x.device.type == "cuda"}
        memory = disk_calls.aligned(stop - start, start, pinned=bool(devices))
        for (piece, entry), x in zip(self.pieces, tensors, strict=True):
            copy = memory[entry.start - start : entry.stop - start]
            copy.copy_(x.detach().contiguous().view(-1).view(torch.uint8), non_blocking=bool(devices))
            piece.read = functools.partial(_same, copy)
        for device in devices:
            torch.cuda.synchronize(device)


def _same(x: Tensor) -> Tensor:
    return x


def drafts(plan: Plan, save: Mapping[str, str]) -> dict[str, Draft]:
    """The files of this rank, by kind. save: what their headers say of it."""
    found: dict[str, Draft] = {}
    for kind, pieces in plan.pieces.items():
        pieces = sorted(pieces, key=lambda p: -p.dtype.itemsize)  # each begins where its dtype is aligned
        entries = [Entry(_name(plan, p), *stored_as(p.dtype, p.shape)) for p in pieces]
        head, entries = header(entries, dict(save))
        if pieces:
            found[kind] = Draft(head, list(zip(pieces, entries, strict=True)))
    return found


def _name(plan: Plan, piece: Piece) -> str:
    name = piece.key.partition(".")[2]
    if piece.shape == plan.tensors[piece.key].shape:
        return name
    return f"{name}[{','.join(f'{a}:{a + n}' for a, n in zip(piece.offset, piece.shape, strict=True))}]"
