"""Write checkpoints that any mesh can load, by all ranks together.

    every rank   plans what it writes (boxes.py) ─► its files, fsynced ─► part-RANK.json ─┐ agree
    rank 0                       index.json from all parts, fsynced ─► one rename ─► prune ─┴ agree

Ranks meet only to agree: an error on one of them (a full disk, an I/O error) is an error on all, and older checkpoints
are unchanged. All files go into a folder that gets its name at the very end (checkpoint_folder.py). `Save` does the
work of one rank; boxes.py decides what it writes.

In the background, the tensors are first copied to host memory, and a thread does the rest. The thread makes no
collective: other ranks' main threads may be in the middle of a step. So it only records its result, and main threads
agree on it when they are between two steps (`Saves.poll`).
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardc import text_file
from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.mesh import agreement
from shardc.runtime.state import checkpoint_index, disk_calls
from shardc.runtime.state.boxes import Draft, Plan, drafts, planned
from shardc.runtime.state.checkpoint_folder import (
    LOCK,
    WORK,
    Known,
    SavingError,
    free_name,
    generations,
    is_checkpoint,
    prune,
    renamed_path,
)
from shardc.runtime.state.checkpoint_index import DIGEST, File, Index, Slice, Stored, json_number
from shardc.runtime.state.owners import RankState
from shardc.runtime.state.saving_optimizer import combined, state_parts
from shardc.runtime.state.tensor_file import bytes_of

# --- one save of one rank: its files, and on rank 0 the index of all and the rename that makes it visible


class Cancelled(Exception):
    """This rank stopped writing, because another rank's save failed."""


@dataclass
class Save:
    """One save of one rank. id: the same on all ranks; folder: that the user named.

    work_folder: where files are written until all are complete. saved: the checkpoint has its name. done: bytes
    written.
    """

    mesh: Any
    folder: Path
    step: int
    keep: int | None
    id: str
    known: Known
    plan: Plan = field(default_factory=lambda: Plan({}, {}, {}))
    drafts: dict[str, Draft] = field(default_factory=dict)
    error: BaseException | None = None
    cancelled: bool = False
    committing: bool = False
    saved: bool = False
    done: int = 0
    nbytes: int = 0
    lock: disk_calls.Lock | None = None
    _thread: threading.Thread | None = None

    @property
    def work_folder(self) -> Path:
        return self.folder / f"{WORK}{self.id}"

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

    def write(self) -> None:
        """Write this rank's files, and their description for rank 0."""
        files: list[File] = []
        for kind, draft in self.drafts.items():
            self._write_file(kind, draft, files)
        part = {"facts": self.plan.facts, **checkpoint_index.tables(tuple(files), self.plan.tensors)}
        disk_calls.write_file(self._part(self.mesh.rank), json.dumps(part, default=json_number).encode())

    def _part(self, rank: int) -> Path:
        return self.work_folder / f"part-{rank:05d}.json"

    def _write_file(self, kind: str, draft: Draft, mine: list[File]) -> None:
        name = f"{kind}-{self.mesh.rank:05d}.safetensors"
        file = disk_calls.Stream(self.work_folder / name)
        try:
            file.add(memoryview(draft.head))
            for piece, entry in draft.pieces:
                if self.cancelled:
                    raise Cancelled
                data = bytes_of(piece.read().to("cpu").contiguous())
                written = Slice(len(mine), entry.start, piece.offset, piece.shape, DIGEST(data).hexdigest())
                file.add(data)
                whole = self.plan.tensors[piece.key]
                self.plan.tensors[piece.key] = Stored(whole.dtype, whole.shape, (*whole.slices, written))
                self.done += len(data)
            file.finish()
        finally:
            file.close()
        nbytes, head = draft.pieces[-1][1].stop, draft.head
        mine.append(File(name, self.mesh.rank, nbytes, len(head), hashlib.sha256(head).hexdigest()))

    # --- what rank 0 does

    def prepare(self) -> None:
        """Make the folder to write into. Raises SavingError if another process is saving there."""
        disk_calls.make_folder(self.folder)
        try:
            self.lock = disk_calls.Lock(self.folder / LOCK)
        except BlockingIOError:
            fix = "use a separate folder for every run"
            raise SavingError("another process is saving to this folder", where=str(self.folder), fix=fix) from None
        if others := self.known.others(self.folder):
            raise SavingError(
                f"the folder has checkpoints that this run neither saved nor loaded ({', '.join(others[:3])}):"
                " saving here would replace another run's checkpoints",
                where=str(self.folder),
                fix="load them to go on from there, save to another folder, or pass overwrite=True",
            )
        for name in os.listdir(self.folder):
            if name.startswith(WORK):  # of a process that ended: nobody else has the lock
                disk_calls.remove_folder(self.folder / name)
        disk_calls.make_folder(self.work_folder)

    def commit(self) -> None:
        """Make the checkpoint visible, from the parts of all ranks; then prune old checkpoints."""
        index = self._index([self._read(r) for r in range(self.mesh.layout.world)])
        disk_calls.write_file(self.work_folder / checkpoint_index.NAME, checkpoint_index.to_bytes(index))
        for r in range(self.mesh.layout.world):
            disk_calls.unlink(self._part(r))
        disk_calls.sync_folder(self.work_folder)
        path = free_name(self.folder, self.step)
        disk_calls.rename(self.work_folder, path)
        disk_calls.sync_folder(self.folder)
        self.saved = True
        try:
            for g in generations(self.folder):
                if not g.replaced and g.step > self.step:
                    disk_calls.rename(g.path, renamed_path(g))
            if self.keep is not None:
                prune(self.folder, self.keep, known=path)
        finally:
            self.known.see(self.folder)

    def _read(self, rank: int) -> dict[str, Any]:
        part: dict[str, Any] = json.loads(
            disk_calls.read_file(self._part(rank), checkpoint_index.MAX_BYTES), object_pairs_hook=text_file.unique
        )
        return part

    def _index(self, parts: Sequence[dict[str, Any]]) -> Index:
        every: list[File] = []
        tensors: dict[str, Stored] = {}
        for part in parts:
            files, part_tensors = checkpoint_index.read_tables(part)
            for name, t in part_tensors.items():
                known = tensors.setdefault(name, Stored(t.dtype, t.shape))
                assert (known.dtype, known.shape) == (t.dtype, t.shape), f"ranks differ in {name}"
                moved = (Slice(s.file + len(every), s.start, s.offset, s.shape, s.digest) for s in t.slices)
                tensors[name] = Stored(t.dtype, t.shape, (*known.slices, *moved))
            every += files
        facts = parts[0]["facts"] | combined([part["facts"] for part in parts])
        index = Index(id=self.id, step=self.step, files=tuple(every), tensors=tensors, **facts)
        checkpoint_index.check(index)
        return index

    def end(self, *, failed: bool) -> None:
        """Release the lock, and remove the files of a failed save."""
        if self.lock is not None:
            try:
                if failed:
                    with contextlib.suppress(OSError):
                        disk_calls.remove_folder(self.work_folder)
            finally:
                self.lock.release()


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
        folder: Path,
        state: Callable[[], Plan],
        *,
        step: int,
        keep: int | None = None,
        wait: bool = True,
        overwrite: bool = True,
    ) -> None:
        """Write a checkpoint. wait=False: copy the tensors, and write in the background.

        keep: how many checkpoints of the folder stay; None: all. overwrite: also save to a folder with another run's
        checkpoints. state: returns this rank's plan. Raises SavingError, on all ranks, if this save or the one before
        it fails.
        """
        self.finish()
        id = agreement.text_of_first(self._mesh, secrets.token_hex(8))
        save = Save(self._mesh, folder.absolute(), step, keep, id, self._known)
        if overwrite:
            self._known.see(save.folder)
        self._save = save
        save.start(lambda: self._prepare(save, state, wait=wait), background=False)
        self._agree(save)
        save.start(save.write, background=not wait)
        if wait:
            self.finish()

    def _prepare(self, save: Save, state: Callable[[], Plan], *, wait: bool) -> None:
        save.plan = state()
        _check_plain(save.plan.facts)  # before anything is written
        save.nbytes = save.plan.nbytes
        save.drafts = drafts(save.plan, {"checkpoint": save.id, "step": str(save.step)})
        if self._mesh.rank == 0:
            save.prepare()
        if not wait:
            for draft in save.drafts.values():
                draft.copy_to_host()

    def loaded(self, folder: str | Path) -> None:
        """Record the checkpoints in, or beside, a folder as those that this run continues from."""
        path = disk_calls.expanded(folder)
        self._known.see(path.parent if is_checkpoint(path) else path)

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
            save.cancelled = True
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
        error = save.error if not isinstance(save.error, Cancelled) else None
        ranks, text = agreement.failures(self._mesh, _words(error) if error is not None else None)
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


def _words(error: BaseException) -> str:
    if isinstance(error, ShardcError):
        fault = f"{error.where}: {error.what}" if error.where else error.what
        return f"{fault}; {error.fix}" if error.fix else fault
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return f"{type(error).__name__}: {error}"


def _check_plain(facts: dict[str, Any]) -> None:
    try:
        json.dumps(facts, default=json_number)
    except (TypeError, ValueError) as e:
        raise ShardcError(
            f"the checkpoint's extra state or the optimizer's settings contain more than plain values: {e}",
            where="extra or optimizer",
            fix="pass numbers, strings, lists and dicts",
        ) from e


# --- of an engine


def save(
    folder: str | Path,
    held: RankState,
    extra: Mapping[str, Any] | None = None,
    *,
    saves: Saves | None = None,
    keep: int | None = None,
    wait: bool = True,
    overwrite: bool = True,
) -> None:
    """Write a checkpoint that any mesh can load into `folder`, as `step-N`. Collective.

    All ranks must see one file system. Of the optimizer it has step counts, moments, hyperparameters.
    extra: JSON-able values of the caller: step, seed, a scheduler's state_dict; of each, the value of the first rank
    that has it (a stage without anything to train has no scheduler). Its "step" is the checkpoint's.
    saves, keep, wait, overwrite: see `Saves`.
    Raises ShardcError on all ranks. Older checkpoints are unchanged, unless only their removal failed.
    """

    def state() -> Plan:
        parts, settings = held.model_parts(), None
        if held.optimizer is not None:
            more, settings = state_parts(held, held.optimizer)
            parts |= more
        facts = {
            "model": held.program.meta.get("model", ""),
            "program": program_hash(held.program),
            "mesh": dict(held.mesh.layout.axes),
            "extra": dict(extra or {}),
            "optimizer": settings,
        }
        return planned(parts, facts, held.mesh)

    step = int((extra or {}).get("step", 0))
    (saves or Saves(held.mesh)).save(
        disk_calls.expanded(folder), state, step=step, keep=keep, wait=wait, overwrite=overwrite
    )


def program_hash(program: Program) -> str:
    """Return a hash of a program's tensors and their layouts, to distinguish runs."""
    stored = [(x.name, x.shape, str(x.dtype), str(x.layout)) for x in program.stored]
    return hashlib.sha256(repr((program.mesh.axes, program.microbatches, stored)).encode()).hexdigest()[:16]
