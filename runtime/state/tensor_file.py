"""Files of tensors in the safetensors format, read and written by stretches of bytes: nobody holds a whole file.

    u64 length | header, JSON: {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...} | data

safetensors' own library writes a file from tensors that are all in memory, and reads whole tensors or rows of them.
What is here writes tensors as they come, and reads any stretch of a tensor's bytes into memory that is there already.
A header is checked before anything is allocated: types, shapes and places have to fit the file, without gaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardc import text_file
from shardc.errors import ShardcError
from shardc.runtime.state import disk_calls

#: safetensors' names of dtypes, for those that both it and torch have.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype)
    for name, dtype in {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "C64": "complex64",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
    }.items()
    if hasattr(torch, dtype)
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Bytes that are written or read, and hashed, while they are in the cache.
BLOCK = 1 << 20
#: Bytes of a header that safetensors' own library reads at most.
MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. start, stop: its bytes, counted from the beginning of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0
    stop: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def stored_as(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape under which a file has a tensor: of a dtype that safetensors lacks, its bytes, u8[*shape,
    itemsize].
    """
    return (dtype, shape) if dtype in NAMES else (torch.uint8, (*shape, dtype.itemsize))


def bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return x.detach().reshape(-1).view(torch.uint8).numpy().data if x.numel() else memoryview(b"")


def header(entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[Entry]]:
    """The bytes before the data, of a multiple of 8, and the entries with their places in the file. Tensors stand in
    the order of the entries, without gaps.
    """
    found: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    place = 0
    for e in entries:
        found[e.name] = {
            "dtype": NAMES[e.dtype],
            "shape": list(e.shape),
            "data_offsets": [place, place + e.nbytes],
        }
        place += e.nbytes
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data = len(text).to_bytes(8, "little") + text
    placed, place = [], len(data)
    for e in entries:
        placed.append(Entry(e.name, e.dtype, e.shape, place, place + e.nbytes))
        place += e.nbytes
    return data, placed


def read_header(descriptor: int, where: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """{name: entry} and the metadata of an open file. where: the file, for errors.

    Raises ShardcError for what is no such file: a header that is not JSON of that form, sizes that do not fit its
    dtypes and shapes, tensors that overlap, leave gaps or reach over the file's end.
    """
    size = os.fstat(descriptor).st_size
    try:
        found, length = _parse(descriptor, size)
        metadata = found.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise ValueError("__metadata__ is not a table of texts")
        entries = {name: _entry(name, x, 8 + length) for name, x in found.items()}
        place = 8 + length
        for e in sorted(entries.values(), key=lambda e: (e.start, e.stop)):
            if e.start != place:
                raise ValueError(f"{e.name!r} begins at byte {e.start}, and what is before it ends at {place}")
            place = e.stop
        if place != size:
            raise ValueError(f"its tensors end at byte {place}, and the file at {size}")
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as e:
        fix = "get the file again: it is cut off, damaged, or no .safetensors file"
        raise ShardcError(f"the file's header cannot be read: {e}", where=where, fix=fix) from None
    return entries, metadata


def _parse(descriptor: int, size: int) -> tuple[dict[str, Any], int]:
    start = bytearray(8)
    disk_calls.read_into(descriptor, memoryview(start), 0)
    length = int.from_bytes(start, "little")
    if length > min(MAX_HEADER, size - 8):
        raise ValueError(f"it would have {length} bytes, and the file has {size}")
    text = bytearray(length)
    disk_calls.read_into(descriptor, memoryview(text), 8)
    found = json.loads(bytes(text).decode(), object_pairs_hook=text_file.unique)
    if not isinstance(found, dict):
        raise TypeError("it is not a table")
    return found, length


def _entry(name: str, x: Any, data: int) -> Entry:
    if not isinstance(x, dict) or x.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} is not described by dtype, shape and data_offsets")
    start, stop = whole_numbers(x["data_offsets"], f"data_offsets of {name!r}")
    if x["dtype"] not in DTYPES:
        raise ValueError(f"the dtype of {name!r} is unknown")
    e = Entry(name, DTYPES[x["dtype"]], whole_numbers(x["shape"], f"shape of {name!r}"), data + start, data + stop)
    if e.nbytes != stop - start:
        raise ValueError(f"{name!r} has {stop - start} bytes, and its shape {e.nbytes}")
    return e


def whole_numbers(x: Any, what: str) -> tuple[int, ...]:
    """A list of numbers from 0 to 2^63 - 1. Raises ValueError for anything else."""
    if not isinstance(x, list) or any(type(n) is not int or not 0 <= n < 2**63 for n in x):
        raise ValueError(f"the {what} is no list of whole numbers")
    return tuple(x)


class TensorFile:
    """A .safetensors file to read from; a symbolic link is followed. .entries: by name; .metadata: the texts in its
    header.

    Raises ShardcError for a file that is none, or is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with disk_calls.opened(path, links=True) as descriptor:
                self.entries, self.metadata = read_header(descriptor, str(path))
        except OSError as e:
            fix = "name a .safetensors file that can be read"
            raise ShardcError(f"the file cannot be read: {e.strerror or e}", where=str(path), fix=fix) from None

    def read(self, name: str, box: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """A tensor or a part of it, contiguous, on the CPU. box: (start, length) for every dim. Only the rows of dim 0
        that hold the part are read.
        """
        e = self.entries[name]
        (first, count), *inner = box or [(0, n) for n in e.shape] or [(0, 1)]
        rows = torch.empty((count, *e.shape[1:]) if e.shape else (), dtype=e.dtype)
        with disk_calls.opened(self.path, links=True) as descriptor:
            disk_calls.read_into(
                descriptor, bytes_of(rows), e.start + first * math.prod(e.shape[1:]) * e.dtype.itemsize
            )
        return rows[(slice(None), *(slice(a, a + n) for a, n in inner))].contiguous() if inner else rows
