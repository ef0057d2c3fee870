"""Checkpoints of torch.distributed.checkpoint, in and out: what shardc wrote before it had a format of its own, and
what torch's tools and other libraries write and read.

    DIR/.metadata             a pickle: tensors as boxes, and where their bytes are
    DIR/__0_0.distcp ...      each box as a file of torch.save, one behind the other
    DIR/manifest.json         of shardc's own: the optimizer's settings, the caller's `extra`

`.metadata` is unpickled, which is what shardc's own format is for not to do. So a checkpoint is brought in by a process
of its own (`python -m shardc.runtime.state.torch_format OLD NEW`), and by an unpickler that finds nothing but the few
classes of which torch makes it. (torch's own, which reads the tensors, does not know the protocol of `.metadata`.)
"""

from __future__ import annotations

import functools
import io
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.state import disk_calls
from shardc.runtime.state.boxes import Piece, Plan
from shardc.runtime.state.checkpoint_folder import (
    DamagedError,
    check_file,
    damage,
    is_one,
    newest,
    read_index,
    read_whole,
)
from shardc.runtime.state.checkpoint_index import Slice, Stored
from shardc.runtime.state.saving import Saves

_FILE = re.compile(r"__\d+_\d+\.distcp")
_MAX_METADATA = 4 << 30
_MANIFEST_FORMAT = 1
_KEYS = ("model.", "optimizer.")


# --- in


def import_checkpoint(folder: Path, new: Path) -> str:
    """Convert a checkpoint of torch.distributed.checkpoint, in a process of its own. Gives what that process says.

    Raises ShardcError for what cannot be read, or is no such checkpoint.
    """
    command = [sys.executable, "-m", "shardc.runtime.state.torch_format", str(folder), str(new)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 2:
        (error, *_) = json.loads(done.stdout)
        raise ShardcError(error["what"], where=error["where"], fix=error["fix"])
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"])[-1]
        raise ShardcError(f"it cannot be read: {last}", where=str(folder), fix="see whether torch itself reads it")
    return done.stdout.strip()


def _import(folder: Path, new: Path) -> str:
    metadata = _read_metadata(folder / ".metadata")
    manifest = _read_manifest(folder / "manifest.json")
    names = {k: _name(k, manifest is not None) for k in metadata.state_dict_metadata}
    plan = Plan({}, {}, _facts(manifest))
    left = [k for k, n in names.items() if n is None]
    for key, name in names.items():
        entry = metadata.state_dict_metadata[key]
        if name is None or not isinstance(entry, TensorStorageMetadata):
            left += [key] if name is not None else []
            continue
        dtype, shape = entry.properties.dtype, tuple(entry.size)
        plan.tensors[name] = Stored(dtype, shape)
        for chunk in entry.chunks:
            if 0 not in chunk.sizes:
                info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
                read = functools.partial(_read_chunk, folder, info, key, tuple(chunk.sizes), dtype)
                plan.add(Piece(name, dtype, tuple(chunk.offsets), tuple(chunk.sizes), read))

    def work(mesh: LoopbackMesh) -> None:
        Saves(mesh).save(new, lambda: plan, step=int(plan.facts["extra"].get("step", 0)))

    loopback(Mesh.of({"dp": 1}), work)
    out = f"; left out, for no tensor of the model or its optimizer: {', '.join(left[:5])}" if left else ""
    return f"{len(plan.tensors)} tensors of {folder}{out}"


class _Unpickler(pickle.Unpickler):
    """Makes boxes, sizes and dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == (filesystem.__name__, "_StorageInfo"):
            return filesystem._StorageInfo
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda _: torch.strided
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath  # where it was written
        found = getattr(torch_metadata, name, None) if module == torch_metadata.__name__ else None
        if not isinstance(found, type) or found.__module__ != module:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return found


def _read_metadata(path: Path) -> Metadata:
    try:
        found = _Unpickler(io.BytesIO(disk_calls.read_file(path, _MAX_METADATA))).load()
    except FileNotFoundError:
        fix = "name a folder with .metadata and *.distcp files"
        raise ShardcError("there is no checkpoint of torch's in this folder", where=str(path.parent), fix=fix) from None
    except Exception as e:  # whatever a pickle that is none, or is a trap, makes the unpickler raise
        fix = "nothing in it was run; get the checkpoint from where it was made"
        raise ShardcError(f"it is not what torch writes: {str(e).splitlines()[0]}", where=str(path), fix=fix) from None
    if not isinstance(found, Metadata):
        raise ShardcError(f"it holds a {type(found).__name__}", where=str(path), fix="name a checkpoint of torch's")
    return found


def _read_manifest(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(disk_calls.read_file(path, _MAX_METADATA))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as e:
        raise ShardcError(
            f"it cannot be read: {e}", where=str(path), fix="leave it out to import tensors alone"
        ) from None
    if not isinstance(found, dict) or found.get("format") != _MANIFEST_FORMAT:
        raise ShardcError("it is no manifest of shardc's", where=str(path), fix="leave it out to import tensors alone")
    return found


def _facts(manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    found = manifest or {}
    return {
        "model": str(found.get("model", "")),
        "program": "",
        "mesh": dict(found.get("mesh", {})),
        "extra": {"step": 0, "seed": 0, **found.get("extra", {})},
        "optimizer": found.get("optimizer"),
    }


def _name(key: str, ours: bool) -> str | None:
    """The name of a tensor here. Other libraries' checkpoints have the model's tensors under `model.`, or as they are;
    how they name the optimizer's differs, and they are left out.
    """
    if key.startswith("model.") or (ours and key.startswith(_KEYS)):
        return key
    return None if ours or key.startswith(("optim", "scheduler", "extra")) else f"model.{key}"


def _read_chunk(folder: Path, info: Any, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    where = folder / str(info.relative_path)
    if not _FILE.fullmatch(str(info.relative_path)):
        fix = "the checkpoint is not to be trusted"
        raise ShardcError(f"{key} would be read from {str(info.relative_path)!r}", where=str(folder), fix=fix)
    try:
        with disk_calls.opened(where) as descriptor:
            data = bytearray(int(info.length) if 0 <= info.length <= where.stat().st_size else 0)
            disk_calls.read_into(descriptor, memoryview(data), int(info.offset))
        found = torch.load(io.BytesIO(bytes(data)), map_location="cpu", weights_only=True)
    except Exception as e:  # what torch.load raises for damaged files is of many kinds
        raise ShardcError(f"{key} cannot be read: {e}", where=str(where), fix="get the file again") from None
    if not isinstance(found, Tensor) or tuple(found.shape) != shape or found.dtype != dtype:
        raise ShardcError(f"{key} is not of the shape that .metadata says", where=str(where), fix="get the file again")
    return found.detach()


# --- out


class _Planner(DefaultSavePlanner):
    def __init__(self, read: Mapping[MetadataIndex, Callable[[], Tensor]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._read[index]()


def export_checkpoint(folder: Path, new: Path) -> str:
    """Write a checkpoint (the last one of a folder, or one of them) as torch.distributed.checkpoint has it, and
    manifest.json beside it. One slice is in memory at a time. Raises ShardcError for a damaged one.
    """
    path = folder if is_one(folder) else newest(folder)
    index = read_index(path)
    if new.exists() and any(new.iterdir()):
        raise ShardcError("the folder is not empty", where=str(new), fix="name a new one")
    for number in range(len(index.files)):
        check_file(path, index, number)
    items, read = [], dict[MetadataIndex, Callable[[], Tensor]]()
    for key, stored in index.tensors.items():
        properties, size = TensorProperties(dtype=stored.dtype), torch.Size(stored.shape)
        slices: list[Slice | None] = [*stored.slices]
        for found in slices or [None]:  # of an empty tensor there is none, but its name must be known
            offset, shape = (found.offset, found.shape) if found is not None else ((0,) * len(size), stored.shape)
            box = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
            at = MetadataIndex(key, box.offsets)
            items.append(WriteItem(at, WriteItemType.SHARD, tensor_data=TensorWriteData(box, properties, size)))
            name = index.files[found.file].name if found is not None else ""
            read[at] = functools.partial(_slice, path, name, key, stored, found)
    new.mkdir(parents=True, exist_ok=True)
    planner, writer = _Planner(read), FileSystemWriter(new)
    plan = SavePlan(items)
    (mine,) = writer.prepare_global_plan([plan])
    results = writer.write_data(mine, planner).wait()
    _, metadata = planner.create_global_plan([plan])
    writer.finish(metadata, [results])
    manifest = {"format": _MANIFEST_FORMAT, "model": index.model, "mesh": index.mesh, "extra": index.extra}
    manifest |= {"optimizer": index.optimizer} if index.optimizer is not None else {}
    disk_calls.write_file(new / "manifest.json", json.dumps(manifest, indent=2).encode() + b"\n")
    return f"{len(index.tensors)} tensors of {path}"


def _slice(path: Path, name: str, key: str, stored: Stored, s: Slice | None) -> Tensor:
    if s is None:
        return torch.empty(stored.shape, dtype=stored.dtype)
    with disk_calls.opened(path / name) as descriptor:
        found = read_whole(descriptor, stored, s)
    if found is None:
        raise damage(path / name, key, s)
    return found


def main(folder: str, new: str) -> int:
    try:
        print(_import(Path(folder), Path(new)))
    except (ShardcError, DamagedError) as e:
        print(json.dumps(e.to_json()))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
