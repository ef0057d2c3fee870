"""Write checkpoints in the format of torch.distributed.checkpoint, one tensor at a time."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from shardc.errors import ShardcError
from shardc.runtime.state import torch_format
from shardc.runtime.state.checkpoint_folder import check_files, read_box, read_index
from shardc.runtime.state.checkpoint_index import Index
from shardc.runtime.storage import disk_calls


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
    forms: dict[str, Any] = {k: torch.empty(x.shape, dtype=x.dtype, device="meta") for k, x in index.tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there are no other ranks
        save(forms, storage_writer=FileSystemWriter(new), planner=_Planner(path, index), no_dist=True)
    facts = {"format": torch_format.MANIFEST_FORMAT, "model": index.model, "mesh": index.mesh, "extra": index.extra}
    facts |= {"optimizer": index.optimizer} if index.optimizer is not None else {}
    disk_calls.write_file(new / torch_format.MANIFEST, json.dumps(facts, indent=2).encode() + b"\n")
    return f"{len(index.tensors)} tensors of {path}"
