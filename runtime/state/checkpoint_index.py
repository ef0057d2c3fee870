"""The index of a checkpoint, `index.json`: all that is known of it but the numbers themselves.

    {"sha256": "of all bytes after this line",
    "format": "shardc checkpoint", "version": 3, "id": "5f0c...", "step": 6, "model": "GPT", "program": "9a1c...",
    "mesh": {"dp": 2, "tp": 2},
    "extra": {"step": 6, "seed": 0, "loss_scale": ..., "scheduler": ..., "loaders": ...},
    "optimizer": {"class": "AdamW", "groups": [...], "numbers": {...}},
    "files": [["model-00000.safetensors", 1, bytes in the file, bytes before its data, "sha256 of those"], ...],
    "tensors": {"model.up.weight": ["float32", [16, 8], [[file, first byte, [offset], [shape], "digest"], ...]], ...}}

It is read as what anybody may have written: nothing but JSON, no key that is not known, no file outside of the folder,
and every place, size and shape has to fit before anything is allocated.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shardc import text_file
from shardc.runtime.state.sliced_tensors import Numbers
from shardc.runtime.state.tensor_file import MAX_HEADER, whole_numbers

#: What a digest looks like in the index: XXH3 of the slice's bytes, 128 bits. It finds damage, not forgery: whoever can
#: write a checkpoint can write its digests. It reads at the speed of memory. Another one is another VERSION.
DIGEST = re.compile(r"[0-9a-f]{32}")
NAME = "index.json"
KIND, VERSION = "shardc checkpoint", 3
MAX_BYTES = 4 << 30
MAX_DIMS = 64
FILE = re.compile(r"(model|optimizer)-[0-9]{5,9}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
DTYPES: dict[str, torch.dtype] = {
    str(x).removeprefix("torch."): x
    for x in vars(torch).values()
    if isinstance(x, torch.dtype) and not str(x).startswith(("torch.q", "torch.bits"))
}


@dataclass(frozen=True)
class File:
    """A file of tensors. rank: that wrote it; header: its bytes before the data; sha256: of those."""

    name: str
    rank: int
    nbytes: int
    header: int
    sha256: str


@dataclass(frozen=True)
class Slice:
    """A box of a tensor: its bytes stand in one stretch. file: its number in the index; place: its first byte there."""

    file: int
    place: int
    offset: Numbers
    shape: Numbers
    digest: str


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint, of global shape, and the slices that it consists of."""

    dtype: torch.dtype
    shape: Numbers
    slices: tuple[Slice, ...] = ()

    def nbytes(self, x: Slice) -> int:
        return math.prod(x.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Index:
    """What is in a checkpoint. tensors: by name, "model.FQN" and "optimizer.FQN.STATE". id: of this save, and of every
    file that belongs to it. program: a hash of the program that was trained.
    """

    id: str
    step: int
    model: str
    program: str
    mesh: dict[str, int]
    extra: dict[str, Any]
    optimizer: dict[str, Any] | None
    files: tuple[File, ...] = ()
    tensors: Mapping[str, Stored] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.files)


# --- as text


def tables(files: tuple[File, ...], tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """Files and tensors as JSON has them."""
    return {
        "files": [[f.name, f.rank, f.nbytes, f.header, f.sha256] for f in files],
        "tensors": {
            name: [
                str(t.dtype).removeprefix("torch."),
                list(t.shape),
                [[s.file, s.place, list(s.offset), list(s.shape), s.digest] for s in t.slices],
            ]
            for name, t in tensors.items()
        },
    }


def plain(x: Any) -> Any:
    """json's `default`: a number of numpy's, such as a learning rate, as Python's. Raises TypeError for all else."""
    if isinstance(x, np.generic):
        return x.item()
    raise TypeError(f"Object of type {type(x).__name__} is not JSON serializable")


def to_bytes(index: Index) -> bytes:
    """The file. Raises TypeError, ValueError for values that JSON does not know."""
    facts = {k: x for k, x in vars(index).items() if k not in ("files", "tensors")}
    whole = {"format": KIND, "version": VERSION, **facts, **tables(index.files, index.tensors)}
    lines = [f"{json.dumps(k)}: {json.dumps(x, default=plain)}" for k, x in whole.items() if k != "tensors"]
    entries = [f"{json.dumps(k)}: {json.dumps(x)}" for k, x in whole["tensors"].items()]
    lines.append('"tensors": {' + ",\n".join(entries) + "}}\n")
    body = ",\n".join(lines).encode()
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def from_bytes(data: bytes) -> Index:
    """The index in a file. Raises ValueError that says what is wrong with it."""
    head, _, body = data.partition(b"\n")
    try:
        found = json.loads(data.decode(), object_pairs_hook=text_file.unique)
        if not isinstance(found, dict):
            raise ValueError("it is not a table")
        if found.get("format") != KIND:
            raise ValueError(f"it does not say that it is a {KIND!r}")
        if found.get("version") != VERSION:
            raise ValueError(f"it is of version {found.get('version')!r}, and this shardc reads {VERSION}")
        if head != b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",':
            raise ValueError("its text has another SHA-256 than its first line says: it was cut off, damaged or edited")
        return _checked(found)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"it is no text: byte {e.start}") from None


def _checked(found: dict[str, Any]) -> Index:
    keys = {"sha256", "format", "version", *Index.__dataclass_fields__}
    if found.keys() != keys:
        raise ValueError(f"it has the keys {', '.join(map(repr, sorted(found)))}, and should have {sorted(keys)}")
    for name, kind in (("id", str), ("model", str), ("program", str), ("mesh", dict), ("extra", dict)):
        _is(found[name], kind, name)
    for axis, size in found["mesh"].items():
        if type(size) is not int or size < 1:
            raise ValueError(f"the size of {axis!r} in mesh is {size!r}")
    if found["optimizer"] is not None:
        _check_optimizer(_is(found["optimizer"], dict, "optimizer"))
    files, tensors = read_tables(found)
    (step,) = whole_numbers([found["step"]], "step")
    facts = {k: found[k] for k in ("id", "model", "program", "mesh", "extra", "optimizer")}
    return Index(step=step, files=files, tensors=tensors, **facts)


def _check_optimizer(x: dict[str, Any]) -> None:
    if x.keys() != {"class", "groups", "numbers"}:
        raise ValueError("optimizer has other keys than class, groups and numbers")
    _is(x["class"], str, "class of the optimizer")
    for group in _is(x["groups"], list, "groups of the optimizer"):
        names = _is(group, dict, "group of the optimizer").get("params")
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise ValueError("a group of the optimizer has no list of params")
    for numbers in _is(x["numbers"], dict, "numbers of the optimizer").values():
        _is(numbers, dict, "numbers of a parameter")


def _is(x: Any, kind: type, what: str) -> Any:
    if not isinstance(x, kind):
        raise ValueError(f"its {what} is no {kind.__name__}")
    return x


def read_tables(found: Mapping[str, Any], *, partial: bool = False) -> tuple[tuple[File, ...], dict[str, Stored]]:
    """The inverse of `tables`. Raises ValueError where something does not fit: every byte of every file belongs to its
    header or to one slice, and, unless they are partial, the slices of a tensor are all of it.
    """
    files = tuple(_file(x) for x in _is(found["files"], list, "files"))
    if len({f.name for f in files}) != len(files):
        raise ValueError("a file stands twice in files")
    tensors = {name: _stored(name, x, files, partial) for name, x in _is(found["tensors"], dict, "tensors").items()}
    ends = [f.header for f in files]
    stretches = sorted((s.file, s.place, t.nbytes(s)) for t in tensors.values() for s in t.slices)
    for file, place, nbytes in stretches:
        if place != ends[file]:
            raise ValueError(f"slices of {files[file].name} overlap or leave a gap at byte {ends[file]}")
        ends[file] = place + nbytes
    for f, end in zip(files, ends, strict=True):
        if end != f.nbytes:
            raise ValueError(f"the slices of {f.name} end at byte {end}, and the file at {f.nbytes}")
    return files, tensors


def _file(x: Any) -> File:
    if not isinstance(x, list) or len(x) != 5:
        raise ValueError("an entry of files is not [name, rank, bytes, bytes before the data, sha256]")
    name, *numbers, sha256 = x
    if not isinstance(name, str) or not FILE.fullmatch(name):
        raise ValueError(f"files names {name!r}, which is no file of a checkpoint")
    rank, nbytes, header = whole_numbers(numbers, f"numbers of {name}")
    if not 8 <= header <= min(nbytes, MAX_HEADER + 8) or not _text(sha256, _SHA256):
        raise ValueError(f"the header of {name} does not fit")
    return File(name, rank, nbytes, header, sha256)


def _stored(name: str, x: Any, files: tuple[File, ...], partial: bool) -> Stored:
    if not isinstance(x, list) or len(x) != 3 or not isinstance(x[2], list) or not _text(x[0], re.compile(r"\w+")):
        raise ValueError(f"the entry of {name!r} is not [dtype, shape, slices]")
    if x[0] not in DTYPES:
        raise ValueError(f"the dtype of {name!r}, {x[0]!r}, is unknown")
    whole = Stored(DTYPES[x[0]], whole_numbers(x[1], f"shape of {name!r}"))
    if len(whole.shape) > MAX_DIMS:
        raise ValueError(f"{name!r} has {len(whole.shape)} dims")
    slices = tuple(_slice(name, s, whole, files) for s in x[2])
    if not partial and sum(math.prod(s.shape) for s in slices) != math.prod(whole.shape):
        raise ValueError(f"the slices of {name!r} are not all of it")
    return Stored(whole.dtype, whole.shape, slices)


def _slice(name: str, x: Any, whole: Stored, files: tuple[File, ...]) -> Slice:
    if not isinstance(x, list) or len(x) != 5 or not _text(x[4], DIGEST):
        raise ValueError(f"a slice of {name!r} is not [file, first byte, offset, shape, digest]")
    file, place = whole_numbers(x[:2], f"place of a slice of {name!r}")
    found = Slice(
        file, place, whole_numbers(x[2], f"offset in {name!r}"), whole_numbers(x[3], f"slice of {name!r}"), x[4]
    )
    dims = len(whole.shape)
    if len(found.offset) != dims or len(found.shape) != dims or 0 in found.shape:
        raise ValueError(f"a slice of {name!r} has other dims than its shape, or no elements")
    if any(a + n > size for a, n, size in zip(found.offset, found.shape, whole.shape, strict=True)):
        raise ValueError(f"a slice of {name!r} reaches over its end")
    if file >= len(files) or place < files[file].header or place + whole.nbytes(found) > files[file].nbytes:
        raise ValueError(f"a slice of {name!r} is outside of its file")
    return found


def _text(x: Any, form: re.Pattern[str]) -> bool:
    return isinstance(x, str) and form.fullmatch(x) is not None
