"""Files of tensors: what is written is what safetensors reads, what safetensors writes is read by parts, and what is
damaged is refused before anything is allocated."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardc.errors import ShardcError
from shardc.runtime.state.tensor_file import DTYPES, bytes_of, header, open_safetensors, stored_as
from shardc.runtime.storage import disk_calls


def tensors() -> dict[str, torch.Tensor]:
    return {
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "wide": torch.arange(60.0).view(3, 4, 5).bfloat16(),
        "flag": torch.tensor([True, False]),
        "complex": torch.randn(4, dtype=torch.complex64),
        "é": torch.arange(5, dtype=torch.int16),
    }


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    given = tensors()
    data, starts = header([(n, x.dtype, tuple(x.shape)) for n, x in given.items()], {"k": "v"})
    descriptor = disk_calls.create(tmp_path / "f")
    disk_calls.write(descriptor, memoryview(data), 0)
    for x, start in zip(given.values(), starts, strict=False):
        disk_calls.write(descriptor, bytes_of(x), start)
    os.close(descriptor)
    found = load_file(tmp_path / "f")
    assert all(torch.equal(found[n], x) for n, x in given.items())
    assert open_safetensors(tmp_path / "f").metadata() == {"format": "pt", "k": "v"}


def test_every_dtype_has_a_form() -> None:
    assert all(stored_as(dtype, (2,)) == (dtype, (2,)) for dtype in DTYPES.values())
    assert stored_as(torch.complex128, (2,)) == (torch.uint8, (2, 16))


def _file(path: Path, head: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "head",
    [
        b"{",
        b"[]",
        b'{"a": {}, "a": {}}',
        b"[" * 100_000,
        {"a": {**ONE, "dtype": "F33"}},
        {"a": {**ONE, "shape": [3]}},
        {"a": {**ONE, "shape": [-2]}},
        {"a": {**ONE, "shape": [2.0]}},
        {"a": {**ONE, "shape": [2**62, 2**62]}},
        {"a": {**ONE, "data_offsets": [8, 16]}},
        {"a": ONE, "b": ONE},
        {"a": ONE, "b": {**ONE, "data_offsets": [8, 16]}},
        {"__metadata__": {"a": 1}, "a": ONE},
    ],
)
def test_headers_that_do_not_fit_are_refused(head: Any, tmp_path: Path) -> None:
    with pytest.raises(ShardcError, match="the file cannot be read"):
        open_safetensors(_file(tmp_path / "f", head, bytes(8)))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ShardcError, match="the file cannot be read"):
            open_safetensors(path)
    for text, length in ((b"{}", 2**63), (b"{}", 50), (b"", 0)):
        with pytest.raises(ShardcError, match="file cannot be read"):
            open_safetensors(_file(tmp_path / "f", text, length=length))
    (tmp_path / "f").write_bytes(b"abc")
    with pytest.raises(ShardcError, match="file cannot be read"):
        open_safetensors(tmp_path / "f")


@pytest.mark.parametrize("cached", [False, True])
def test_a_stream_writes_all_bytes_where_they_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, cached: bool
) -> None:
    """Small pieces, large ones, aligned ones and not, past the system's cache and through it; it fills no page at the
    end."""
    if cached:
        monkeypatch.setattr(disk_calls, "_DIRECT", 0)
    monkeypatch.setattr(disk_calls, "BUFFER", 2 * disk_calls.PAGE)
    real, straight = disk_calls.write, []

    def write(descriptor: int, data: memoryview, place: int) -> None:
        straight.append(len(data))
        real(descriptor, data, place)

    monkeypatch.setattr(disk_calls, "write", write)
    whole, sizes = torch.randint(256, (101_003,), dtype=torch.uint8), (8, 5, 40_000, 4096, 1, 3, 50_000, 6889, 1)
    lies = disk_calls.aligned(whole.numel(), 0).copy_(whole)
    for source in (whole, lies):
        straight.clear()
        file, place = disk_calls.Stream(tmp_path / str(source.data_ptr())), 0
        for n in sizes:
            file.add(bytes_of(source[place : place + n]))
            place += n
        file.finish()
        file.close()
        assert (tmp_path / str(source.data_ptr())).read_bytes() == bytes_of(whole)
    assert max(straight) > 40_000  # what lies as in the file was not copied


def test_a_stream_goes_through_the_cache_where_it_cannot_pass_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that promises it, and then refuses; other errors are errors."""
    real, refused = disk_calls.write, []

    def write(descriptor: int, data: memoryview, place: int) -> None:
        if not refused:
            refused.append(place)
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor, data, place)

    monkeypatch.setattr(disk_calls, "write", write)
    data = os.urandom(3 * disk_calls.BUFFER + 7)
    file = disk_calls.Stream(tmp_path / "f")
    file.add(memoryview(data))
    file.finish()
    file.close()
    assert (tmp_path / "f").read_bytes() == data
    assert refused == [0]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_calls, "write", full)
    file = disk_calls.Stream(tmp_path / "g")
    with pytest.raises(OSError, match="No space left"):
        file.add(memoryview(data))
    file.close()
