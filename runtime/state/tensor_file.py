"""Write files of tensors in the safetensors format by ranges of bytes: nobody holds a whole file.

    u64 length | header, JSON: {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...} | data

safetensors' own library writes a file from tensors that are all in memory. It reads them (`open_safetensors`), after it
has checked the header: types, shapes and places must fit the file, without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir import type_text
from shardc.runtime.state.boxes import Numbers, Sliced, index
from shardc.runtime.storage import disk_calls
from shardc.runtime.storage.urls import Remote, Url

#: safetensors' names of dtypes, for those that both it and torch have: mostly those of a program's text, in capitals.
DTYPES = {name.upper(): dtype for dtype, name in type_text.DTYPES.items() if not name.startswith(("f8", "c128"))} | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Bytes that are written or read at once, and hashed while they are in the cache.
BLOCK = 1 << 20
#: Maximal bytes of a header that safetensors' own library reads.
MAX_HEADER = 100_000_000


def stored_as(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape in a file: bytes, u8[*shape, itemsize], for unsupported dtypes."""
    return (dtype, shape) if dtype in NAMES else (torch.uint8, (*shape, dtype.itemsize))


def bytes_of(x: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return x.detach().reshape(-1).view(torch.uint8).numpy().data if x.numel() else memoryview(b"")


def header(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """Return the bytes before the data (a multiple of 8), and where each tensor begins in the file, and where it ends.

    Tensors, (name, dtype, shape), are in their order, without gaps.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    sizes = (math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors)
    offsets = list(accumulate(sizes, initial=0))
    for (name, dtype, shape), *place in zip(tensors, offsets, offsets[1:], strict=False):
        table[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": place}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data = len(text).to_bytes(8, "little") + text
    return data, [len(data) + offset for offset in offsets]


def open_safetensors(path: Path) -> Any:
    """Open a .safetensors file as safetensors.safe_open does; a symbolic link is followed.

    Raises ShardcError for another kind of file, before anything is allocated.
    """
    try:
        with disk_calls.opened(path, links=True):  # a pipe would block
            return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as e:
        fix = "copy or download the file again: it is truncated, damaged, or not a .safetensors file"
        why, fix = instead(path) or (getattr(e, "strerror", None) or e, fix)
        raise ShardcError(f"the file cannot be read: {why}", where=str(path), fix=fix) from None


def tensors_in_store(path: Url) -> tuple[dict[str, Sliced], dict[str, str]]:
    """Return the tensors of a .safetensors file in a store, of which rows are read, and its metadata."""
    try:
        file = Remote(path)
        begin = 8 + int.from_bytes(file.read(0, 8), "little")
        table = json.loads(file.read(8, min(begin - 8, MAX_HEADER)))
        metadata = table.pop("__metadata__", {})
        return {name: _rows_of(file, begin, **x) for name, x in table.items()}, metadata
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        fix = "copy it again: it is truncated, damaged, or not a .safetensors file"
        raise ShardcError(f"the file cannot be read: {e}", where=str(path), fix=fix) from None


def _rows_of(file: Remote, begin: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Sliced:
    kind, (start, stop) = DTYPES[dtype], data_offsets
    row = math.prod(shape[1:]) * kind.itemsize
    if not 0 <= start <= stop <= file.size - begin or stop - start != row * math.prod(shape[:1]):
        raise ValueError("a tensor does not fit the file")

    def read(offset: Numbers, size: Numbers) -> Tensor:
        if 0 in size:
            return torch.empty(size, dtype=kind)
        first, rows = (offset[0], size[0]) if shape else (0, 1)
        data = bytearray(file.read(begin + start + first * row, rows * row))
        read = torch.frombuffer(data, dtype=kind).view(rows, *shape[1:])
        return read[index((0, *offset[1:]), size)] if shape else read[0]

    return Sliced(tuple(shape), kind, read)


_AGAIN = "copy or download it again"
#: How files begin that lie in the place of weights, what they are, and what to do.
_BEGIN = (
    (b"version https://git-lfs", "it is a pointer of Git LFS", "git lfs pull, or hf download NAME --local-dir FOLDER"),
    (b"<", "it is a web page", f"{_AGAIN}; a page in the place of a file often asks for a login (hf auth login)"),
    (b"GGUF", "it is a GGUF file", "download the model's .safetensors files"),
)


def instead(path: Path) -> tuple[str, str] | None:
    """Return what is in a file that cannot be read as weights, and what to do; None if nothing is known."""
    try:
        with disk_calls.opened(path, links=True) as descriptor:
            size = disk_calls.size_of(descriptor)
            begin = disk_calls.read_range(descriptor, 0, min(size, 64))
            end = 8 + int.from_bytes(begin[:8], "little")
            head = disk_calls.read_range(descriptor, 0, min(end, size, MAX_HEADER))[8:] if begin[8:9] == b"{" else b""
    except OSError:
        return None
    if not size:
        return "it is empty", _AGAIN
    try:
        end += max(x["data_offsets"][1] for name, x in json.loads(head).items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, LookupError, AttributeError, RecursionError):
        head = head if end > size else b""
    if head and end > size:
        return f"it is truncated, at byte {size} of {end}", _AGAIN
    return next((row[1:] for row in _BEGIN if begin.startswith(row[0])), None)
