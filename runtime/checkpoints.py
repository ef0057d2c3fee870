"""Checkpoints that any mesh can load, in the format of torch.distributed.checkpoint.

    DIR/.metadata, __0_0.distcp ...   torch's: tensors as boxes of the global tensor, under "model.FQN" and "optimizer.FQN.STATE"
    DIR/manifest.json                 hyperparameters and numbers of the optimizer, and the caller's `extra`

A rank's part of a tensor is one or more boxes (`Layout.boxes`: several for fused weights; ZeRO keeps a stretch of the flattened part,
which is some boxes again); the first of its replicas writes them. Every rank plans by itself what it writes and reads, and leaves its plan
beside what it wrote, for rank 0 to list: the ranks only meet at barriers, whatever they are (processes or threads). What is saved is
complete or absent: it is renamed into place.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.optim import Optimizer

from shardc.errors import Errors, ShardcError
from shardc.mesh import Mesh
from shardc.placement import Layout
from shardc.program import Buffer, Param, Program
from shardc.runtime.flat import Run, elements
from shardc.runtime.weights import check_names

_FORMAT = 1
_OURS = re.compile(r"manifest\.json|\.metadata|__\d+_\d+\.distcp")


@dataclass(frozen=True)
class Part:
    """This rank's part of a global tensor, as torch.distributed.checkpoint sees it.

    run: local is 1-d, this stretch of the flattened local part; None: it is the local part. replicas: the axes whose ranks have the same.
    copy: a rank of another pipeline stage has the same, and writes it.
    """

    local: Tensor
    shape: tuple[int, ...]
    layout: Layout = field(default_factory=Layout)
    run: Run | None = None
    replicas: tuple[str, ...] = ()
    copy: bool = False

    def boxes(self, mesh: Mesh, coords: Mapping[str, int]) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """(place in the global tensor, what is there: a view of the local tensor)."""
        local = self.local.detach()
        if self.run is None and 0 in self.shape:  # nothing to write, but its name must be known
            yield ChunkStorageMetadata(torch.Size([0] * len(self.shape)), torch.Size(local.shape)), local
            return
        if self.run is None:
            for box in self.layout.boxes(self.shape, mesh, coords):
                yield _place(box), local[tuple(slice(a, a + n) for a, _, n in box)]
            return
        for stretch in self.run.boxes():
            first, count = elements(stretch, self.run.shape)
            held = local[first - self.run.start :][:count].view([n for _, n in stretch])
            for box in self.layout.boxes(self.shape, mesh, coords):
                common = [_common(mine, has) for mine, has in zip(stretch, box, strict=True)]
                if all(n > 0 for _, _, n in common):
                    yield _place(common), held[tuple(slice(a, a + n) for a, _, n in common)]

    def items(self, key: str, mesh: Mesh, coords: Mapping[str, int]) -> list[WriteItem]:
        """What this rank, at `coords`, writes of it: nothing if another replica does."""
        if self.copy or any(coords[a] for a in self.replicas):
            return []
        properties, size = TensorProperties(dtype=self.local.dtype), torch.Size(self.shape)
        return [
            WriteItem(MetadataIndex(key, box.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(box, properties, size))
            for box, _ in self.boxes(mesh, coords)
        ]


def _place(box: Iterable[tuple[int, int, int]]) -> ChunkStorageMetadata:
    found = list(box)
    return ChunkStorageMetadata(torch.Size([g for _, g, _ in found]), torch.Size([n for _, _, n in found]))


def _common(stretch: tuple[int, int], box: tuple[int, int, int]) -> tuple[int, int, int]:
    """(start in the stretch, global start, length) of what a stretch (start, length) and a box (local start, global start, length) share."""
    (a, n), (b, g, m) = stretch, box
    start, stop = max(a, b), min(a + n, b + m)
    return start - a, g + start - b, stop - start


class _Saving(DefaultSavePlanner):
    """Looks tensors up in our parts. The plan is made by `save`."""

    def __init__(self, parts: Mapping[str, Part], mesh: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts, self.mesh = parts, mesh

    def lookup_object(self, index: MetadataIndex) -> Any:
        return _box(self.parts[index.fqn], self.mesh, index)


class _Loading(DefaultLoadPlanner):
    """The same for reading. The plan is made by `load`."""

    def __init__(self, parts: Mapping[str, Part], mesh: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts, self.mesh = parts, mesh

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _box(self.parts[index.fqn], self.mesh, index)


def _box(part: Part, mesh: Any, index: MetadataIndex) -> Tensor:
    for box, there in part.boxes(mesh.layout, _coords(mesh)):
        if box.offsets == index.offset:
            return there
    raise AssertionError(f"{index} is no box of this rank")


def _coords(mesh: Any) -> dict[str, int]:
    return {a: mesh.coordinate(a) for a in mesh.layout.names}


# --- what is saved ----------------------------------------------------------------------------------------------------


Runs = Mapping[str, Run]
#: (parameter, name of a state of it, a tensor of its form) -> a tensor to fill
Room = Callable[[Any, str, Tensor], Tensor]


def _replicas(program: Program, layout: Layout, cut: Iterable[str] = ()) -> tuple[str, ...]:
    """The axes whose ranks hold the same."""
    split = {a for a, _ in layout.shards()} | set(cut) | {program.axis}
    return tuple(a for a in program.mesh.names if a not in split)


def _cut(program: Program, p: Param) -> tuple[str, ...]:
    """The axes over which ZeRO keeps it in stretches."""
    bucket = program.bucket(p)
    return program.mesh.parts(bucket.shard) if bucket is not None and bucket.zero else ()


def _part(program: Program, p: Param, x: Tensor, run: Run | None, mesh: Any) -> Part:
    cut = _cut(program, p) if run is not None else ()
    return Part(x, p.shape, p.layout, run, _replicas(program, p.layout, cut), _copied(program, p, mesh))


def _copied(program: Program, x: Param | Buffer, mesh: Any) -> bool:
    """Is a rank of another pipeline stage the first that has it?"""
    return bool(program.axis) and mesh.coordinate(program.axis) != program.holders(x)[0]


def _model_parts(program: Program, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], runs: Runs, mesh: Any) -> dict[str, Part]:
    parts = {f"model.{p.fqn}": _part(program, p, params[p.name], runs.get(p.name), mesh) for p in program.params if p.name in params}
    return parts | {
        f"model.{b.fqn}": Part(buffers[b.name], b.shape, b.layout, None, _replicas(program, b.layout), _copied(program, b, mesh))
        for b in _kept(program) if b.name in buffers
    }  # fmt: skip


def _kept(program: Program) -> list[Buffer]:
    return [b for b in program.buffers if b.fqn and (b.persistent or b.updated)]


def _groups(program: Program, params: Mapping[str, Tensor], optimizer: Optimizer) -> list[list[Param]]:
    """The program's parameters in the optimizer's groups."""
    known = {id(params[p.name]): p for p in program.params if p.name in params}
    for group in optimizer.param_groups:
        for x in group["params"]:
            if id(x) not in known:
                raise ShardcError(
                    f"the optimizer holds a tensor of shape {list(x.shape)} that is no parameter of the program",
                    fix="make the optimizer from the parameters that shardc gives it",
                )  # fmt: skip
    return [[known[id(x)] for x in group["params"]] for group in optimizer.param_groups]


def _optimizer_state(
    program: Program, params: Mapping[str, Tensor], optimizer: Optimizer, runs: Runs, mesh: Any
) -> tuple[dict[str, Part], dict[str, Any]]:
    """Tensors of the optimizer's state as parts, and all the rest of it as JSON-able values."""
    parts: dict[str, Part] = {}
    numbers: dict[str, dict[str, Any]] = {}
    groups = _groups(program, params, optimizer)
    for p in (p for group in groups for p in group):
        local, run = params[p.name], runs.get(p.name)
        if run is not None and not run.size:
            continue  # of a stretch without elements there is no state, or none that means anything
        # a number is the same on all ranks; the first that holds some of the parameter writes it
        first = run is None or not run.start
        whole = _replicas(program, Layout(), _cut(program, p) if run is not None else ())
        for name, x in optimizer.state.get(local, {}).items():
            if not isinstance(x, Tensor):
                numbers.setdefault(p.fqn, {})[name] = x
            elif x.shape == local.shape:
                parts[f"optimizer.{p.fqn}.{name}"] = _part(program, p, x, run, mesh)
            elif x.dim() == 0 or (run is None and not p.layout.shards()):
                if first:
                    parts[f"optimizer.{p.fqn}.{name}"] = Part(x, tuple(x.shape), replicas=whole, copy=_copied(program, p, mesh))
            else:
                raise ShardcError(
                    f"the optimizer's state {name!r} of shape {list(x.shape)} does not lie like its parameter, {list(local.shape)}",
                    where=p.fqn, fix="use an optimizer whose state has the parameter's shape (SGD, Adam, AdamW, ...)",
                )  # fmt: skip
    facts = []
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        hyper = {k: x.item() if isinstance(x, Tensor) else x for k, x in group.items() if k not in ("params", "param_names")}
        facts.append({**hyper, "params": [p.fqn for p in members]})
    return parts, {"class": type(optimizer).__name__, "groups": facts, "numbers": numbers}


def save(
    folder: str | Path, program: Program, mesh: Any, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor],
    optimizer: Optimizer | None = None, extra: Mapping[str, Any] | None = None, *, runs: Runs | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint that any mesh can load. Collective; all ranks must see the same file system.

    params, buffers: this rank's, by placeholder name. optimizer: over these params; its step counts, moments, hyperparameters.
    runs: of which params this rank has a stretch of the flattened local part (ZeRO), and which.
    extra: JSON-able values of the caller's: step, seed, a scheduler's state_dict; of each, what the first rank that has it says (a stage
    without anything to train has no scheduler). An existing checkpoint is replaced at the end; raises ShardcError for a folder with anything else.
    """
    folder = Path(folder).absolute()
    _check_free(folder)  # by every rank, and before any of them changes something
    work = folder.with_name(f".{folder.name}.saving")
    parts = _model_parts(program, params, buffers, runs or {}, mesh)
    manifest: dict[str, Any] = {
        "format": _FORMAT, "model": program.meta.get("model", ""), "mesh": dict(mesh.layout.axes), "extra": dict(extra or {})
    }  # fmt: skip
    if optimizer is not None:
        more, manifest["optimizer"] = _optimizer_state(program, params, optimizer, runs or {}, mesh)
        parts |= more
    _json(manifest)  # what cannot be written is found before anything is
    if mesh.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    mesh.barrier()
    planner, writer = _Saving(parts, mesh), FileSystemWriter(work)
    plan = SavePlan([i for key, part in parts.items() for i in part.items(key, mesh.layout, _coords(mesh))])
    mine = writer.prepare_global_plan([SavePlan([])] * mesh.rank + [plan])[-1]  # names its file after the rank
    results = writer.write_data(mine, planner).wait()
    _results(work, mesh.rank).write_bytes(pickle.dumps((plan, results, manifest)))
    mesh.barrier()
    if mesh.rank == 0:
        every = [pickle.loads(_results(work, r).read_bytes()) for r in range(mesh.layout.world)]
        _, metadata = planner.create_global_plan([p for p, _, _ in every])
        writer.finish(metadata, [r for _, r, _ in every])
        for _, _, told in reversed(every):
            manifest["extra"] |= told["extra"]
        if facts := [told["optimizer"] for _, _, told in every if "optimizer" in told]:
            manifest["optimizer"] = _together(facts)
        for r in range(mesh.layout.world):
            _results(work, r).unlink()
        (work / "manifest.json").write_text(_json(manifest))
        _replace(folder, work)
    mesh.barrier()


def _together(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """The optimizer's facts from those of all ranks: the first rank that has a number says it; groups have the parameters of all stages."""
    numbers: dict[str, Any] = {}
    for found in reversed(facts):
        for fqn, values in found["numbers"].items():
            numbers[fqn] = {**numbers.get(fqn, {}), **values}
    groups = [
        {**group, "params": list(dict.fromkeys(n for found in facts for n in found["groups"][i]["params"]))}
        for i, group in enumerate(facts[0]["groups"])
    ]
    return {**facts[0], "groups": groups, "numbers": numbers}


def _check_free(folder: Path) -> None:
    """May what is in the folder be deleted?"""
    if not folder.exists():
        return
    others = sorted(f.name for f in folder.iterdir() if not _OURS.fullmatch(f.name)) if folder.is_dir() else [folder.name]
    if others:
        what = f"the checkpoint would replace what is there, and that is more than a checkpoint: {', '.join(others[:5])}"
        raise ShardcError(what, where=str(folder), fix=f"name a folder of its own, such as {folder.name}/checkpoint")


def _results(work: Path, rank: int) -> Path:
    return work / f".results-{rank}"


def _replace(folder: Path, work: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
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
        ) from e  # fmt: skip


# --- loading ----------------------------------------------------------------------------------------------------------


def load(
    folder: str | Path, program: Program, mesh: Any, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor],
    optimizer: Optimizer | None = None, *, runs: Runs | None = None, room: Room | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Fill params, buffers and the optimizer in place from a checkpoint of any mesh; returns its `extra`. No communication.

    room: where the optimizer's state is to be; default: on its parameter's device.

    Raises ShardcError, naming them, if the checkpoint has other parameters, shapes or another optimizer, before anything changes.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        reader = FileSystemReader(folder)
        metadata = reader.read_metadata()
    except (FileNotFoundError, NotADirectoryError) as e:
        what = "there is no checkpoint in this folder"
        raise ShardcError(what, where=str(folder), fix="pass a folder that shardc saved to") from e
    stored = {k: x for k, x in metadata.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)}
    parts = _model_parts(program, params, buffers, runs or {}, mesh)
    errors = Errors()
    have = {k.removeprefix("model."): tuple(x.size) for k, x in stored.items() if k.startswith("model.")}
    wanted: list[Param | Buffer] = [*program.params, *_kept(program)]
    want = {x.fqn: x.shape for x in wanted}
    check_names(errors, want, have, want, f"the checkpoint {folder.name}")
    states: dict[str, dict[str, Any]] = {}
    if optimizer is not None:
        with errors.collect():
            states = _optimizer_parts(program, params, optimizer, manifest, stored, parts, str(folder), runs or {}, room, mesh)
    errors.raise_any()

    planner = _Loading(parts, mesh)
    coords = _coords(mesh)
    plan = LoadPlan([
        item for key, part in parts.items()
        for item in create_read_items_for_chunk_list(key, stored[key], [box for box, _ in part.boxes(mesh.layout, coords)])
    ])  # fmt: skip
    reader.set_up_storage_reader(metadata, mesh.rank == 0)
    reader.read_data(reader.prepare_local_plan(plan), planner).wait()
    if optimizer is not None:
        _fill_optimizer(program, params, optimizer, manifest["optimizer"], states)
    found: dict[str, Any] = manifest["extra"]
    return found


def _optimizer_parts(
    program: Program, params: Mapping[str, Tensor], optimizer: Optimizer, manifest: Mapping[str, Any],
    stored: Mapping[str, TensorStorageMetadata], parts: dict[str, Part], folder: str, runs: Runs, room: Room | None, mesh: Any,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """New state, to be filled, for every parameter of the optimizer: {fqn: {name: tensor or number}}. Adds tensors to `parts`."""
    facts = manifest.get("optimizer")
    if facts is None:
        fix = "save it with its optimizer, or load it without one"
        raise ShardcError("the checkpoint has no optimizer state", where=folder, fix=fix)
    if facts["class"] != type(optimizer).__name__:
        raise ShardcError(
            f"the checkpoint is of the optimizer {facts['class']}, not {type(optimizer).__name__}",
            where=folder, fix=f"use {facts['class']}, or load it without an optimizer",
        )  # fmt: skip
    members = {p.fqn: p for group in _groups(program, params, optimizer) for p in group}
    errors = Errors()
    saved = {n: stored[f"model.{n}"].size for group in facts["groups"] for n in group["params"] if f"model.{n}" in stored}
    elsewhere = {p.fqn for p in program.params if p.name not in params}
    check_names(errors, {n: p.shape for n, p in members.items()}, saved, elsewhere | set(members), "the checkpoint's optimizer")
    errors.raise_any()
    states: dict[str, dict[str, Any]] = {n: dict(facts["numbers"].get(n, {})) for n in members}
    for key, tensor in stored.items():
        fqn, _, name = key.removeprefix("optimizer.").rpartition(".")
        if not key.startswith("optimizer.") or fqn not in members:
            continue
        p, local = members[fqn], params[members[fqn].name]
        alike = tuple(tensor.size) == p.shape and (bool(p.shape) or name != "step")
        form = torch.empty(local.shape if alike else tensor.size, dtype=tensor.properties.dtype, device="meta")
        x = room(local, name, form) if room and name != "step" else torch.zeros_like(form, device="cpu" if name == "step" else local.device)
        states[fqn][name] = x
        parts[key] = _part(program, p, x, runs.get(p.name), mesh) if alike else Part(x, tuple(tensor.size))
    return states


def _fill_optimizer(
    program: Program, params: Mapping[str, Tensor], optimizer: Optimizer, facts: Mapping[str, Any],
    states: Mapping[str, dict[str, Any]],
) -> None:  # fmt: skip
    """Through the optimizer's own load_state_dict, which knows where its state lies and in which dtype."""
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for i, (group, members) in enumerate(zip(optimizer.param_groups, _groups(program, params, optimizer), strict=True)):
        # by name; a group of which this rank has nothing, by number
        alike = [g for g in facts["groups"] if members[0].fqn in g["params"]] if members else facts["groups"][i : i + 1]
        hyper: dict[str, Any] = alike[0] if alike else {}
        numbered = list(range(len(state), len(state) + len(members)))
        state |= dict(zip(numbered, (states[p.fqn] for p in members), strict=True))
        settled = {k: _like(group.get(k), x) for k, x in hyper.items()}
        groups.append({**{k: x for k, x in group.items() if k != "params"}, **settled, "params": numbered})
    optimizer.load_state_dict({"state": {i: s for i, s in state.items() if s}, "param_groups": groups})


def _like(now: Any, saved: Any) -> Any:
    """JSON knows no tuples and no tensors (a learning rate may be one)."""
    if isinstance(now, Tensor):
        return torch.full_like(now, saved)
    return tuple(saved) if isinstance(now, tuple) and isinstance(saved, list) else saved
