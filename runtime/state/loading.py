"""Read checkpoints of any mesh.

A rank reads the slices that overlap its own boxes, two at a time: directly into the tensor if a slice is exactly its
box, else into a buffer of at most one slice. Every slice is checked against its digest. Ranks agree on the checkpoint
of a folder to load, and, after each of `check`, `read` and `finish`, that it succeeded everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardc.errors import Errors, ShardcError
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.runtime.mesh import agreement
from shardc.runtime.state import disk_calls
from shardc.runtime.state.boxes import Box, Part, Runs, kept, model_parts
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
from shardc.runtime.state.owners import Owners
from shardc.runtime.state.saving_optimizer import Room, fill, room_for
from shardc.runtime.state.sources import check_names

READERS = 2  # slices that a rank reads at once: one is checked while another comes from the disk
_SHOWN = 4  # damaged slices that an error names


def load(
    folder: str | Path,
    program: Program,
    mesh: Any,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    optimizer: Optimizer | None = None,
    *,
    runs: Runs | None = None,
    owners: Owners | None = None,
    room: Room | None = None,
    last_good: bool = False,
    accept: Callable[[Mapping[str, Any]], None] = lambda extra: None,
    changing: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Fill params, buffers and optimizer in place from any mesh's checkpoint; return `extra`. Collective.

    folder: where checkpoints were saved (the last one is read), or one checkpoint. last_good: if it is damaged, read
    the last one that is not.
    owners: their state is filled, too.
    room: where to put the optimizer's state; default: on its parameter's device. accept: raises if `extra` does not
    fit.
    changing: called before each try changes anything.

    Raises ShardcError, on all ranks, naming them, if the checkpoint has other parameters, shapes or another optimizer,
    before anything changes; DamagedError if a file is not what was saved: what was read until then is changed.
    """
    problems: list[ShardcError] = []
    state = runs or {}, owners or Owners(), room, accept
    for path in candidates(disk_calls.expanded(folder), mesh, last_good=last_good):
        loading = _Loading(path, program, mesh, params, buffers, optimizer, *state)
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


def candidates(folder: Path, mesh: Any, *, last_good: bool) -> Iterator[Path]:
    """Yield the checkpoints to try, as rank 0 sees them: file systems may show other ranks something else."""
    paths = _found(folder) if mesh.rank == 0 else []
    number = 0
    while name := agreement.text_of_rank(mesh, str(paths[number]) if number < len(paths) else ""):
        yield Path(name)
        number += 1
        if not last_good:
            return
    if not number:
        raise none_in(folder)


def _found(folder: Path) -> list[Path]:
    if is_checkpoint(folder):
        return [folder, *(g.path for g in generations(folder.parent) if g.path.name != folder.name)]
    return [g.path for g in generations(folder)]


def _together(mesh: Any, path: Path, work: Any) -> None:
    """Run it on all ranks; if any fails, all raise.

    A failing rank raises its own error, the others the first one's text.
    """
    error: BaseException | None = None
    try:
        work()
    except Exception as e:  # raised below, when all ranks know
        error = e
    damaged, _ = agreement.failures(mesh, "" if isinstance(error, DamagedError) else None)
    ranks, text = agreement.failures(mesh, None if error is None else _words(error))
    if not ranks:
        return
    fix = agreement.text_of_rank(mesh, error.fix if isinstance(error, ShardcError) else "", ranks[0])
    who = f"found by rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
    if damaged:
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
    program: Program
    mesh: Any
    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    optimizer: Optimizer | None
    runs: Runs
    owners: Owners
    room: Room | None
    accept: Callable[[Mapping[str, Any]], None]
    index: Index = field(default_factory=lambda: Index("", 0, "", "", {}, {}, None))
    _parts: dict[str, Part] = field(default_factory=dict)
    _states: dict[str, dict[str, Any]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise if the checkpoint does not fit. Changes nothing."""
        index = self.index = read_index(self.path)
        program, stored = self.program, index.tensors
        self._parts = model_parts(program, self.params, self.buffers, self.runs, self.mesh)
        errors = Errors()
        have = {k.removeprefix("model."): x.shape for k, x in stored.items() if k.startswith("model.")}
        entries: list[Param | Buffer] = [*program.params, *kept(program)]
        want = {n: shape for x in entries for n, shape in x.shapes.items() if x.members or n == x.fqn}
        check_names(errors, want, have, want, f"the checkpoint {self.path.name}")
        errors.raise_any()  # its optimizer is of the same tensors
        for number in range(self.mesh.rank, len(index.files), self.mesh.layout.world):  # ranks share the files
            check_file(self.path, index, number)
        if self.optimizer is not None:
            self._states = room_for(
                program,
                self.params,
                self.optimizer,
                index,
                self._parts,
                str(self.path),
                self.runs,
                self.room,
                self.mesh,
                self.owners,
            )
        self.accept(index.extra)

    def read(self) -> None:
        """Read every slice that this rank needs, in file order. Raises DamagedError, naming damaged slices."""
        layout, rank = self.mesh.layout, self.mesh.rank
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
        if self.optimizer is not None and self.index.optimizer is not None:
            fill(self.program, self.params, self.optimizer, self.index.optimizer, self._states, self.owners)
