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


class _Planner(DefaultSavePlanner):
    """Reads a tensor when it is written. Names and shapes are known before."""

    def __init__(self, path: Path, index: Index, facts: str) -> None:
        super().__init__()
        self._path, self._index, self._facts = path, index, facts

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn == torch_format.FACTS:
            return self._facts
        shape = self._index.tensors[index.fqn].shape
        return read_box(self._path, self._index, index.fqn, (0,) * len(shape), shape)


def export_checkpoint(path: Path, new: Path) -> str:
    """Write a checkpoint in the format of torch.distributed.checkpoint, with shardc's facts as one more value.

    One tensor is in memory at a time. Raises ShardcError for a damaged checkpoint.
    """
    index = read_index(path)
    if new.exists() and any(new.iterdir()):
        raise ShardcError("the folder is not empty", where=str(new), fix="name a new one")
    check_files(path, index)
    forms: dict[str, Any] = {k: torch.empty(x.shape, dtype=x.dtype, device="meta") for k, x in index.tensors.items()}
    facts = {"model": index.model, "mesh": index.mesh, "extra": index.extra, "optimizer": index.optimizer}
    planner = _Planner(path, index, json.dumps(facts))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there are no other ranks
        save(forms | {torch_format.FACTS: ""}, storage_writer=FileSystemWriter(new), planner=planner, no_dist=True)
    return f"{len(index.tensors)} tensors of {path}"
