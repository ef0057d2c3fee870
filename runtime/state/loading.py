"""Read checkpoints of any mesh.

A rank reads the slices that overlap its own boxes, two at a time: directly into the tensor if a slice is exactly its
box, else into a buffer of at most one slice. Every slice is checked against its digest. Ranks agree on the checkpoint
of a folder to load, and, after each of `check`, `read` and `finish`, that it succeeded everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from shardc.errors import Errors, ShardcError
from shardc.ir.stored import Buffer, Param
from shardc.runtime.mesh import agreement
from shardc.runtime.state import disk_calls
from shardc.runtime.state.boxes import Box, Part, kept
from shardc.runtime.state.checkpoint_folder import (
    DamagedError,
    check_file,
    damage,
    generations,
    is_checkpoint,
    none_in,
    read_index,
    read_slice,
    remedy,
)
from shardc.runtime.state.checkpoint_index import Index, Slice
from shardc.runtime.state.owners import RankState
from shardc.runtime.state.saving_optimizer import Room, fill, room_for
from shardc.runtime.state.sources import check_tensors

READERS = 2  # slices that a rank reads at once: one is checked while another comes from the disk
_SHOWN = 4  # damaged slices that an error names


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
    for path in candidates(disk_calls.expanded(folder), mesh, last_good=last_good):
        loading = _Loading(path, held, room, accept)
        try:
            _together(mesh, path, loading.check)
            changing()
            _together(mesh, path, loading.read)
            _together(mesh, path, loading.finish)
        except DamagedError as e:
            if not last_good:
                raise
            problems.append(ShardcError(e.what, where=e.where))
            continue
        return loading.index.extra
    fix = "copy one again from its source"
    raise DamagedError("all checkpoints are damaged", where=str(folder), fix=fix, errors=problems)


def candidates(folder: Path, mesh: Any, *, last_good: bool) -> list[Path]:
    """Return the checkpoints to try, as rank 0 sees them: file systems may show other ranks something else."""
    names = [str(path) for path in _found(folder)] if mesh.rank == 0 else []
    paths = [Path(name) for name in json.loads(agreement.text_of_first(mesh, json.dumps(names)))]
    if not paths:
        raise none_in(folder)
    return paths if last_good else paths[:1]


def _found(folder: Path) -> list[Path]:
    if is_checkpoint(folder):
        return [folder, *(g.path for g in generations(folder.parent) if g.path.name != folder.name)]
    return [g.path for g in generations(folder)]


def _together(mesh: Any, path: Path, work: Any) -> None:
    """Run it on all ranks; if any fails, all raise.

    A failing rank raises its own error, the others the first one's text.
    """
    error, report = None, ""
    try:
        work()
    except Exception as e:  # raised below, when all ranks know
        error = e
        report = json.dumps([isinstance(e, DamagedError), _words(e), e.fix if isinstance(e, ShardcError) else ""])
    reports = agreement.texts(mesh, report)
    failed = {rank: json.loads(text) for rank, text in enumerate(reports) if text}
    if not failed:
        return
    _, text, fix = next(iter(failed.values()))
    who = f"found by {mesh.layout.named(*failed)}"
    if any(damaged for damaged, _, _ in failed.values()):
        errors = error.errors if isinstance(error, DamagedError) else ()
        fault = "; ".join(_words(e) for e in errors[:_SHOWN]) if errors else text
        more = f"; and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
        raise DamagedError(f"the checkpoint is damaged: {fault}{more} ({who})", where=str(path), fix=remedy(path))
    if error is not None:
        raise error
    raise ShardcError(f"{text} ({who})", where=str(path), fix=fix or "see the error of that rank")


def _words(error: BaseException) -> str:
    if isinstance(error, ShardcError):
        return "; ".join(f"{e.where}: {e.what}" if e.where else e.what for e in error.errors)
    return f"{type(error).__name__}: {error}"


@dataclass
class _Loading:
    """One checkpoint while one rank loads it."""

    path: Path
    held: RankState
    room: Room | None
    accept: Callable[[Mapping[str, Any]], None]
    index: Index = field(default_factory=lambda: Index("", 0, "", "", {}, {}, None))
    _parts: dict[str, Part] = field(default_factory=dict)
    _states: dict[str, dict[str, Any]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise if the checkpoint does not fit. Changes nothing."""
        index = self.index = read_index(self.path)
        held, program, mesh, stored = self.held, self.held.program, self.held.mesh, index.tensors
        self._parts = held.model_parts()
        errors = Errors()
        have = {k.removeprefix("model."): x.shape for k, x in stored.items() if k.startswith("model.")}
        entries: list[Param | Buffer] = [*program.params, *kept(program)]
        want = {n: shape for x in entries for n, shape in x.shapes.items() if x.members or n == x.fqn}
        check_tensors(errors, want, have, want, f"the checkpoint {self.path.name}")
        errors.raise_any()  # its optimizer is of the same tensors
        for number in range(mesh.rank, len(index.files), mesh.layout.world):  # ranks share the files
            check_file(self.path, index, number)
        if held.optimizer is not None:
            self._states = room_for(held, held.optimizer, index, self._parts, str(self.path), self.room)
        self.accept(index.extra)

    def read(self) -> None:
        """Read every slice that this rank needs, in file order. Raises DamagedError, naming damaged slices."""
        layout, rank = self.held.mesh.layout, self.held.mesh.rank
        targets: dict[Slice, tuple[str, list[tuple[Box, Tensor]]]] = {}
        for key, part in self._parts.items():
            for box in part.boxes(layout, rank):
                for s in self.index.tensors[key].overlapping(box.offset, box.shape):
                    targets.setdefault(s, (key, []))[1].append((box, box.of(part.local.detach())))
        errors: list[ShardcError] = []
        with ThreadPoolExecutor(READERS) as readers:
            for number in sorted({s.file for s in targets}):
                slices = sorted((s for s in targets if s.file == number), key=lambda s: s.start)
                file = self.path / self.index.files[number].name
                with disk_calls.opened(file) as descriptor:

                    def whole(s: Slice, descriptor: int = descriptor) -> bool:
                        key, boxes = targets[s]
                        return read_slice(descriptor, self.index.tensors[key], s, boxes)

                    good = list(readers.map(whole, slices))
                errors += [damage(file, targets[s][0], s) for s, fine in zip(slices, good, strict=True) if not fine]
        if errors:
            raise DamagedError("damaged", errors=errors)

    def finish(self) -> None:
        optimizer, facts = self.held.optimizer, self.index.optimizer
        if optimizer is not None and facts is not None:
            fill(self.held, optimizer, facts, self._states)
