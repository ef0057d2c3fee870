"""Files of tensors: what is written is what safetensors reads, what safetensors writes is read by parts, and what is
damaged is refused before anything is allocated."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardc.errors import ShardcError
from shardc.runtime.state import disk_calls
from shardc.runtime.state.digest import BLOCK, Digest, digest
from shardc.runtime.state.tensor_file import DTYPES, Entry, TensorFile, bytes_of, header, stored_as


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
    data, entries = header([Entry(n, x.dtype, tuple(x.shape)) for n, x in given.items()], {"k": "v"})
    descriptor = disk_calls.create(tmp_path / "f")
    disk_calls.write(descriptor, memoryview(data), 0)
    for e in entries:
        disk_calls.write(descriptor, bytes_of(given[e.name]), e.start)
    os.close(descriptor)
    found = load_file(tmp_path / "f")
    assert all(torch.equal(found[n], x) for n, x in given.items())
    assert TensorFile(tmp_path / "f").metadata == {"format": "pt", "k": "v"}


def test_parts_are_read(tmp_path: Path) -> None:
    given = tensors()
    save_file(given, tmp_path / "f")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    file = TensorFile(tmp_path / "link")
    assert all(torch.equal(file.read(n), x) for n, x in given.items())
    assert torch.equal(file.read("wide", [(1, 2), (0, 3), (4, 1)]), given["wide"][1:3, 0:3, 4:5])
    assert torch.equal(file.read("é", [(2, 2)]), given["é"][2:4])
    assert file.read("none", [(0, 0), (1, 1)]).shape == (0, 1)


def test_every_dtype_has_a_form() -> None:
    assert all(stored_as(dtype, (2,)) == (dtype, (2,)) for dtype in DTYPES.values())
    assert stored_as(torch.complex128, (2,)) == (torch.uint8, (2, 16))


def _file(path: Path, head: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (b"{", "the file's header cannot be read"),
        (b"[]", "it is not a table"),
        (b'{"a": {}, "a": {}}', "a key stands twice"),
        (b"[" * 100_000, "the file's header cannot be read"),
        ({"a": {**ONE, "more": 1}}, "'a' is not described by dtype, shape and data_offsets"),
        ({"a": {**ONE, "dtype": "F33"}}, "the dtype of 'a' is unknown"),
        ({"a": {**ONE, "shape": [3]}}, "'a' has 8 bytes, and its shape 12"),
        ({"a": {**ONE, "shape": [-2]}}, "the shape of 'a' is no list of whole numbers"),
        ({"a": {**ONE, "shape": [2.0]}}, "no list of whole numbers"),
        ({"a": {**ONE, "shape": [2**62, 2**62]}}, "'a' has 8 bytes"),
        ({"a": {**ONE, "data_offsets": [8, 16]}}, "'a' begins at byte"),
        ({"a": ONE, "b": ONE}, "'b' begins at byte"),
        ({"a": ONE, "b": {**ONE, "data_offsets": [8, 16]}}, "its tensors end at byte"),
        ({"__metadata__": {"a": 1}, "a": ONE}, "__metadata__ is not a table of texts"),
    ],
)
def test_headers_that_do_not_fit_are_refused(head: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ShardcError, match=text):
        TensorFile(_file(tmp_path / "f", head, bytes(8)))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ShardcError, match="the file cannot be read"):
            TensorFile(path)
    for text, length in ((b"{}", 2**63), (b"{}", 50), (b"", 0)):
        with pytest.raises(ShardcError, match="header cannot be read"):
            TensorFile(_file(tmp_path / "f", text, length=length))
    (tmp_path / "f").write_bytes(b"abc")
    with pytest.raises(ShardcError, match="header cannot be read"):
        TensorFile(tmp_path / "f")


def test_digest_sees_every_bit_and_every_place() -> None:
    data = bytearray(os.urandom(2 * BLOCK + 3 * 8192 + 1003))
    whole = digest(memoryview(data))
    parts = Digest()
    for start, stop in ((0, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, len(data))):
        parts.add(memoryview(data)[start:stop])
    assert parts.text() == whole
    for bit in range(0, 8 * len(data), 20011):
        data[bit // 8] ^= 1 << bit % 8
        assert digest(memoryview(data)) != whole
        data[bit // 8] ^= 1 << bit % 8
    for size in (8, 8192, BLOCK):  # words of a row, rows, blocks
        swapped = data[size : 2 * size] + data[:size] + data[2 * size :]
        assert digest(memoryview(swapped)) != whole
    for other in (data + b"\0", data[:-1], data[: 2 * BLOCK], bytes(BLOCK) + data[BLOCK:]):
        assert digest(memoryview(other)) != whole
    zeros = {digest(memoryview(bytes(n))) for n in (0, 1, 8, 8191, 8192, 16384, BLOCK, 2 * BLOCK)}
    assert len(zeros) == 8
