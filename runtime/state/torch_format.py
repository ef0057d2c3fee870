"""Read a folder of torch.distributed.checkpoint, as FSDP2, torchtitan, Lightning and accelerate write it.

    DIR/.metadata             a pickle: tensors as boxes, and where their bytes are
    DIR/__0_0.distcp ...      each box as a file of torch.save, one after the other

It becomes the `Index` of a checkpoint, whose slices are these boxes: what reads checkpoints reads it too, and a rank
reads the rows that it needs. `.metadata` is unpickled by an unpickler that makes nothing but fields; the rest is read
with weights_only=True. Keys become names:

    up.weight, model.up.weight, app.model.up.weight         model.up.weight
    optimizer.state.up.weight.exp_avg                       optimizer.up.weight.exp_avg
    optimizer.param_groups, .param_groups.up.weight.lr      the optimizer's settings
    train_state.step, or the step of the optimizer          the step
    lr_scheduler, dataloader, ...                           left out
    shardc                                                  what `checkpoint export` adds: the other facts, as JSON
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.runtime.state.boxes import Box, Numbers
from shardc.runtime.state.checkpoint_index import File, Index, Slice, Stored, check_optimizer, check_slices, plain
from shardc.runtime.storage import disk_calls
from shardc.torch_private import FakeTensorMode

METADATA, FACTS = ".metadata", "shardc"
_FILE = re.compile(r"__\d+_\d+\.distcp")
_LARGEST = 4 << 30
_STATE = re.compile(r"(?:[\w.]*\.)??optim\w*\.state\.(.+)\.([^.]+)")
_GROUPS = re.compile(r"(?:[\w.]*\.)??optim\w*\.param_groups(?:\.(.+)\.([^.]+))?")
_STEP = re.compile(r"(?:[\w.]*\.)??(?:train_state\.)?(?:global_)?step")
_OTHER = re.compile(r"(optim|(lr_)?scheduler|train_state|data_?loader|rng|extra|loops|callbacks)\w*(\.|$)")
#: What wrappers of modules add to names: torch.compile, recomputation, FSDP.
WRAPPERS = "_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module"
WRAPPER = re.compile(rf"(?:^|(?<=\.))(?:{WRAPPERS})\.")
#: Optimizers whose state shardc continues, and its names.
_OPTIMIZERS = {"AdamW": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, "SGD": {"momentum_buffer"}}


def is_torch(folder: Path) -> bool:
    """Return whether this is a folder of torch.distributed.checkpoint."""
    return (folder / METADATA).is_file()


def last_in(folder: Path) -> Path | None:
    """Return the folder of the last step in a folder of such folders: step-1000, checkpoint_1000."""
    steps = ((re.fullmatch(r"(?:step|checkpoint)\D?(\d+)", x.name), x) for x in folder.iterdir())
    return max(((int(match[1]), x) for match, x in steps if match and is_torch(x)), default=(0, None))[1]


def read(folder: Path) -> Index:
    """Return the index of such a folder. Raises ShardcError if it cannot be read."""
    metadata = _read_metadata(folder / METADATA)
    try:
        return _index(_Folder(folder, metadata))
    except ShardcError:
        raise
    except Exception as e:  # a malformed file can have anything anywhere
        fix = "check whether torch itself reads it"
        raise ShardcError(f"it cannot be read: {type(e).__name__}: {e}", where=str(folder), fix=fix) from e


class _Folder:
    """Such a folder. values: keys of what is no tensor. paths: the keys as the nested dicts had them."""

    def __init__(self, path: Path, metadata: Any) -> None:
        self.path, self.files, self.tensors = path, list[File](), dict[str, Stored]()
        places = metadata.storage_data.items()
        self._places = {
            (i.fqn, None if getattr(i, "offset", None) is None else tuple(i.offset)): self._file(x) for i, x in places
        }
        paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        self.paths = {key: tuple(map(str, paths.get(key, (key,)))) for key in metadata.state_dict_metadata}
        for key, x in metadata.state_dict_metadata.items():
            if hasattr(x, "chunks"):
                assert isinstance(x.properties.dtype, torch.dtype)
                slices = tuple(self._slice(key, tuple(c.offsets), tuple(c.sizes)) for c in x.chunks if 0 not in c.sizes)
                self.tensors[key] = Stored(x.properties.dtype, tuple(x.size), slices)
        self.values = [key for key in self.paths if key not in self.tensors]

    def _file(self, info: Any) -> File:
        name, start, count = str(info.relative_path), int(info.offset), int(info.length)
        if not _FILE.fullmatch(name) or start < 0 or count < 0 or getattr(info, "transform_descriptors", None):
            fix = "the checkpoint is not complete, is compressed, or is not to be trusted"
            fault = f"the checkpoint names a file that torch does not write: {name!r}"
            raise ShardcError(fault, where=str(self.path), fix=fix)
        return File(name, 0, start + count, start, "")

    def _slice(self, key: str, offset: Numbers, shape: Numbers) -> Slice:
        self.files.append(self._places[key, offset])
        return Slice(len(self.files) - 1, self.files[-1].header, offset, shape, "")

    def value(self, key: str) -> Any:
        """Read a number, or another plain value. Raises ShardcError for objects."""
        slices = self.tensors[key].slices if key in self.tensors else ()
        file = self.files[slices[0].file] if slices else self._places[key, None]
        with disk_calls.opened(self.path / file.name) as descriptor:
            data = disk_calls.read_range(descriptor, file.header, file.nbytes - file.header)
        try:
            return plain(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
        except pickle.UnpicklingError:
            fix = "nothing in it was run; copy the checkpoint again, or begin from --weights without this value"
            fault = f"{key} is not a plain value: it is damaged, or an object, which is code"
            raise ShardcError(fault, where=str(self.path), fix=fix) from None


def _index(folder: _Folder) -> Index:
    keys, facts = folder.tensors, dict[str, Any]()
    if FACTS in folder.values:
        facts = json.loads(folder.value(FACTS))
        tensors = {k: x for k, x in keys.items() if k.startswith(("model.", "optimizer."))}
    else:
        states = {k: (_plain(match[1]), match[2]) for k in keys if (match := _STATE.fullmatch(k))}
        tensors = {f"model.{name}": keys[k] for k, name in _model_names(folder).items()}
        tensors |= {f"optimizer.{name}.{state}": keys[k] for k, (name, state) in states.items()}
        facts["optimizer"] = _optimizer(folder, {*states.values()}) if states else None
        steps = [k for k in (*folder.values, *keys) if _STEP.fullmatch(k) and k not in states]
        counts = [k for k, (_, state) in states.items() if state == "step"]
        facts["extra"] = {"step": int(folder.value((steps or counts)[0]))} if steps or counts else {}
    extra, mesh = {"step": 0, **facts.get("extra", {})}, dict(facts.get("mesh", {}))
    facts = {
        "model": str(facts.get("model", "torch.distributed.checkpoint")),
        "mesh": mesh,
        "extra": extra,
        "optimizer": check_optimizer(facts["optimizer"]) if facts.get("optimizer") is not None else None,
    }
    index = Index("torch", int(extra["step"]), program="", files=tuple(folder.files), tensors=tensors, **facts)
    check_slices(index)
    return index


def _plain(name: str) -> str:
    return WRAPPER.sub("", name)


def _model_names(folder: _Folder) -> dict[str, str]:
    """Return {key: name} of the model's tensors: what is in no other section, without its own section."""

    def other(key: str) -> bool:
        path = folder.paths[key]
        return bool(_STATE.fullmatch(key) or _STEP.fullmatch(key) or any(map(_OTHER.match, (key, *path[:-1]))))

    paths = {k: folder.paths[k] for k in folder.tensors if not other(k)}
    while paths and all(len(p) > 1 for p in paths.values()) and len({p[0] for p in paths.values()}) == 1:
        paths = {k: p[1:] for k, p in paths.items()}
    return {k: _plain(".".join(p)) for k, p in paths.items()}


def _optimizer(folder: _Folder, states: set[tuple[str, str]]) -> dict[str, Any]:
    """Return the facts of the optimizer, as an index has them. states: (parameter, name of a state of it)."""
    settings: dict[str, dict[str, Any]] = {}
    for key in (*folder.values, *folder.tensors):
        if (match := _GROUPS.fullmatch(key)) and match[1] is not None:
            settings.setdefault(_plain(match[1]), {})[match[2]] = folder.value(key)
        elif match:  # the groups as one list
            settings |= {f"group {i}": group for i, group in enumerate(folder.value(key))}
    for group in [x for x in settings.values() if isinstance(x.get("params"), list)]:
        settings |= {_plain(str(n)): group for n in group["params"]}
    kinds = {state for _, state in states}
    kind = next((k for k, known in _OPTIMIZERS.items() if kinds <= known), f"with {', '.join(sorted(kinds))}")
    if kind == "AdamW" and any(x.get("decoupled_weight_decay") is False for x in settings.values()):
        kind = "Adam"
    groups: dict[str, dict[str, Any]] = {}
    for name in sorted({name for name, _ in states}):
        own = {k: v for k, v in sorted(settings.get(name, {}).items()) if k not in ("params", "param_names")}
        groups.setdefault(repr(own), {**own, "class": kind, "params": []})["params"].append(name)
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


def fill(
    descriptor: disk_calls.Opened, file: File, dtype: torch.dtype, s: Slice, parts: list[tuple[Box, Tensor]]
) -> bool:
    """Read the rows of a box that parts of tensors need; return False if it is not what `.metadata` says."""
    try:
        with FakeTensorMode():  # its shape, and the place of its numbers
            x = torch.load(io.BufferedReader(_Window(descriptor, file), 1 << 14), weights_only=True)
        storage: Any = x.untyped_storage()
        begin, stride = file.header + storage._checkpoint_offset + x.storage_offset() * dtype.itemsize, x.stride()
        if (tuple(x.shape), x.dtype) != (s.shape, dtype):
            return False
        for box, target in parts:
            rows, *rest = box.within(s.offset) or [slice(0, 1)]
            whole, shape, place = not x.is_contiguous() or not s.shape, s.shape, begin
            if not whole:
                place += rows.start * math.prod(shape[1:]) * dtype.itemsize
                shape = (rows.stop - rows.start, *shape[1:])
            count = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            data = bytearray(disk_calls.read_range(descriptor, place, count * dtype.itemsize))
            read = torch.frombuffer(data, dtype=torch.uint8).view(dtype).as_strided(shape, stride)
            target.copy_(read[(rows if whole else slice(None), *rest)] if s.shape else read)
    except Exception:  # torch raises errors of many kinds for a damaged file
        return False
    return True


# --- the files beside them


class _Fields:
    """Has the fields of an object in `.metadata`."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"dtype": state[0]})  # TensorProperties: a tuple


class _Unpickler(pickle.Unpickler):
    """Makes fields, sizes and dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module in (f"torch.distributed.checkpoint.{x}" for x in ("metadata", "filesystem")):
            return type(name, (_Fields,), {})
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda _: torch.strided
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath  # a path on the machine that wrote it
        raise pickle.UnpicklingError(f"it needs {module}.{name}")


def _read_metadata(path: Path) -> Any:
    try:
        metadata = _Unpickler(io.BytesIO(disk_calls.read_file(path, _LARGEST))).load()
    except FileNotFoundError:
        fix = "name a folder with .metadata and *.distcp files"
        raise ShardcError("this folder has no checkpoint of torch", where=str(path.parent), fix=fix) from None
    except Exception as e:  # a malformed or malicious pickle can raise any error
        fix = "nothing in it was run; copy the checkpoint again from its source"
        raise ShardcError(f"it is not a file of torch: {str(e).splitlines()[0]}", where=str(path), fix=fix) from None
    if not hasattr(metadata, "state_dict_metadata"):
        fault = f"it is a pickle of a {type(metadata).__name__}, not torch's Metadata"
        raise ShardcError(fault, where=str(path), fix="name a checkpoint of torch")
    return metadata
