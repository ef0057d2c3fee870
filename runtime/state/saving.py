"""Write checkpoints that any mesh can load, by all ranks together.

    every rank   plans what it writes ─► its files, fsynced ─► part-RANK.json, an index of its files ─┐ agree
    rank 0                       index.json from all parts, fsynced ─► one rename ─► prune ───────────┴ agree
                                 (in a store there is no rename: the index, written last, makes it a checkpoint)

Ranks meet only to agree: an error on one of them (a full disk, an I/O error) is an error on all, and older checkpoints
are unchanged. All files go into a folder that gets its name at the very end (checkpoint_folder.py). `Save` does the
work of one rank.

In the background, the tensors are first copied to host memory, and a thread does the rest. The thread makes no
collective: other ranks' main threads may be in the middle of a step. So it only records its result, and main threads
agree on it when they are between two steps (`Saves.poll`).
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.mesh import agreement
from shardc.runtime.state import checkpoint_folder, checkpoint_index
from shardc.runtime.state.boxes import Box, Numbers
from shardc.runtime.state.checkpoint_folder import WORK, Known, SavingError, words
from shardc.runtime.state.checkpoint_index import DIGEST, File, Index, Slice, Stored, json_number
from shardc.runtime.state.owners import RankState
from shardc.runtime.state.saving_optimizer import combined, state_parts
from shardc.runtime.state.tensor_file import bytes_of, header, stored_as
from shardc.runtime.storage import disk_calls
from shardc.runtime.storage.urls import Url

# --- what one rank writes: slices of its tensors, and the files that hold them

#: Maximal bytes of a slice, which is read, checked and held at once.
SLICE = 64 << 20


@dataclass
class Piece:
    """A slice that this rank writes: a box of the tensor `key`.

    local: returns a tensor that has the box. copy: its bytes in host memory, which are written instead.
    """

    key: str
    dtype: torch.dtype
    box: Box
    local: Callable[[], Tensor]
    copy: Tensor | None = None

    @property
    def kind(self) -> str:
        """The kind of its file: "model", "optimizer"."""
        return self.key.partition(".")[0]

    def read(self) -> Tensor:
        return self.box.of(self.local()) if self.copy is None else self.copy


@dataclass
class Plan:
    """The tensors of this rank, and the slices that it writes.

    facts: model, program, mesh, extra, optimizer, as in `checkpoint_index.Index`.
    """

    facts: dict[str, Any]
    tensors: dict[str, Stored] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)

    def add(
        self, key: str, dtype: torch.dtype, shape: Numbers, boxes: Iterable[Box], local: Callable[[], Tensor]
    ) -> None:
        """Add a tensor, and the boxes of it that this rank writes, cut into slices that are not too large."""
        self.tensors[key] = Stored(dtype, shape)
        self.pieces += (Piece(key, dtype, part, local) for b in boxes for part in b.cut(dtype.itemsize, SLICE))

    def drafts(self, facts: Mapping[str, str]) -> dict[str, Draft]:
        """Return the files of this rank, by kind. facts: about the save, for their headers."""
        files: dict[str, Draft] = {}
        for kind in dict.fromkeys(p.kind for p in self.pieces):
            # wide dtypes first, so that each slice begins aligned for its dtype
            pieces = sorted((p for p in self.pieces if p.kind == kind), key=lambda p: -p.dtype.itemsize)
            entries = [(self._name(p), *stored_as(p.dtype, p.box.shape)) for p in pieces]
            head, starts = header(entries, facts)
            files[kind] = Draft(head, pieces, starts)
        return files

    def _name(self, piece: Piece) -> str:
        name, box = piece.key.partition(".")[2], piece.box
        if box.shape == self.tensors[piece.key].shape:
            return name
        return f"{name}[{','.join(f'{a}:{a + n}' for a, n in zip(box.offset, box.shape, strict=True))}]"


@dataclass
class Draft:
    """A file to write: its first bytes, and slices. starts: where each begins in it, and where it ends."""

    head: bytes
    pieces: list[Piece]
    starts: list[int]

    def copy_to_host(self) -> None:
        """Copy the slices to host memory, laid out as in the file, so that training may continue.

        Pinned if they come from a device: torch keeps pinned memory, and the next save reuses it.
        """
        first, *_, stop = self.starts
        tensors = [piece.read() for piece in self.pieces]
        devices = {x.device for x in tensors if x.device.type == "cuda"}
        memory = disk_calls.aligned(stop - first, first, pinned=bool(devices))
        for i, (piece, x) in enumerate(zip(self.pieces, tensors, strict=True)):
            piece.copy = memory[self.starts[i] - first : self.starts[i + 1] - first]
            piece.copy.copy_(x.detach().contiguous().view(-1).view(torch.uint8), non_blocking=bool(devices))
        for device in devices:
            torch.cuda.synchronize(device)


def planned(held: RankState, extra: Mapping[str, Any] | None = None) -> Plan:
    """Plan what this rank writes of what it holds: the parts that no other replica writes.

    Of the optimizer these are step counts, moments, hyperparameters. extra: JSON-able values of the caller: step, seed,
    a scheduler's state_dict; of each, the value of the first rank that has it (a stage without anything to train has
    no scheduler). Its "step" is the checkpoint's.
    """
    parts, settings, mesh = held.model_parts(), None, held.mesh
    if held.optimizer is not None:
        more, settings = state_parts(held, held.optimizer)
        parts |= more
    model, mesh_sizes = held.program.meta.get("model", ""), dict(mesh.layout.axes)
    facts = {"model": model, "program": program_hash(held.program), "mesh": mesh_sizes, "extra": dict(extra or {})}
    plan = Plan({**facts, "optimizer": settings})
    for key, part in parts.items():
        boxes = part.boxes(mesh.layout, mesh.rank) if part.written else ()
        plan.add(key, part.local.dtype, part.shape, boxes, part.local.detach)
    return plan


def program_hash(program: Program) -> str:
    """Return a hash of a program's tensors and their layouts, to distinguish runs."""
    stored = [(x.name, x.shape, str(x.dtype), str(x.layout)) for x in program.stored]
    return hashlib.sha256(repr((program.mesh.axes, program.microbatches, stored)).encode()).hexdigest()[:16]


# --- one save of one rank: its files, and on rank 0 the index of all and the rename that makes it visible


@dataclass
class Save:
    """One save of one rank. id: the same on all ranks; folder: that the user named.

    saved: the checkpoint has its name. done: bytes written. work_folder: where files are until all are complete.
    """

    mesh: Any
    folder: Path
    keep: int | None
    id: str
    known: Known
    plan: Plan = field(default_factory=lambda: Plan({}))
    drafts: dict[str, Draft] = field(default_factory=dict)
    step: int = 0
    error: BaseException | None = None
    committing: bool = False
    saved: bool = False
    done: int = 0
    nbytes: int = 0
    lock: disk_calls.Lock | None = None
    work_folder: Path = Path()
    _thread: threading.Thread | None = None

    def start(self, run: Callable[[], None], *, background: bool) -> None:
        """Run a function here or in a thread; keep its error in `.error`."""

        def guarded() -> None:
            try:
                run()
            except BaseException as e:  # raised again when all ranks meet
                self.error = e

        if background:
            self._thread = threading.Thread(target=guarded, name=f"save step {self.step}", daemon=True)
            self._thread.start()
        else:
            guarded()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    # --- what every rank does

    def prepare(self, plan: Callable[[], Plan], *, copy: bool) -> None:
        """Plan this rank's files. copy: copy their data to host memory. Rank 0 makes the folder to write into."""
        self.plan = plan()
        _check_plain(self.plan.facts)  # before anything is written
        self.step = int(self.plan.facts["extra"].get("step", 0))
        self.work_folder = self.folder / f"{WORK}{self.id}"
        self.drafts = self.plan.drafts({"checkpoint": self.id, "step": str(self.step)})
        self.nbytes = sum(draft.starts[-1] - draft.starts[0] for draft in self.drafts.values())
        if self.mesh.rank == 0:
            self._begin()
        for draft in self.drafts.values() if copy else ():
            draft.copy_to_host()

    def write(self) -> None:
        """Write this rank's files, and their index for rank 0."""
        files, tensors, rank = list[File](), self.plan.tensors, self.mesh.rank
        for kind, draft in self.drafts.items():
            name = f"{kind}-{rank:05d}.safetensors"
            file = disk_calls.new_file(self.work_folder / name)
            try:
                file.add(memoryview(draft.head))
                for piece, start in zip(draft.pieces, draft.starts, strict=False):
                    data = bytes_of(piece.read().to("cpu").contiguous())
                    written = Slice(len(files), start, piece.box.offset, piece.box.shape, DIGEST(data).hexdigest())
                    file.add(data)
                    tensors[piece.key] = tensors[piece.key].with_slices([written])
                    self.done += len(data)
                file.finish()
            finally:
                file.close()
            files.append(File(name, rank, draft.starts[-1], len(draft.head), hashlib.sha256(draft.head).hexdigest()))
        index = Index(id=self.id, step=self.step, files=tuple(files), tensors=tensors, **self.plan.facts)
        disk_calls.write_file(self._part(rank), checkpoint_index.to_bytes(index))

    def _part(self, rank: int) -> Path:
        return self.work_folder / f"part-{rank:05d}.json"

    # --- what rank 0 does

    def _begin(self) -> None:
        """Make the folder to write into. Raises SavingError if another process is saving there."""
        disk_calls.make_folder(self.folder)
        try:
            self.lock = disk_calls.Lock(self.folder / checkpoint_folder.LOCK)
        except BlockingIOError:
            fix = "use a separate folder for every run"
            raise SavingError("another process is saving to this folder", where=str(self.folder), fix=fix) from None
        if others := self.known.others(self.folder):
            fault = f"the folder has checkpoints that this run neither saved nor loaded ({', '.join(others[:3])}):"
            fault += " saving here would replace another run's checkpoints"
            fix = "load them to go on from there, save to another folder, or pass overwrite=True"
            raise SavingError(fault, where=str(self.folder), fix=fix)
        for path in checkpoint_folder.leftovers(self.folder):  # nobody else has the lock
            checkpoint_folder.remove(path)
        if isinstance(self.folder, Url):
            self.work_folder = checkpoint_folder.free_name(self.folder, self.step)
        disk_calls.make_folder(self.work_folder)

    def commit(self) -> None:
        """Make the checkpoint visible, from the parts of all ranks; then prune old checkpoints."""
        paths = [self._part(r) for r in range(self.mesh.layout.world)]
        parts = (disk_calls.read_file(path, checkpoint_index.MAX_BYTES) for path in paths)
        index = _joined([checkpoint_index.from_bytes(part) for part in parts])
        for p in paths:
            disk_calls.unlink(p)
        disk_calls.write_file(self.work_folder / checkpoint_index.NAME, checkpoint_index.to_bytes(index))
        path = self.work_folder
        if not isinstance(path, Url):
            disk_calls.sync_folder(self.work_folder)
            path = checkpoint_folder.free_name(self.folder, self.step)
            disk_calls.rename(self.work_folder, path)
            disk_calls.sync_folder(self.folder)
        self.saved = True
        try:
            for g in checkpoint_folder.generations(self.folder):
                if not g.replaced and g.step > self.step:
                    checkpoint_folder.set_aside(g)
            if self.keep is not None:
                checkpoint_folder.prune(self.folder, self.keep, known=path)
        finally:
            self.known.see(self.folder)

    def end(self, *, failed: bool) -> None:
        """Release the lock, and remove the files of a failed save."""
        if self.lock is not None:
            try:
                if failed and not self.saved:
                    with contextlib.suppress(OSError):
                        checkpoint_folder.remove(self.work_folder)
            finally:
                self.lock.release()


def _joined(parts: list[Index]) -> Index:
    """Return the index of a checkpoint from those of its ranks."""
    files, tensors = list[File](), dict[str, Stored]()
    for part in parts:
        for name, t in part.tensors.items():
            known = tensors.setdefault(name, Stored(t.dtype, t.shape))
            assert (known.dtype, known.shape) == (t.dtype, t.shape), f"ranks differ in {name}"
            tensors[name] = known.with_slices(s._replace(file=s.file + len(files)) for s in t.slices)
        files += part.files
    index = replace(parts[0], files=tuple(files), tensors=tensors, **combined([vars(part) for part in parts]))
    checkpoint_index.check(index)
    return index


# --- all ranks together


class Saves:
    """The saves of one rank's engine, one at a time. `save`, `poll` and `finish` are collective."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self._save: Save | None = None
        self._known = Known()
        self._at_exit = False

    def save(
        self,
        folder: str | Path,
        plan: Callable[[], Plan],
        *,
        keep: int | None = None,
        wait: bool = True,
        overwrite: bool = True,
    ) -> None:
        """Write a checkpoint that any mesh can load into `folder`, as `step-N`. All ranks must see one file system.

        plan: returns this rank's. wait=False: copy the tensors, and write in the background. keep: how many checkpoints
        of the folder stay; None: all. overwrite: also save to a folder with another run's checkpoints.

        Raises ShardcError, on all ranks, if this save or the one before it fails. Older checkpoints are unchanged,
        unless only their removal failed.
        """
        self.finish()
        id = agreement.text_of_first(self._mesh, secrets.token_hex(8))
        save = self._save = Save(self._mesh, disk_calls.expanded(folder).absolute(), keep, id, self._known)
        if overwrite:
            self._known.see(save.folder)
        save.start(lambda: save.prepare(plan, copy=not wait), background=False)
        self._agree(save)
        if isinstance(save.folder, Url):
            save.work_folder = disk_calls.expanded(agreement.text_of_first(self._mesh, str(save.work_folder)))
        save.start(save.write, background=not wait)
        if wait:
            self.finish()

    def loaded(self, folder: str | Path) -> None:
        """Record the checkpoints in, or beside, a folder as those that this run continues from."""
        for g in checkpoint_folder.checkpoints_in(disk_calls.expanded(folder))[:1]:
            self._known.see(g.path.parent)

    def poll(self) -> None:
        """Let rank 0 make the checkpoint visible, in the background, if all ranks have written. Between steps.

        Raises SavingError, on all ranks, if the pending save has failed.
        """
        if self._save is not None:
            self._advance(self._save, background=True)

    def finish(self) -> None:
        """Wait for the pending save."""
        while (save := self._save) is not None:
            save.join()
            self._advance(save, background=False)

    def finish_at_exit(self) -> None:
        """Wait for the pending save when the process ends without an error.

        After an error the other ranks may be in the middle of a step, and would not come.
        """
        if not self._at_exit:
            self._at_exit = True
            atexit.register(lambda: None if hasattr(sys, "last_value") else self.finish())

    @property
    def progress(self) -> tuple[int, int] | None:
        """(bytes written, bytes to write) by this rank of the pending save; None without one."""
        return (self._save.done, self._save.nbytes) if self._save is not None else None

    def _advance(self, save: Save, *, background: bool) -> None:
        finished = not save.running
        done, failed = self._mesh.sum_on_host([int(finished), int(finished and save.error is not None)])
        if failed:
            save.join()
            self._agree(save)
        elif done == self._mesh.layout.world:
            if save.committing:
                self._save = None
                save.end(failed=False)
            else:
                save.committing = True
                if self._mesh.rank == 0:
                    save.start(save.commit, background=background)

    def _agree(self, save: Save) -> None:
        """Raise on all ranks if one has an error. No rank may be writing."""
        error = save.error
        ranks, text = agreement.failures(self._mesh, words(error, fix=True) if error is not None else None)
        if not ranks:
            return
        saved = self._mesh.sum_on_host([save.saved])[0]
        self._save = None
        save.end(failed=True)
        if error is not None and not isinstance(error, OSError):
            raise error
        if saved:
            fault, fix = "was saved, but others cannot be renamed or deleted", "check the permissions of the folder"
        else:
            fault = "was not saved"
            fix = "earlier checkpoints are unchanged; make room or name another folder, and save again"
        fault = f"the checkpoint of step {save.step} {fault}: {text} (on {self._mesh.layout.named(*ranks)})"
        raise SavingError(fault, where=str(save.folder), fix=fix) from error


def _check_plain(facts: dict[str, Any]) -> None:
    try:
        json.dumps(facts, default=json_number)
    except (TypeError, ValueError) as e:
        fault = f"the checkpoint's extra state or the optimizer's settings contain more than plain values: {e}"
        raise ShardcError(fault, where="extra or optimizer", fix="pass numbers, strings, lists and dicts") from e
