"""Read checkpoints of any mesh.

A rank reads the slices that overlap its own boxes: directly into the tensor if all of a slice goes there in order, else
into a buffer of at most one slice. Every slice is checked against its digest. Ranks agree on the checkpoint of a folder
to load, and, after each of `check` and `read`, that it succeeded everywhere.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from shardc.errors import Errors, ShardcError
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.runtime.mesh import agreement
from shardc.runtime.state import checkpoint_folder
from shardc.runtime.state.boxes import Part, kept
from shardc.runtime.state.checkpoint_folder import DamagedError, remedy, words
from shardc.runtime.state.checkpoint_index import Index
from shardc.runtime.state.fitting import check_tensors
from shardc.runtime.state.owners import RankState
from shardc.runtime.state.pretrained import best_names
from shardc.runtime.state.saving_optimizer import Room, fill, room_for
from shardc.runtime.storage import disk_calls

_SHOWN = 4  # damaged slices that an error names
T = TypeVar("T")


def load(
    folder: str | Path,
    held: RankState,
    *,
    room: Room | None = None,
    last_good: bool = False,
    accept: Callable[[Mapping[str, Any]], None] = lambda extra: None,
    changing: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Fill params, buffers and optimizer in place from any mesh's checkpoint; return `extra`. Collective.

    folder: where checkpoints were saved (the last one is read), or one checkpoint. last_good: if it is damaged, read
    the last one that is not.
    room: where to put the optimizer's state; default: on its parameter's device. accept: raises if `extra` does not
    fit.
    changing: called before each try changes anything.

    Raises ShardcError, on all ranks, naming them, if the checkpoint has other parameters, shapes or another optimizer,
    before anything changes; DamagedError if a file is not what was saved: what was read until then is changed.
    """
    problems, mesh = list[ShardcError](), held.mesh
    for path in _candidates(disk_calls.expanded(folder), mesh, last_good=last_good):
        try:
            fit = _together(mesh, path, functools.partial(_checked, path, held, room, accept))
            changing()
            _together(mesh, path, functools.partial(_read, path, held, *fit))
        except DamagedError as e:
            if not last_good:
                raise
            problems.append(ShardcError(e.what, where=e.where))
            continue
        return fit[0].extra
    fix = "copy one again from its source"
    raise DamagedError("all checkpoints are damaged", where=str(folder), fix=fix, errors=problems)


def _candidates(folder: Path, mesh: Any, *, last_good: bool) -> list[Path]:
    """Return the checkpoints to try, as rank 0 sees them: file systems may show other ranks something else."""
    present = [g.path for g in checkpoint_folder.checkpoints_in(folder)]
    if present == [folder]:
        present += [g.path for g in checkpoint_folder.generations(folder.parent) if g.path != folder]
    names = agreement.text_of_first(mesh, json.dumps([*map(str, present)]))
    paths = [disk_calls.expanded(name) for name in json.loads(names)]
    if not paths:
        raise checkpoint_folder.none_in(folder)
    return paths if last_good else paths[:1]


def _together(mesh: Any, path: Path, work: Callable[[], T]) -> T:
    """Return what `work` returns, if it fails on no rank; else all raise.

    A failing rank raises its own error, the others the first one's text.
    """
    error, report = None, ""
    try:
        result = work()
    except Exception as e:  # raised below, when all ranks know
        error = e
        report = json.dumps([isinstance(e, DamagedError), words(e), e.fix if isinstance(e, ShardcError) else ""])
    reports = agreement.texts(mesh, report)
    failed = {rank: json.loads(text) for rank, text in enumerate(reports) if text}
    if not failed:
        return result
    _, text, fix = next(iter(failed.values()))
    who = f"found by {mesh.layout.named(*failed)}"
    if any(damaged for damaged, _, _ in failed.values()):
        errors = error.errors if isinstance(error, DamagedError) else ()
        fault = "; ".join(words(e) for e in errors[:_SHOWN]) if errors else text
        more = f"; and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
        raise DamagedError(f"the checkpoint is damaged: {fault}{more} ({who})", where=str(path), fix=remedy(path))
    if error is not None:
        raise error
    raise ShardcError(f"{text} ({who})", where=str(path), fix=fix or "see the error of that rank")


#: (the index of a checkpoint, the parts to fill, the optimizer's states by parameter).
_Fit = tuple[Index, dict[str, Part], dict[str, dict[str, Any]]]


def _checked(path: Path, held: RankState, room: Room | None, accept: Callable[[Mapping[str, Any]], None]) -> _Fit:
    """Return what a checkpoint fills; raise if it does not fit. Changes nothing."""
    index, program, mesh, parts = checkpoint_folder.read_index(path), held.program, held.mesh, held.model_parts()
    errors, states = Errors(), dict[str, dict[str, Any]]()
    if not index.program:  # no program of ours was saved: another library's
        index = _of_others(index, program, path)
        if "loaders" not in index.extra:
            mesh.note("data: from the beginning, as the checkpoint does not say where they were")
    have = {k.removeprefix("model."): x.shape for k, x in index.tensors.items() if k.startswith("model.")}
    entries: list[Param | Buffer] = [*program.params, *kept(program)]
    want = {n: shape for x in entries for n, shape in x.shapes.items() if x.members or n == x.fqn}
    check_tensors(errors, want, have, want, f"the checkpoint {path.name}")
    errors.raise_any()  # its optimizer is of the same tensors
    for number in range(mesh.rank, len(index.files), mesh.layout.world):  # ranks share the files
        checkpoint_folder.check_file(path, index, number)
    if held.optimizer is not None:
        states = room_for(held, held.optimizer, index, parts, str(path), room)
    accept(index.extra)
    return index, parts, states


def _of_others(index: Index, program: Program, path: Path) -> Index:
    """Give the tensors of another library's checkpoint the program's names, as `weights` find them."""
    entries: list[Param | Buffer] = [*program.params, *kept(program)]
    known = {n: n if x.members else x.fqn for x in entries for n in (x.members or x.names)}
    model = {k.removeprefix("model."): x for k, x in index.tensors.items() if k.startswith("model.")}
    names = best_names(known, model)
    tensors = {f"model.{known[n]}": model[k] for n, k in reversed(names.items())}
    tensors |= {f"model.{k}": x for k, x in model.items() if k not in names.values()}
    if (facts := index.optimizer) is not None:
        stepped = dict.fromkeys(n for group in facts["groups"] for n in group["params"])
        if stepped and all(n.isdigit() for n in stepped):
            fix = "save it with torch.distributed.checkpoint.state_dict.get_state_dict, or begin from --weights"
            raise ShardcError("its optimizer's state is by numbers, not by names", where=str(path), fix=fix)
        ours = {k: known[n] for n, k in best_names(known, stepped).items()}
        for key, x in index.tensors.items():
            theirs, _, state = key.removeprefix("optimizer.").rpartition(".")
            if key.startswith("optimizer.") and theirs in ours:
                tensors[f"optimizer.{ours[theirs]}.{state}"] = x
        groups = [{**g, "params": [ours[n] for n in g["params"] if n in ours]} for g in facts["groups"]]
        facts = {**facts, "groups": groups}
    return replace(index, tensors=tensors, optimizer=facts)


def _read(
    path: Path, held: RankState, index: Index, parts: Mapping[str, Part], states: Mapping[str, dict[str, Any]]
) -> None:
    """Read every slice that this rank needs. Raises DamagedError, naming damaged slices."""
    layout, rank = held.mesh.layout, held.mesh.rank
    boxes = ((k, box, x.local.detach()) for k, x in parts.items() for box in x.boxes(layout, rank))
    if errors := checkpoint_folder.read_boxes(path, index, boxes):
        raise DamagedError("damaged", errors=errors)
    if held.optimizer is not None and index.optimizer is not None:
        fill(held, held.optimizer, index.optimizer, states)
