"""Read weights by slice from safetensors files, torch files and checkpoints.

    files = open_weights("pretrained/")             # a folder, or one file: nothing is read but names and shapes
    files.tensors["lm_head.weight"].read((0, 16), (8, 4))     # rows 0 to 7, columns 16 to 19: [8, 4]

A rank reads its part of a tensor and nothing else, so that a model of any size costs each rank only its part.
"""

from __future__ import annotations

import functools
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.runtime.state.boxes import Numbers, Sliced, in_memory_by_name, index
from shardc.runtime.state.checkpoint_folder import checkpoints_in, of_others, read_box, read_index
from shardc.runtime.state.quantized import plain_state
from shardc.runtime.state.tensor_file import DTYPES, instead, open_safetensors, tensors_in_store
from shardc.runtime.storage import disk_calls
from shardc.runtime.storage.urls import Url


@dataclass(frozen=True)
class WeightFiles:
    """Weights in files. path: what the user named.

    what: "safetensors", "torch", "checkpoint" or "in memory". tensors: by all of their names in the files.
    """

    path: Path
    what: str
    tensors: Mapping[str, Sliced]

    @property
    def folder(self) -> Path:
        """Where config and tokenizer would be."""
        return self.path if self.path.is_dir() else self.path.parent


_SAFE, _TORCH = ("model", "adapter_model"), ("pytorch_model", "adapter_model", "model")
_TORCH_ENDINGS = (".bin", ".pt", ".pth")
_SEEMS = re.compile(r"\.(safetensors|bin|pth?|ckpt|gguf|msgpack|h5|onnx|incomplete)(\.|$)")


def open_weights(path: str | Path | Mapping[str, Any] | WeightFiles) -> WeightFiles:
    """Open the weights at a path (or a state_dict); read only names and shapes.

    A .safetensors file, a torch file (.bin, .pt, .pth), an index of several (*.index.json), a folder with one of these,
    or a shardc checkpoint. Raises ShardcError if it is missing or cannot be read.
    """
    if isinstance(path, WeightFiles):
        return path
    if isinstance(path, Mapping):
        _check_flat(path)
        return WeightFiles(Path("the state_dict"), "in memory", in_memory_by_name(plain_state(path), computed=True))
    path = disk_calls.expanded(path)
    if checkpoints := checkpoints_in(path):
        return _of_checkpoint(path, checkpoints[0].path)
    files = weight_files(path)
    if not files:
        raise no_weights(path)
    opened = of_files(path, files)
    if not opened.tensors:
        fix = "save them again: a rank that held none of them wrote this (DeepSpeed ZeRO 3, FSDP)"
        raise ShardcError("there are no tensors in the weights", where=str(path), fix=fix)
    return opened


def no_weights(path: Path, more: str = "") -> ShardcError:
    """Build the error for a path without weights that are read; it names what seems to be some. more: to do."""
    fault, fix = (
        "there are no weights at this path",
        "name a .safetensors or .bin file, or a folder with some",
    )
    if names := unread(path):
        fault += f"; of these, the name or format is not read, or a part is absent: {', '.join(names[:3])}"
        fix = f"download or copy .safetensors files and their index again; {more or fix}"
    return ShardcError(fault, where=str(path), fix=fix)


def _check_flat(state_dict: Mapping[str, Any]) -> None:
    """Raise ShardcError for a dict with a state_dict inside, as training loops save with other things."""
    if any(isinstance(x, Tensor) for x in state_dict.values()):
        return
    for key, x in state_dict.items():
        if isinstance(x, Mapping) and any(isinstance(y, Tensor) for y in x.values()):
            fix = f"pass that one: state_dict[{key!r}]"
            raise ShardcError(f"the weights are a state_dict under the key {key!r}", where="state_dict", fix=fix)


def of_files(path: Path, files: Sequence[Path]) -> WeightFiles:
    """Return the weights in these files, all safetensors or all torch's. path: what the user named."""
    if files[0].suffix == ".safetensors":
        return _of_safetensors(path, files)
    if isinstance(path, Url):
        fix = "copy it to this machine, or convert it to safetensors"
        raise ShardcError("only .safetensors files and checkpoints are read from a store", where=str(path), fix=fix)
    return WeightFiles(path, "torch", in_memory_by_name({n: x for file in files for n, x in torch_file(file).items()}))


def has_weights(path: str | Path) -> bool:
    """Return whether there is anything at this path that `open_weights` would read."""
    path = disk_calls.expanded(path)
    return bool(checkpoints_in(path) or weight_files(path))


def unread(path: Path) -> list[str]:
    """Return the names in a folder of what seems to be weights, of other names, formats or libraries, or absent."""
    return sorted(x.name for x in path.iterdir() if _SEEMS.search(x.name)) if path.is_dir() else []


def weight_files(path: Path) -> list[Path]:
    """Return the files with the weights at a path: itself, those of an index, or those of a folder.

    Raises ShardcError for a checkpoint of another library.
    """
    if path.is_file():
        if error := of_others(path):
            raise error
        return _indexed(path) if path.name.endswith(".index.json") else [path]
    for stems, endings in ((_SAFE, (".safetensors",)), (_TORCH, _TORCH_ENDINGS)):
        for name in (f"{stem}{ending}" for stem in stems for ending in endings):
            if (index_file := path / f"{name}.index.json").is_file():
                return _indexed(index_file)
            if (path / name).is_file():
                return [path / name]
    if error := of_others(path):
        raise error
    return []


def _indexed(index_file: Path) -> list[Path]:
    try:
        names = json.loads(index_file.read_text())["weight_map"].values()
        names = [Path(name) for name in dict.fromkeys(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        fix = "it must be JSON with a weight_map of {name of a tensor: file}"
        raise ShardcError(f"the index of the weights cannot be read: {e}", where=str(index_file), fix=fix) from e
    if outside := [str(name) for name in names if name.is_absolute() or ".." in name.parts]:
        fix = "put all files of an index beside it"
        raise ShardcError(f"the index names files elsewhere: {', '.join(outside[:3])}", where=str(index_file), fix=fix)
    files = [index_file.parent / name for name in names]
    if absent := [f.name for f in files if not f.is_file()]:
        fault = f"the index names {len(files)} files, and {len(absent)} of them do not exist: {', '.join(absent[:3])}"
        raise ShardcError(fault, where=str(index_file), fix="download or copy them as well")
    return files


def _of_safetensors(path: Path, files: Sequence[Path]) -> WeightFiles:
    tensors: dict[str, Sliced] = {}
    ties: dict[str, str] = {}
    for file in files:
        if isinstance(file, Url):
            inside, metadata = tensors_in_store(file)
            tensors, ties = tensors | inside, ties | metadata
            continue
        handle = open_safetensors(file)
        for name in handle.keys():  # noqa: SIM118 (not a dict)
            view = handle.get_slice(name)
            if (dtype := DTYPES.get(view.get_dtype())) is None:
                fix = "convert it to another dtype"
                raise ShardcError(f"{name} is of the dtype {view.get_dtype()}", where=str(file), fix=fix)
            read = functools.partial(_read_safetensors, handle, name, dtype)
            tensors[name] = Sliced(tuple(view.get_shape()), dtype, read)
        ties |= {k: v for k, v in (handle.metadata() or {}).items() if k != "format"}
    tied = {other: tensors[name] for other, name in ties.items() if name in tensors}
    return WeightFiles(path, "safetensors", tied | tensors)


def _read_safetensors(handle: Any, name: str, dtype: torch.dtype, offset: Numbers, shape: Numbers) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    tensor: Tensor = handle.get_slice(name)[index(offset, shape) or ...]
    return tensor


def torch_file(file: Path) -> dict[str, Tensor]:
    """Read the state_dict in a torch file, mapped into memory: pages are read on access."""
    try:
        try:
            content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError as e:
            if "mmap" not in str(e):
                raise
            content = torch.load(file, map_location="cpu", weights_only=True)  # a file of the format before torch 1.6
    except Exception as e:  # torch.load raises errors of many kinds; the cause is chained
        fix = "save a plain state_dict: torch.save(model.state_dict(), FILE)"
        first = str(e).splitlines()[0] if str(e) else type(e).__name__
        if isinstance(e, pickle.UnpicklingError):  # its text names options that do not exist here
            first = "it contains objects other than tensors, such as a whole model (torch.save(model)), which are code"
        if "zip archive" in first:
            first, fix = "it is truncated or damaged", "copy or download it again"
        first, fix = instead(file) or (first, fix)
        raise ShardcError(f"the weights cannot be read: {first}", where=str(file), fix=fix) from e
    for key in ("state_dict", "model_state_dict", "model"):  # keys that training loops use
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    tensors = {k: x for k, x in content.items() if isinstance(x, Tensor)} if isinstance(content, Mapping) else {}
    if not tensors:
        fix = "save a plain state_dict: torch.save(model.state_dict(), FILE)"
        raise ShardcError("the file does not contain a state_dict", where=str(file), fix=fix)
    return tensors


# --- a checkpoint of our own ------------------------------------------------------------------------------------------


def _of_checkpoint(path: Path, checkpoint: Path) -> WeightFiles:
    content = read_index(checkpoint)
    tensors = {
        key.removeprefix("model."): Sliced(x.shape, x.dtype, functools.partial(read_box, checkpoint, content, key))
        for key, x in content.tensors.items()
        if key.startswith("model.")
    }
    return WeightFiles(path, "checkpoint", tensors)
