"""Checkpoints and weights in a store: as on a disk, after a fault at any call too."""

from __future__ import annotations

import errno
import functools
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from safetensors.torch import save_file
from typer.testing import CliRunner

from shardc.cli import app
from shardc.cli.common import check_outputs
from shardc.cli.run import _settings
from shardc.errors import ShardcError
from shardc.runtime.state import checkpoint_folder
from shardc.runtime.state.weight_files import open_weights
from shardc.runtime.storage import disk_calls
from shardc.runtime.storage.urls import Url, expanded
from shardc.spec import Run
from tests.runtime.state import faults


class Bucket(MemoryFileSystem):  # type: ignore[misc]
    """A store as s3 is: an object appears when its upload ends; nothing is renamed; bytes read are counted."""

    protocol = "bucket"
    store: dict[str, Any] = {}  # noqa: RUF012 (fsspec's)
    fault: StoreFault | None = None
    read = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).removeprefix("bucket://").strip("/")

    def mv(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a store renames nothing")

    cp_file = copy = rename = move = mv

    def makedirs(self, *_: Any, **__: Any) -> None:
        pass

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        data: bytes = super().cat_file(path, start, end, **options)
        Bucket.read += len(data)
        return data

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        path = self._strip_protocol(path)
        _changing("put", lambda: self.store.__setitem__(path, MemoryFile(self, path, value)))

    def rm_file(self, path: str) -> None:
        _changing("remove", lambda: super(Bucket, self).rm_file(path))

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        if not (inside := self.find(path)):
            raise FileNotFoundError(path)
        for each in inside:
            self.rm_file(each)

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return _Upload(self, path) if mode == "wb" else super().open(path, mode)


class _Upload(io.BytesIO):
    def __init__(self, store: Bucket, path: str) -> None:
        super().__init__()
        self._store, self._path = store, path

    def write(self, data: Any) -> int:
        _changing("part", lambda: None)
        return super().write(data)

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._store.pipe_file(self._path, data)

    def discard(self) -> None:
        super().close()


class StoreFault(faults.Fault):
    """A fault, in its `with`, at a call that changes the store. after: the call is done, and the answer is lost."""

    def __init__(self, at: int, error: int | None, *, after: bool = False, **more: Any) -> None:
        super().__init__(at, error, **more)
        self.after = after

    def __enter__(self) -> StoreFault:
        Bucket.fault = self
        return self

    def __exit__(self, *_: object) -> None:
        Bucket.fault = None

    def call(self, name: str, work: Any) -> None:
        self.check(name, lambda: self.after and work())
        work()


def _changing(name: str, work: Any) -> None:
    Bucket.fault.call(name, work) if Bucket.fault is not None else work()


@pytest.fixture
def bucket() -> Iterator[Url]:
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    Bucket.store.clear()
    folder = expanded("bucket://b/run/checkpoint")
    assert isinstance(folder, Url)
    yield folder
    Bucket.store.clear()


def invoke(*args: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == status, result.output
    return result.output


# --- paths


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("s3://b/x", "s3://b/x"),
        (Path("s3://b/x"), "s3://b/x"),  # pathlib makes one slash of two, as an option of a command does
        ("gs://b/x/y", "gs://b/x/y"),
        ("file:///tmp/x", "/tmp/x"),
        (Path("file:///tmp/x"), "/tmp/x"),
        ("a:/b", "a:/b"),
        ("runs/a", "runs/a"),
    ],
)
def test_a_path_is_a_url_if_it_begins_as_one(written: Any, meant: str) -> None:
    path = expanded(written)
    assert str(path) == meant
    assert isinstance(path, Url) == ("://" in meant)
    assert str(path / "k" / "..") == f"{meant}/k/.."


def test_a_local_folder_with_such_a_name_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:").mkdir()
    assert not isinstance(expanded("s3:/x"), Url)


def test_a_url_is_never_a_local_folder(bucket: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for work in (lambda: os.makedirs(bucket), lambda: os.open(bucket, os.O_CREAT), lambda: os.listdir(bucket)):
        with pytest.raises(ShardcError, match="this needs a folder of this machine"):
            work()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("named", "fault"),
    [("nope://a/b", "Protocol not known: nope"), ("gs://a/b", "Please install gcsfs"), ("bucket://full/x", "No space")],
)
def test_a_store_that_cannot_be_written_is_an_error_before_anything_runs(bucket: Url, named: str, fault: str) -> None:
    if named.startswith("gs:"):
        pytest.importorskip("fsspec")
        if fsspec.utils.get_package_version_without_import("gcsfs"):
            pytest.skip("gcsfs is installed")
    with StoreFault(0, errno.ENOSPC), pytest.raises(ShardcError, match=fault):
        check_outputs(folders={"--save": expanded(named)})


def test_memory_of_another_process_keeps_nothing() -> None:
    with pytest.raises(ShardcError, match="memory ends with its process"):
        check_outputs(folders={"--save": expanded("memory://a")})


def test_logs_are_files_of_this_machine(bucket: Url) -> None:
    with pytest.raises(ShardcError, match="this needs a folder of this machine"):
        check_outputs(folders={"--log": bucket})


def test_settings_keep_both_slashes() -> None:
    assert _settings(Run(save="s3:/b/x")).save == "s3://b/x"


# --- checkpoints


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}])
def test_a_checkpoint_in_a_store_is_that_of_a_disk(bucket: Url, tmp_path: Path, mesh: dict[str, int]) -> None:
    for step in (1, 2, 3):
        for folder in (tmp_path, bucket):
            assert not any(faults.save(folder, step, mesh, wait=step != 2))
    assert faults.load(bucket) == faults.load(tmp_path)
    assert [g.path.name for g in checkpoint_folder.generations(bucket)] == ["step-000003", "step-000002"]
    names = sorted(disk_calls.names(bucket / "step-000003"))
    assert names == sorted(os.listdir(tmp_path / "step-000003"))
    for name in names:
        if name != "index.json":  # has the save's id
            size = {len((at / "step-000003" / name).read_bytes()) for at in (bucket, tmp_path)}
            assert len(size) == 1
    assert not list(checkpoint_folder.diff(bucket / "step-000003", tmp_path / "step-000003"))


def test_training_that_went_back_sets_later_checkpoints_aside(bucket: Url) -> None:
    for step in (1, 3, 2):
        assert not any(faults.save(bucket, step, keep=3))
    listed = [(g.path.name, g.replaced) for g in checkpoint_folder.generations(bucket)]
    assert listed == [("step-000002", False), ("step-000001", False), ("step-000003", True)]
    assert "'step': 2" in faults.load(bucket)["extra"]
    assert not any(faults.save(bucket, 3, keep=1))
    assert disk_calls.names(bucket) == ["step-000003.2"]
    assert not any(faults.save(bucket, 4, keep=2))
    assert sorted(disk_calls.names(bucket)) == ["step-000003.2", "step-000004"]


def test_damage_is_named(bucket: Url) -> None:
    faults.save(bucket, 1)
    faults.save(bucket, 2)
    at = bucket / "step-000002" / "model-00000.safetensors"
    data = bytearray(at.read_bytes())
    data[-1] ^= 1
    at.write_bytes(data)
    assert "model-00000.safetensors" in str(*checkpoint_folder.verify(bucket / "step-000002"))
    with pytest.raises(checkpoint_folder.DamagedError, match="step-000001 is complete"):
        faults.load(bucket)
    assert "'step': 1" in faults.load(bucket, last_good=True)["extra"]
    at.unlink()
    assert "the file is missing" in str(*checkpoint_folder.verify(bucket / "step-000002"))


@functools.cache
def _calls() -> int:
    return faults.calls_of_a_save(expanded("bucket://count/c"), StoreFault)


KINDS: dict[str, dict[str, Any]] = {
    "crash": {"error": None},
    "crash after the call": {"error": None, "after": True},
    "no store": {"error": errno.ENETUNREACH},
    "one error": {"error": errno.EIO, "for_good": False},
    "one answer lost": {"error": errno.ETIMEDOUT, "for_good": False, "after": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_call_leaves_the_old_or_the_new_checkpoint(bucket: Url, kind: str, tmp_path: Path) -> None:
    states = []
    for step in (2, 3):
        faults.save(tmp_path / str(step), step)
        states.append(faults.load(tmp_path / str(step)))
    results = []
    kinds = list(KINDS)
    for at in range(kinds.index(kind), _calls(), 1 if os.environ.get("SHARDC_ALL_FAULTS") else 2 * len(kinds)):
        Bucket.store.clear()
        results.append(faults.try_fault(bucket, StoreFault(at, **KINDS[kind]), *states))
        left = [n for n in disk_calls.names(bucket) if not (bucket / n / "index.json").exists()]
        assert not left, (at, left)
    assert {"old", "new"} >= set(results)


def test_commands_take_urls(bucket: Url, tmp_path: Path) -> None:
    for step in (1, 2):
        faults.save(bucket, step)
    run = str(bucket.parent)
    assert "step-000002" in invoke("checkpoint", "ls", run)
    assert invoke("checkpoint", "verify", run).count("whole") == 2
    assert "step: 1" in invoke("checkpoint", "diff", f"{run}/checkpoint/step-000001", run, status=1)
    assert "tensors of bucket://b/run" in invoke("checkpoint", "export", run, str(tmp_path / "out"))
    assert "removed bucket://b/run/checkpoint/step-000001" in invoke("checkpoint", "prune", run, "--keep", "1")
    assert "there is no checkpoint in this folder" in invoke("checkpoint", "ls", "bucket://b/other", status=2)


# --- weights


def test_weights_in_a_store_are_read_by_ranges(bucket: Url, tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(24000.0).view(200, 120),
        "b": torch.randn(7, 3, dtype=torch.bfloat16),
        "s": torch.tensor(3.0),
        "e": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (bucket / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    for named in (bucket, bucket / "model.safetensors"):
        files = open_weights(str(named))
        assert {n: x.tensor().tolist() for n, x in files.tensors.items()} == {n: x.tolist() for n, x in tensors.items()}
    before = Bucket.read
    part = files.tensors["a"].read((10, 20), (5, 30))
    assert torch.equal(part, tensors["a"][10:15, 20:50])
    assert Bucket.read - before == 5 * 120 * 4  # the rows, and no others


@pytest.mark.parametrize("end", [4, 40, 200, -1])
def test_a_truncated_file_in_a_store_is_named(bucket: Url, tmp_path: Path, end: int) -> None:
    save_file({"a": torch.ones(50)}, tmp_path / "x.safetensors")
    (bucket / "x.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:end])
    with pytest.raises(ShardcError, match="the file cannot be read"):
        open_weights(bucket / "x.safetensors")


def test_weights_of_a_checkpoint_in_a_store(bucket: Url) -> None:
    faults.save(bucket, 1)
    files = open_weights(bucket.parent)
    assert files.tensors.keys() >= {n for n, _ in faults.whole().named_parameters()}


def test_torch_files_in_a_store_are_refused(bucket: Url) -> None:
    (bucket / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ShardcError, match=r"only \.safetensors files and checkpoints are read from a store"):
        open_weights(bucket)


def test_what_a_run_was_resumed_from_stays_in_a_store(bucket: Url) -> None:
    """pytorch-lightning#21813: the run that went on removed it before it had saved anything of its own."""
    assert not any(faults.save(bucket, 1, keep=1))
    other = bucket.parent / "other"
    assert not any(faults.save(other, 2, keep=1))
    assert disk_calls.names(bucket) == ["step-000001"]
    with StoreFault(0, errno.EIO):
        assert any(faults.save(bucket, 2, keep=1))
    assert [g.path.name for g in checkpoint_folder.generations(bucket)] == ["step-000001"]
    assert "'step': 1" in faults.load(bucket)["extra"]
