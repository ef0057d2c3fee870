"""Convert checkpoints from and to the format of torch.distributed.checkpoint, one slice at a time."""

from __future__ import annotations

import functools
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
from shardc.ir.mesh import Mesh
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.state import torch_format
from shardc.runtime.state.boxes import Box
from shardc.runtime.state.checkpoint_folder import check_files, read_box, read_index
from shardc.runtime.state.checkpoint_index import Index
from shardc.runtime.state.saving import Plan, Saves
from shardc.runtime.storage import disk_calls


def import_checkpoint(folder: Path, new: Path) -> str:
    """Convert a checkpoint of torch.distributed.checkpoint; return a line about it. Raises ShardcError."""
    index, left = torch_format.read(folder)
    facts = {"model": index.model, "program": "", "mesh": index.mesh, "extra": index.extra}
    plan = Plan({**facts, "optimizer": index.optimizer})
    for key, x in index.tensors.items():
        plan.add(key, x.dtype, x.shape, (), lambda: torch.empty(0))  # also one without elements
        for s in x.slices:
            read = functools.partial(read_box, folder, index, key, s.offset, s.shape)
            plan.add(key, x.dtype, x.shape, [Box.alone(s.offset, s.shape)], functools.lru_cache(maxsize=1)(read))
    loopback(Mesh.of({"dp": 1}), lambda mesh: Saves(mesh).save(new, lambda: plan))
    out = f"; left out, as they are not tensors of the model or its optimizer: {', '.join(left[:5])}" if left else ""
    return f"{len(plan.tensors)} tensors of {folder}{out}"


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
