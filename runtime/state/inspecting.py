"""What can be said of checkpoints without a program: whether they are whole, and in what two of them differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.runtime.state import disk_calls
from shardc.runtime.state.boxes import disjoint
from shardc.runtime.state.checked_slices import damage, read_box, read_whole
from shardc.runtime.state.checkpoint_folder import DamagedError, check_file, read_index
from shardc.runtime.state.checkpoint_index import Index, Slice, Stored


def verify(path: Path) -> Iterator[ShardcError]:
    """All that is wrong with one checkpoint. Every byte is read, a slice at a time."""
    try:
        index = read_index(path)
    except DamagedError as e:
        yield e
        return
    for key, stored in index.tensors.items():
        if not disjoint((s.offset, s.shape) for s in stored.slices):
            yield DamagedError(f"slices of {key} overlap, and others are missing", where=str(path))
    of_file: dict[int, list[tuple[str, Slice]]] = {}
    for key, stored in index.tensors.items():
        for s in stored.slices:
            of_file.setdefault(s.file, []).append((key, s))
    for number, file in enumerate(index.files):
        try:
            check_file(path, index, number)
        except DamagedError as e:
            yield e
            if not (path / file.name).is_file():
                continue
        with disk_calls.opened(path / file.name) as descriptor:
            for key, s in sorted(of_file.get(number, []), key=lambda x: x[1].place):
                if read_whole(descriptor, index.tensors[key], s) is None:
                    yield damage(path / file.name, key, s)


@dataclass(frozen=True)
class Difference:
    """Something that two checkpoints do not have alike. a, b: what each has; "" for what it lacks."""

    what: str
    a: str
    b: str


def diff(a: Path, b: Path) -> Iterator[Difference]:
    """In what two checkpoints differ: tensors, however they are cut, and numbers. Raises DamagedError."""
    first, second = read_index(a), read_index(b)
    for name in ("step", "model", "program", "mesh"):
        x, y = getattr(first, name), getattr(second, name)
        if x != y:
            yield Difference(name, str(x), str(y))
    yield from _values("extra", first.extra, second.extra)
    yield from _values("optimizer", first.optimizer or {}, second.optimizer or {})
    for key in sorted(first.tensors.keys() | second.tensors.keys()):
        x, y = first.tensors.get(key), second.tensors.get(key)
        if x is None or y is None or (x.dtype, x.shape) != (y.dtype, y.shape):
            yield Difference(key, _form(x), _form(y))
        elif _cut(x) != _cut(y):
            count, most = _compare(a, first, b, second, key)
            if count:
                text = f"{count} of its numbers differ" + (f", by {most:.3g} at most" if most is not None else "")
                yield Difference(key, text, text)


def _values(name: str, x: Any, y: Any) -> Iterator[Difference]:
    if isinstance(x, dict) and isinstance(y, dict):
        for k in sorted(x.keys() | y.keys()):
            yield from _values(f"{name}.{k}", x.get(k), y.get(k))
    elif repr(x) != repr(y):  # nan is nan
        yield Difference(name, "" if x is None else str(x), "" if y is None else str(y))


def _form(x: Stored | None) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if x is not None else ""


def _cut(x: Stored) -> set[Any]:
    return {(s.offset, s.shape, s.digest) for s in x.slices}


def _compare(a: Path, first: Index, b: Path, second: Index, key: str) -> tuple[int, float | None]:
    """How many numbers of a tensor differ, and by how much; None where one is nan."""
    stored, count, most = first.tensors[key], 0, 0.0
    for s in stored.slices:
        file = a / first.files[s.file].name
        with disk_calls.opened(file) as descriptor:
            x = read_whole(descriptor, stored, s)
        if x is None:
            raise damage(file, key, s)
        y = read_box(b, second, key, s.offset, s.shape)
        differ = (_bytes(x) != _bytes(y)).any(-1)
        count += int(differ.sum())
        if differ.any():
            wide = torch.complex128 if x.dtype.is_complex else torch.float64
            most = max(most, float((x.to(wide) - y.to(wide)).abs().max()))
    return count, most if most == most else None


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8).view(x.numel(), x.dtype.itemsize)
