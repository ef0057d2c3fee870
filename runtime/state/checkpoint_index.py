"""Read and write a checkpoint's index, `index.json`: everything except the tensors' bytes.

    {"sha256": "of all bytes after this line",
    "format": "shardc checkpoint", "version": 3, "id": "5f0c...", "step": 6, "model": "GPT", "program": "9a1c...",
    "mesh": {"dp": 2, "tp": 2},
    "extra": {"step": 6, "seed": 0, "loss_scale": ..., "scheduler": ..., "loaders": ...},
    "optimizer": {"class": "AdamW", "groups": [...], "numbers": {...}},
    "files": [["model-00000.safetensors", 0, bytes in the file, bytes before its data, "sha256 of those"], ...],
    "tensors": {"model.up.weight": ["float32", [16, 8], [[file, first byte, [offset], [shape], "digest"], ...]], ...}}

It is read as untrusted input: only JSON, no unknown keys, no file outside of the folder. Every place, size and shape
must fit before anything is allocated.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, ValidationError
from torch import Tensor
from xxhash import xxh3_128

from shardc import text_file
from shardc.runtime.state.boxes import disjoint
from shardc.runtime.state.tensor_file import MAX_HEADER

NAME = "index.json"
KIND, VERSION = "shardc checkpoint", 3
MAX_BYTES = 4 << 30
#: The hash whose digest each slice has.
DIGEST = xxh3_128
FILE = r"(model|optimizer)-[0-9]{5,9}\.safetensors"
DTYPES: dict[str, torch.dtype] = {
    str(x).removeprefix("torch."): x
    for x in vars(torch).values()
    if isinstance(x, torch.dtype) and not str(x).startswith(("torch.q", "torch.bits"))
}


def _dtype(x: Any) -> torch.dtype:
    if not isinstance(x, str) or x not in DTYPES:
        raise ValueError(f"the dtype {x!r} is unknown")
    return DTYPES[x]


def check_optimizer(x: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of an optimizer. Raises ValueError if they are others."""
    groups, numbers = x.get("groups"), x.get("numbers")
    fits = x.keys() == {"class", "groups", "numbers"} and isinstance(x["class"], str)
    fits = fits and isinstance(groups, list) and all(isinstance(g, dict) for g in groups)
    fits = fits and isinstance(numbers, dict) and all(isinstance(each, dict) for each in numbers.values())
    params = [g.get("params") for g in groups or ()] if fits else []
    if not fits or not all(isinstance(p, list) and all(isinstance(n, str) for n in p) for p in params):
        raise ValueError("it is not {class, groups: [{params: [name, ...], ...}], numbers: {name: {...}}}")
    return x


Natural = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Sizes = Annotated[tuple[Natural, ...], Field(max_length=64)]
Dtype = Annotated[torch.dtype, PlainValidator(_dtype)]


class File(NamedTuple):
    """A file of tensors. rank: its writer; header: number of bytes before the data; sha256: of those."""

    name: Annotated[str, Field(pattern=f"^{FILE}$")]
    rank: Natural
    nbytes: Natural
    header: Annotated[Natural, Field(ge=8, le=MAX_HEADER + 8)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Slice(NamedTuple):
    """A box of a tensor, stored as one range of bytes. file: index of the file; start: first byte there.

    digest: XXH3 of its bytes, 128 bits, as fast as memory. It finds damage, not forgery: whoever can write a checkpoint
    can write its digests. Another digest needs another VERSION.
    """

    file: Natural
    start: Natural
    offset: Sizes
    shape: Annotated[tuple[Annotated[Natural, Field(ge=1)], ...], Field(max_length=64)]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class Stored(NamedTuple):
    """A tensor in a checkpoint, with its global shape and its slices."""

    dtype: Dtype
    shape: Sizes
    slices: tuple[Slice, ...] = ()

    def with_slices(self, more: Iterable[Slice]) -> Stored:
        return self._replace(slices=(*self.slices, *more))

    def nbytes(self, x: Slice) -> int:
        return math.prod(x.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Index:
    """The contents of a checkpoint. tensors: by name, "model.FQN" and "optimizer.FQN.STATE".

    id: of this save, in all of its files. program: a hash of the trained program.
    """

    id: str
    step: Natural
    model: str
    program: str
    mesh: dict[str, Annotated[int, Field(strict=True, ge=1)]]
    extra: dict[str, Any]
    optimizer: Annotated[dict[str, Any], AfterValidator(check_optimizer)] | None
    files: tuple[File, ...] = ()
    tensors: Mapping[str, Stored] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes - (0 if f.sha256 else f.header) for f in self.files)  # without digests: parts of files


# --- as text


def json_number(x: Any) -> Any:
    """Convert a numpy number, such as a learning rate, for JSON. Raises TypeError for all else."""
    if isinstance(x, np.generic):
        return x.item()
    raise TypeError(f"Object of type {type(x).__name__} is not JSON serializable")


_PAIRS = "pairs of a dict"  # JSON's keys are strings only


def plain(x: Any) -> Any:
    """Convert tensors, tuples and dicts inside a value to those of JSON."""
    if isinstance(x, Tensor):
        return x.tolist()
    if isinstance(x, Mapping):
        if all(isinstance(k, str) for k in x):
            return {k: plain(v) for k, v in x.items()}
        return {_PAIRS: [[plain(k), plain(v)] for k, v in x.items()]}
    return [plain(v) for v in x] if isinstance(x, (list, tuple)) else x


def like(now: Any, saved: Any) -> Any:
    """Convert what `plain` returned back to the types that a value has now: tensors, tuples, Counters."""
    if isinstance(now, Tensor):
        return torch.as_tensor(saved, dtype=now.dtype, device=now.device)
    if isinstance(saved, Mapping):
        if saved.keys() == {_PAIRS}:
            pairs = dict(saved[_PAIRS])
            kind: Any = type(now)
            return kind(pairs) if isinstance(now, Mapping) else pairs
        return {k: like(now.get(k) if isinstance(now, Mapping) else None, v) for k, v in saved.items()}
    if isinstance(saved, list):
        present = now if isinstance(now, (list, tuple)) and len(now) == len(saved) else [None] * len(saved)
        items = [like(a, b) for a, b in zip(present, saved, strict=True)]
        return tuple(items) if isinstance(now, tuple) else items
    return saved


def to_bytes(index: Index) -> bytes:
    """Return the bytes of the file. Raises TypeError, ValueError for values that JSON does not support."""
    facts = {"format": KIND, "version": VERSION, **vars(index)}
    lines = [f"{json.dumps(k)}: {json.dumps(x, default=json_number)}" for k, x in facts.items() if k != "tensors"]
    tensors = {n: (str(t.dtype).removeprefix("torch."), t.shape, t.slices) for n, t in index.tensors.items()}
    entries = [f"{json.dumps(k)}: {json.dumps(x)}" for k, x in tensors.items()]
    lines.append('"tensors": {' + ",\n".join(entries) + "}}\n")
    body = ",\n".join(lines).encode()
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def from_bytes(data: bytes) -> Index:
    """Parse the index in a file: values of the right types, whose sense `check` checks. Raises ValueError."""
    head, _, body = data.partition(b"\n")
    try:
        table = json.loads(data.decode(), object_pairs_hook=text_file.unique)
        if not isinstance(table, dict):
            raise ValueError("it is not a table")
        if table.get("format") != KIND:
            raise ValueError(f"it does not say that it is a {KIND!r}")
        if table.get("version") != VERSION:
            raise ValueError(f"it is of version {table.get('version')!r}, and this shardc reads {VERSION}")
        if head != b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",':
            raise ValueError("its SHA-256 differs from the one in its first line: it was cut off, damaged or edited")
        keys = {"sha256", "format", "version", *Index.__dataclass_fields__}
        if table.keys() != keys:
            raise ValueError(f"it has the keys {', '.join(map(repr, sorted(table)))}, and should have {sorted(keys)}")
        return _INDEX.validate_python({k: table[k] for k in Index.__dataclass_fields__})
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"it is not text: byte {e.start}") from None


_INDEX = TypeAdapter(Index)


def check_slices(index: Index) -> None:
    """Raise ValueError unless the slices of each tensor make it up."""
    for name, t in index.tensors.items():
        if sum(math.prod(s.shape) for s in t.slices) != math.prod(t.shape):
            raise ValueError(f"the slices of {name!r} do not cover it")
        for s in t.slices:
            if len(s.offset) != len(t.shape) or len(s.shape) != len(t.shape):
                raise ValueError(f"a slice of {name!r} has another number of dims than the tensor")
            if any(a + n > size for a, n, size in zip(s.offset, s.shape, t.shape, strict=True)):
                raise ValueError(f"a slice of {name!r} reaches beyond the tensor")
            if s.file >= len(index.files):
                raise ValueError(f"a slice of {name!r} is in no file")
        if not disjoint((s.offset, s.shape) for s in t.slices):
            raise ValueError(f"slices of {name!r} overlap and leave a part of it uncovered")


def check(index: Index) -> None:
    """Raise ValueError unless every byte is in one header or slice, and slices make up their tensors."""
    files, tensors = index.files, index.tensors
    if len({f.name for f in files}) != len(files):
        raise ValueError("a file occurs twice in files")
    check_slices(index)
    ends = [f.header for f in files]
    for file, place, nbytes in sorted((s.file, s.start, t.nbytes(s)) for t in tensors.values() for s in t.slices):
        if place != ends[file]:
            raise ValueError(f"slices of {files[file].name} overlap or leave a gap at byte {ends[file]}")
        ends[file] = place + nbytes
    for f, end in zip(files, ends, strict=True):
        if end != f.nbytes:
            raise ValueError(f"the slices of {f.name} end at byte {end}, and the file at {f.nbytes}")
