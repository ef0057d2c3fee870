"""Checkpoints that any mesh can load, in the format of torch.distributed.checkpoint.

    DIR/.metadata, __0_0.distcp ...   torch's: tensors as boxes of the global tensor, named "model.FQN" and
                                      "optimizer.FQN.STATE"
    DIR/manifest.json                 hyperparameters and numbers of the optimizer, and the caller's `extra`

Every rank plans by itself what it writes and reads (saving_boxes.py, saving_optimizer.py), and leaves its plan beside
what it wrote, for rank 0 to list: the ranks only meet at barriers, whatever they are (processes or threads). What is
saved is complete or absent: it is renamed into place.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.optim import Optimizer

from shardc.errors import Errors, ShardcError
from shardc.ir.program import Buffer, Param, Program
from shardc.runtime.state.saving_boxes import Part, Runs, coordinates, kept, model_parts
from shardc.runtime.state.saving_optimizer import Room, fill, room_for, state_parts, together
from shardc.runtime.state.sources import check_names

_FORMAT = 1
_OURS = re.compile(r"manifest\.json|\.metadata|__\d+_\d+\.distcp")


Lookup = Callable[[MetadataIndex], Tensor]


def _lookup(parts: Mapping[str, Part], mesh: Any) -> Lookup:
    """Finds this rank's tensor of a box in torch's plans, which `save` and `load` have made."""

    def box_of(index: MetadataIndex) -> Tensor:
        boxes = parts[index.fqn].boxes(mesh.layout, coordinates(mesh))
        return next(x for box, x in boxes if box.offsets == index.offset)

    return box_of


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, lookup: Lookup) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._lookup = lookup

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._lookup(index)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, lookup: Lookup) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._lookup = lookup

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._lookup(index)


# --- saving -----------------------------------------------------------------------------------------------------------


def save(
    folder: str | Path,
    program: Program,
    mesh: Any,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    runs: Runs | None = None,
) -> None:
    """Write a checkpoint that any mesh can load. Collective; all ranks must see the same file system.

    params, buffers: this rank's, by placeholder name. optimizer: over these params; its step counts, moments,
    hyperparameters.
    runs: of which params this rank has a stretch of the flattened local part (ZeRO), and which.
    extra: JSON-able values of the caller's: step, seed, a scheduler's state_dict; of each, what the first rank that has
    it says (a stage without anything to train has no scheduler). An existing checkpoint is replaced at the end; raises
    ShardcError for a folder with anything else."""
    folder = Path(folder).absolute()
    _check_free(folder)  # by every rank, and before any of them changes something
    work = folder.with_name(f".{folder.name}.saving")
    parts = model_parts(program, params, buffers, runs or {}, mesh)
    manifest: dict[str, Any] = {
        "format": _FORMAT,
        "model": program.meta.get("model", ""),
        "mesh": dict(mesh.layout.axes),
        "extra": dict(extra or {}),
    }
    if optimizer is not None:
        more, manifest["optimizer"] = state_parts(program, params, optimizer, runs or {}, mesh)
        parts |= more
    _json(manifest)  # what cannot be written is found before anything is
    if mesh.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    mesh.barrier()
    planner, writer = _SavePlanner(_lookup(parts, mesh)), FileSystemWriter(work)
    plan = SavePlan([i for key, part in parts.items() for i in part.items(key, mesh.layout, coordinates(mesh))])
    mine = writer.prepare_global_plan([SavePlan([])] * mesh.rank + [plan])[-1]  # names its file after the rank
    results = writer.write_data(mine, planner).wait()
    _results(work, mesh.rank).write_bytes(pickle.dumps((plan, results, manifest)))
    mesh.barrier()
    if mesh.rank == 0:
        every = [pickle.loads(_results(work, r).read_bytes()) for r in range(mesh.layout.world)]
        _, metadata = planner.create_global_plan([p for p, _, _ in every])
        writer.finish(metadata, [r for _, r, _ in every])
        for _, _, theirs in reversed(every):
            manifest["extra"] |= theirs["extra"]
        if facts := [theirs["optimizer"] for _, _, theirs in every if "optimizer" in theirs]:
            manifest["optimizer"] = together(facts)
        for r in range(mesh.layout.world):
            _results(work, r).unlink()
        (work / "manifest.json").write_text(_json(manifest))
        _replace(folder, work)
    mesh.barrier()


def _check_free(folder: Path) -> None:
    """May what is in the folder be deleted?"""
    if not folder.exists():
        return
    others = (
        sorted(f.name for f in folder.iterdir() if not _OURS.fullmatch(f.name)) if folder.is_dir() else [folder.name]
    )
    if others:
        what = (
            f"the folder has files that are not a checkpoint's, and saving would delete them: {', '.join(others[:5])}"
        )
        raise ShardcError(what, where=str(folder), fix=f"save to a folder of its own, such as {folder.name}/checkpoint")


def _results(work: Path, rank: int) -> Path:
    return work / f".results-{rank}"


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _replace(folder: Path, work: Path) -> None:
    old = _old(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    work.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _json(manifest: dict[str, Any]) -> str:
    try:
        return json.dumps(manifest, indent=2) + "\n"
    except TypeError as e:
        raise ShardcError(
            f"the checkpoint's extra state or the optimizer's settings hold more than plain values: {e}",
            fix="pass numbers, strings, lists and dicts",
        ) from e


# --- loading ----------------------------------------------------------------------------------------------------------


def load(
    folder: str | Path,
    program: Program,
    mesh: Any,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    optimizer: Optimizer | None = None,
    *,
    runs: Runs | None = None,
    room: Room | None = None,
) -> dict[str, Any]:
    """Fill params, buffers and the optimizer in place from a checkpoint of any mesh; returns its `extra`. No
    communication.

    room: where the optimizer's state is to be; default: on its parameter's device.

    Raises ShardcError, naming them, if the checkpoint has other parameters, shapes or another optimizer, before
    anything changes."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        reader = FileSystemReader(folder)
        metadata = reader.read_metadata()
    except (FileNotFoundError, NotADirectoryError) as e:
        what, old = "there is no checkpoint in this folder", _old(folder.absolute())
        fix = (
            f"a save was interrupted between two renames: {old} is the checkpoint before it"
            if old.exists()
            else "pass a folder that shardc saved to"
        )
        raise ShardcError(what, where=str(folder), fix=fix) from e
    if manifest["format"] != _FORMAT:
        raise ShardcError(
            f"a checkpoint of format {manifest['format']}, and this shardc reads {_FORMAT}", where=str(folder)
        )
    stored = {k: x for k, x in metadata.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)}
    parts = model_parts(program, params, buffers, runs or {}, mesh)
    errors = Errors()
    have = {k.removeprefix("model."): tuple(x.size) for k, x in stored.items() if k.startswith("model.")}
    wanted: list[Param | Buffer] = [*program.params, *kept(program)]
    want = {n: shape for x in wanted for n, shape in x.shapes.items() if x.members or n == x.fqn}
    check_names(errors, want, have, want, f"the checkpoint {folder.name}")
    errors.raise_any()  # its optimizer is of the same tensors
    states: dict[str, dict[str, Any]] = {}
    if optimizer is not None:
        with errors.collect():
            states = room_for(program, params, optimizer, manifest, stored, parts, str(folder), runs or {}, room, mesh)
    errors.raise_any()

    planner = _LoadPlanner(_lookup(parts, mesh))
    coords = coordinates(mesh)
    plan = LoadPlan(
        [
            item
            for key, part in parts.items()
            for item in create_read_items_for_chunk_list(
                key, stored[key], [box for box, _ in part.boxes(mesh.layout, coords)]
            )
        ]
    )
    reader.set_up_storage_reader(metadata, mesh.rank == 0)
    reader.read_data(reader.prepare_local_plan(plan), planner).wait()
    if optimizer is not None:
        fill(program, params, optimizer, manifest["optimizer"], states)
    found: dict[str, Any] = manifest["extra"]
    return found
