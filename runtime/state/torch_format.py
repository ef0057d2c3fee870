"""Convert checkpoints of torch.distributed.checkpoint, from and to shardc's format.

shardc wrote that format before, and torch's tools and other libraries use it.

    DIR/.metadata             a pickle: tensors as boxes, and where their bytes are
    DIR/__0_0.distcp ...      each box as a file of torch.save, one after the other
    DIR/manifest.json         of shardc: the optimizer's settings, the caller's `extra`

`.metadata` must be unpickled, which shardc's own format avoids. So only `shardc checkpoint import` does it, a process
of its own, with an unpickler that only finds the few classes that torch uses. torch's own code reads and writes the
rest, one tensor at a time.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.storage import disk_calls
from shardc.runtime.state.boxes import Box
from shardc.runtime.state.checkpoint_folder import check_files, read_box, read_index
from shardc.runtime.state.checkpoint_index import Index
from shardc.runtime.state.saving import Plan, Saves

_FILE = re.compile(r"__\d+_\d+\.distcp")
_MAX_METADATA = 4 << 30
_MANIFEST_FORMAT = 1
_KEYS = ("model.", "optimizer.")


# --- in


def import_checkpoint(folder: Path, new: Path) -> str:
    """Convert a checkpoint of torch.distributed.checkpoint; return a line about it.

    Raises ShardcError if it cannot be read, or is no such checkpoint.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there are no other ranks
            return _import(folder, new)
    except (ShardcError, OSError):
        raise
    except Exception as e:  # a malformed file can raise any error in torch
        fix = "check whether torch itself reads it"
        raise ShardcError(f"it cannot be read: {type(e).__name__}: {e}", where=str(folder), fix=fix) from e


def _import(folder: Path, new: Path) -> str:
    metadata, manifest = _read_metadata(folder / ".metadata"), _read_manifest(folder / "manifest.json")
    for info in metadata.storage_data.values():
        file = folder / str(info.relative_path)
        if not _FILE.fullmatch(str(info.relative_path)) or file.is_symlink() or not file.is_file():
            fix = "the checkpoint is not complete, or not to be trusted"
            fault = f"the checkpoint names a file that torch does not write: {str(info.relative_path)!r}"
            raise ShardcError(fault, where=str(folder), fix=fix)
    reader = FileSystemReader(folder)
    reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]

    @functools.lru_cache(maxsize=1)  # a tensor is written slice by slice
    def read(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype)
        load({key: x}, storage_reader=reader, no_dist=True)
        return x

    plan, stored = Plan(_facts(manifest)), metadata.state_dict_metadata
    tensors = {key: x for key, x in stored.items() if isinstance(x, TensorStorageMetadata)}
    names = _names(tensors, ours=manifest is not None)
    left = [key for key in stored if key not in names]
    for key, name in names.items():
        entry = tensors[key]
        dtype, shape = entry.properties.dtype, tuple(entry.size)
        boxes = [Box.alone((0,) * len(shape), shape)] if 0 not in shape else []
        plan.add(name, dtype, shape, boxes, functools.partial(read, key, shape, dtype))
    loopback(Mesh.of({"dp": 1}), lambda mesh: Saves(mesh).save(new, lambda: plan))
    out = f"; left out, as they are not tensors of the model or its optimizer: {', '.join(left[:5])}" if left else ""
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
            return PurePosixPath  # a path on the machine that wrote it
        kind = getattr(torch_metadata, name, None) if module == torch_metadata.__name__ else None
        if not isinstance(kind, type) or kind.__module__ != module:
            raise pickle.UnpicklingError(f"it needs {module}.{name}")
        return kind


def _read_metadata(path: Path) -> Metadata:
    try:
        metadata = _Unpickler(io.BytesIO(disk_calls.read_file(path, _MAX_METADATA))).load()
    except FileNotFoundError:
        fix = "name a folder with .metadata and *.distcp files"
        raise ShardcError("this folder has no checkpoint of torch", where=str(path.parent), fix=fix) from None
    except Exception as e:  # a malformed or malicious pickle can raise any error
        fix = "nothing in it was run; copy the checkpoint again from its source"
        raise ShardcError(f"it is not a file of torch: {str(e).splitlines()[0]}", where=str(path), fix=fix) from None
    if not isinstance(metadata, Metadata):
        fault = f"it is a pickle of a {type(metadata).__name__}, not torch's Metadata"
        raise ShardcError(fault, where=str(path), fix="name a checkpoint of torch")
    return metadata


def _read_manifest(path: Path) -> dict[str, Any] | None:
    fix = "leave it out to import only tensors"
    try:
        manifest = json.loads(disk_calls.read_file(path, _MAX_METADATA))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as e:
        raise ShardcError(f"it cannot be read: {e}", where=str(path), fix=fix) from None
    if not isinstance(manifest, dict) or manifest.get("format") != _MANIFEST_FORMAT:
        raise ShardcError("it is not a manifest of shardc", where=str(path), fix=fix)
    return manifest


def _facts(manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    table = manifest or {}
    facts = {"model": str(table.get("model", "")), "program": "", "mesh": dict(table.get("mesh", {}))}
    return {**facts, "extra": {"step": 0, "seed": 0, **table.get("extra", {})}, "optimizer": table.get("optimizer")}


def _names(keys: Iterable[str], *, ours: bool) -> dict[str, str]:
    """Return the names of tensors here, by key; other libraries' optimizer state, whose names differ, is left out."""
    if ours:
        return {key: key for key in keys if key.startswith(_KEYS)}
    model = [key for key in keys if not key.startswith(("optim", "scheduler", "extra"))]
    # a model's own names may begin so too (`model.embed_tokens`), but not all of them (`lm_head`)
    inside = all(key.startswith("model.") for key in model)
    return {key: key if inside else f"model.{key}" for key in model}


# --- out


class _Planner(DefaultSavePlanner):
    """Reads a tensor when it is written. Names and shapes are known before."""

    def __init__(self, path: Path, index: Index) -> None:
        super().__init__()
        self._path, self._index = path, index

    def lookup_object(self, index: MetadataIndex) -> Any:
        shape = self._index.tensors[index.fqn].shape
        return read_box(self._path, self._index, index.fqn, (0,) * len(shape), shape)


def export_checkpoint(path: Path, new: Path) -> str:
    """Write a checkpoint in the format of torch.distributed.checkpoint, with manifest.json beside it.

    One tensor is in memory at a time. Raises ShardcError for a damaged checkpoint.
    """
    index = read_index(path)
    if new.exists() and any(new.iterdir()):
        raise ShardcError("the folder is not empty", where=str(new), fix="name a new one")
    check_files(path, index)
    forms = {key: torch.empty(x.shape, dtype=x.dtype, device="meta") for key, x in index.tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there are no other ranks
        save(forms, storage_writer=FileSystemWriter(new), planner=_Planner(path, index), no_dist=True)
    manifest = {"format": _MANIFEST_FORMAT, "model": index.model, "mesh": index.mesh, "extra": index.extra}
    manifest |= {"optimizer": index.optimizer} if index.optimizer is not None else {}
    disk_calls.write_file(new / "manifest.json", json.dumps(manifest, indent=2).encode() + b"\n")
    return f"{len(index.tensors)} tensors of {path}"
