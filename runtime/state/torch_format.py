"""Read a folder of torch.distributed.checkpoint, as FSDP2, torchtitan, Lightning and accelerate write it.

    DIR/.metadata             a pickle: tensors as boxes, and where their bytes are
    DIR/__0_0.distcp ...      each box as a file of torch.save, one after the other
    DIR/manifest.json         of shardc (`checkpoint export`): the optimizer's settings, the caller's `extra`

It becomes the `Index` of a checkpoint, whose slices are these boxes: what reads checkpoints reads it too, and a rank
reads the rows that it needs. `.metadata` is unpickled by an unpickler that only makes the few classes that torch uses;
the rest is read with weights_only=True. Keys become names:

    up.weight, model.up.weight, app.model.up.weight         model.up.weight
    optimizer.state.up.weight.exp_avg                       optimizer.up.weight.exp_avg
    optimizer.param_groups, .param_groups.up.weight.lr      the optimizer's settings
    train_state.step, or the step of the optimizer          the step
    lr_scheduler, dataloader, ...                           left out
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardc.errors import ShardcError
from shardc.runtime.state.boxes import Numbers
from shardc.runtime.state.checkpoint_index import File, Index, Slice, Stored, check_slices, plain
from shardc.runtime.storage import disk_calls
from shardc.torch_private import FakeTensorMode

METADATA, MANIFEST, MANIFEST_FORMAT = ".metadata", "manifest.json", 1
#: The `id` of an index that was made from such a folder.
ID = "torch.distributed.checkpoint"
_FILE = re.compile(r"__\d+_\d+\.distcp")
_LARGEST = 4 << 30
_KEYS = ("model.", "optimizer.")
_STATE = re.compile(r"(?:[\w.]*\.)??optim\w*\.state\.(.+)\.([^.]+)")
_GROUPS = re.compile(r"(?:[\w.]*\.)??optim\w*\.param_groups(?:\.(.+)\.([^.]+))?")
_STEP = re.compile(r"(?:[\w.]*\.)??(?:train_state\.)?(?:global_)?step")
_OTHER = re.compile(r"(optim|(lr_)?scheduler|train_state|data_?loader|rng|extra|loops|callbacks)\w*(\.|$)")
#: What wrappers of modules add to names.
_WRAPPER = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
#: Optimizers whose state shardc continues, and its names.
_OPTIMIZERS = {"AdamW": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, "SGD": {"momentum_buffer"}}


def is_torch(folder: Path) -> bool:
    """Return whether this is a folder of torch.distributed.checkpoint."""
    return (folder / METADATA).is_file()


def last_in(folder: Path) -> Path | None:
    """Return the folder of the last step in a folder of such folders: step-1000, checkpoint_1000."""
    steps = ((re.fullmatch(r"(?:step|checkpoint)\D?(\d+)", x.name), x) for x in folder.iterdir())
    present = [(int(match[1]), x) for match, x in steps if match and is_torch(x)]
    return max(present)[1] if present else None


def read(folder: Path) -> tuple[Index, list[str]]:
    """Return the index of such a folder, and the keys that it leaves out. Raises ShardcError if it cannot be read."""
    metadata, manifest = _read_metadata(folder / METADATA), _read_manifest(folder / MANIFEST)
    try:
        return _index(_Folder(folder, metadata), manifest)
    except ShardcError:
        raise
    except Exception as e:  # a malformed file can have anything anywhere
        fix = "check whether torch itself reads it"
        raise ShardcError(f"it cannot be read: {type(e).__name__}: {e}", where=str(folder), fix=fix) from e


class _Folder:
    """Such a folder: the places of its tensors and of its other values."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path, self.files, self.tensors = path, list[File](), dict[str, Stored]()
        self._places = {
            (i.fqn, None if i.offset is None else tuple(i.offset)): self._file(info)
            for i, info in metadata.storage_data.items()
        }
        self.values = [k for k, x in metadata.state_dict_metadata.items() if not isinstance(x, TensorStorageMetadata)]
        paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        self.paths = {key: tuple(map(str, paths.get(key, (key,)))) for key in metadata.state_dict_metadata}
        for key, x in metadata.state_dict_metadata.items():
            if isinstance(x, TensorStorageMetadata):
                slices = tuple(self._slice(key, tuple(c.offsets), tuple(c.sizes)) for c in x.chunks if 0 not in c.sizes)
                self.tensors[key] = Stored(x.properties.dtype, tuple(x.size), slices)

    def _file(self, info: Any) -> File:
        name, start, count = str(info.relative_path), int(info.offset), int(info.length)
        if not _FILE.fullmatch(name) or start < 0 or count < 0:
            fix = "the checkpoint is not complete, or not to be trusted"
            fault = f"the checkpoint names a file that torch does not write: {name!r}"
            raise ShardcError(fault, where=str(self.path), fix=fix)
        if getattr(info, "transform_descriptors", None):
            fix = "save it without extensions, or convert it with torch"
            raise ShardcError("its files are compressed or encrypted", where=str(self.path), fix=fix)
        return File(name, 0, start + count, start, "")

    def _slice(self, key: str, offset: Numbers, shape: Numbers) -> Slice:
        self.files.append(self._places[key, offset])
        return Slice(len(self.files) - 1, self.files[-1].header, offset, shape, "")

    def value(self, key: str) -> Any:
        """Read a number, or another plain value. Raises ShardcError for objects."""
        if key in self.tensors:
            (s,) = self.tensors[key].slices
            with disk_calls.opened(self.path / self.files[s.file].name) as descriptor:
                return read_rows(descriptor, self.files[s.file], s, self.tensors[key].dtype)
        file = self._places[key, None]
        with disk_calls.opened(self.path / file.name) as descriptor:
            data = disk_calls.read_range(descriptor, file.header, file.nbytes - file.header)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            fix = "nothing in it was run; copy the checkpoint again, or begin from --weights without this value"
            fault = f"{key} is not a plain value: it is damaged, or an object, which is code"
            raise ShardcError(fault, where=str(self.path), fix=fix) from None


def _index(folder: _Folder, manifest: Mapping[str, Any] | None) -> tuple[Index, list[str]]:
    facts: dict[str, Any] = {"model": "", "mesh": {}}
    if manifest is not None:
        facts |= {k: manifest[k] for k in facts if k in manifest}
        tensors = {k: x for k, x in folder.tensors.items() if k.startswith(_KEYS)}
        extra, optimizer = {"step": 0, **manifest.get("extra", {})}, manifest.get("optimizer")
    else:
        model = _model_names(folder)
        states = {k: match for k in folder.tensors if (match := _STATE.fullmatch(k))}
        tensors = {f"model.{name}": folder.tensors[key] for key, name in model.items()}
        tensors |= {f"optimizer.{_plain(m[1])}.{m[2]}": folder.tensors[k] for k, m in states.items()}
        optimizer, extra = _optimizer(folder, {_plain(m[1]): m for m in states.values()}, states), {"step": 0}
        steps = [k for k in (*folder.values, *folder.tensors) if _STEP.fullmatch(k) and k not in states]
        counts = [k for k, match in states.items() if match[2] == "step"]
        for key in (steps or counts)[:1]:
            extra["step"] = int(folder.value(key))
    step = int(extra["step"])
    index = Index(
        ID, step, program="", extra=extra, optimizer=optimizer, files=tuple(folder.files), tensors=tensors, **facts
    )
    check_slices(index)
    used = {id(x) for x in tensors.values()}
    return index, [k for k, x in folder.tensors.items() if id(x) not in used]


def _plain(name: str) -> str:
    return _WRAPPER.sub("", name)


def _model_names(folder: _Folder) -> dict[str, str]:
    """Return {key: name} of the model's tensors: what is beside sections of other names, without its own section."""
    keys = [
        k
        for k in folder.tensors
        if not (_STATE.fullmatch(k) or _STEP.fullmatch(k) or any(_OTHER.match(x) for x in (k, *folder.paths[k][:-1])))
    ]
    paths = {k: folder.paths[k] for k in keys}
    while paths and all(len(p) > 1 for p in paths.values()) and len({p[0] for p in paths.values()}) == 1:
        paths = {k: p[1:] for k, p in paths.items()}
    return {k: _plain(".".join(p)) for k, p in paths.items()}


def _optimizer(folder: _Folder, named: Collection[str], states: Mapping[str, re.Match[str]]) -> dict[str, Any] | None:
    """Return the facts of the optimizer, as an index has them. named: its parameters."""
    settings: dict[str, dict[str, Any]] = {}
    for key in (*folder.values, *folder.tensors):
        if (match := _GROUPS.fullmatch(key)) and match[1] is not None:
            settings.setdefault(_plain(match[1]), {})[match[2]] = plain(folder.value(key))
        elif match:  # the groups as one list
            settings |= {f"group {i}": plain(group) for i, group in enumerate(folder.value(key))}
    for group in [x for x in settings.values() if isinstance(x.get("params"), list)]:
        settings |= {_plain(str(n)): {k: v for k, v in group.items() if k != "params"} for n in group["params"]}
    if not named:
        return None
    kinds = {match[2] for match in states.values()}
    kind = next((k for k, known in _OPTIMIZERS.items() if kinds <= known), f"with {', '.join(sorted(kinds))}")
    if kind == "AdamW" and any(x.get("decoupled_weight_decay") is False for x in settings.values()):
        kind = "Adam"
    groups: dict[str, dict[str, Any]] = {}
    for name in named:
        own = {k: v for k, v in settings.get(name, {}).items() if k not in ("params", "param_names")}
        groups.setdefault(repr(sorted(own.items())), {**own, "class": kind, "params": []})["params"].append(name)
    return {"class": kind, "groups": [*groups.values()], "numbers": {}}


# --- the numbers


class _Window(io.RawIOBase):
    """The bytes of one box in a file, as a file of its own."""

    def __init__(self, descriptor: disk_calls.Opened, file: File) -> None:
        self._descriptor, self._file, self._at = descriptor, file, 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._file.nbytes - self._file.header)[whence]
        return self._at

    def readinto(self, into: Any) -> int:
        count = max(min(len(into), self._file.nbytes - self._file.header - self._at), 0)
        disk_calls.read_into(self._descriptor, memoryview(into)[:count], self._file.header + self._at)
        self._at += count
        return count


def read_rows(
    descriptor: disk_calls.Opened, file: File, s: Slice, dtype: torch.dtype, rows: slice | None = None
) -> Tensor:
    """Read rows of a box, without the rest; None: all. Raises OSError if it is not what `.metadata` says."""
    try:
        with FakeTensorMode():  # shapes and places
            x = torch.load(io.BufferedReader(_Window(descriptor, file), 1 << 14), weights_only=True)
        storage: Any = x.untyped_storage()
        place, shape = file.header + storage._checkpoint_offset + x.storage_offset() * dtype.itemsize, s.shape
        if (tuple(x.shape), x.dtype) != (shape, dtype):
            raise OSError(f"it has {x.dtype} {list(x.shape)}, and not {dtype} {list(shape)}")
        by_rows = rows is not None and x.is_contiguous()
        if rows is not None and by_rows:
            place += rows.start * math.prod(shape[1:]) * dtype.itemsize
            shape = (rows.stop - rows.start, *shape[1:])
        stride = x.stride()
        count = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        data = bytearray(disk_calls.read_range(descriptor, place, count * dtype.itemsize))
    except OSError:
        raise
    except Exception as e:  # torch raises errors of many kinds
        raise OSError(f"it is not a tensor that torch has saved: {type(e).__name__}") from None
    read = torch.frombuffer(data, dtype=torch.uint8).view(dtype).as_strided(shape, stride)
    return read if rows is None or by_rows else read[rows]


# --- the files beside them


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
        metadata = _Unpickler(io.BytesIO(disk_calls.read_file(path, _LARGEST))).load()
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
        manifest = json.loads(disk_calls.read_file(path, _LARGEST))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as e:
        raise ShardcError(f"it cannot be read: {e}", where=str(path), fix=fix) from None
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT:
        raise ShardcError("it is not a manifest of shardc", where=str(path), fix=fix)
    return manifest
