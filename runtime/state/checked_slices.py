"""Slices of a checkpoint's files, read and checked against their digests."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from shardc.runtime.state import disk_calls
from shardc.runtime.state.boxes import Box, Numbers, overlap
from shardc.runtime.state.checkpoint_folder import DamagedError
from shardc.runtime.state.checkpoint_index import Index, Slice, Stored
from shardc.runtime.state.digest import Digest
from shardc.runtime.state.tensor_file import BLOCK, bytes_of


def damage(file: Path, key: str, s: Slice) -> DamagedError:
    """The error for a slice whose digest is another."""
    place = ",".join(f"{a}:{a + n}" for a, n in zip(s.offset, s.shape, strict=True))
    return DamagedError(f"{key}[{place}], at byte {s.place}, is not what was saved", where=str(file))


def read_whole(descriptor: int, stored: Stored, s: Slice) -> Tensor | None:
    """One slice; None: it is not what was saved."""
    x = torch.empty(s.shape, dtype=stored.dtype)
    return x if _read_into(descriptor, x, s) else None


def _read_into(descriptor: int, x: Tensor, s: Slice) -> bool:
    data, found = bytes_of(x), Digest()
    try:
        for start in range(0, len(data), BLOCK):
            block = data[start : start + BLOCK]
            disk_calls.read_into(descriptor, block, s.place + start)
            found.update(block)  # while it is in the cache
    except OSError:
        return False
    return found.hexdigest() == s.digest


def read_slice(descriptor: int, stored: Stored, s: Slice, boxes: list[tuple[Box, Tensor]]) -> bool:
    """Read one slice, and copy what it has of each box to where it belongs. False: it is not what was saved."""
    (box, target), *others = boxes
    direct = (
        not others
        and (box.offset, box.shape) == (s.offset, s.shape)
        and target.dtype == stored.dtype
        and target.device.type == "cpu"
        and target.is_contiguous()
    )
    buffer = target if direct else torch.empty(s.shape, dtype=stored.dtype)
    if not _read_into(descriptor, buffer, s):
        return False
    for box, target in () if direct else boxes:
        common = overlap(box.offset, box.shape, s.offset, s.shape)
        assert common is not None
        to, here = (
            tuple(slice(a - o, a - o + n) for a, n, o in zip(*common, origin, strict=True))
            for origin in (box.offset, s.offset)
        )
        target[to].copy_(buffer[here])
    return True


def read_box(path: Path, index: Index, key: str, offset: Numbers, shape: Numbers) -> Tensor:
    """A box of a tensor of one checkpoint, on the CPU. Raises DamagedError for a slice that is not what was saved."""
    stored = index.tensors[key]
    found = torch.empty(shape, dtype=stored.dtype)
    box = Box(offset, shape, (), None)
    for s in stored.slices:
        if overlap(offset, shape, s.offset, s.shape) is not None:
            file = path / index.files[s.file].name
            with disk_calls.opened(file) as descriptor:
                if not read_slice(descriptor, stored, s, [(box, found)]):
                    raise damage(file, key, s)
    return found
