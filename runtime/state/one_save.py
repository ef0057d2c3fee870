"""One save of one rank: its files, and on rank 0 the index of all and the rename that makes the checkpoint visible.

Nothing here meets other ranks: saving.py says when, and agrees on how it went.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardc import text_file
from shardc.runtime.state import checkpoint_index, disk_calls
from shardc.runtime.state.checkpoint_folder import LOCK, WORK, Known, SavingError, aside, free_name, generations, prune
from shardc.runtime.state.checkpoint_index import File, Index, Slice, Stored, plain
from shardc.runtime.state.digest import digest_of
from shardc.runtime.state.save_plan import Draft, Plan
from shardc.runtime.state.saving_optimizer import together
from shardc.runtime.state.tensor_file import bytes_of


class Cancelled(Exception):
    """Another rank's save failed."""


class Save:
    """One save of one rank. id: the same on all ranks; folder: that the user named; work: where all is written until it
    is whole. done: bytes written.
    """

    def __init__(self, mesh: Any, folder: Path, step: int, keep: int | None, id: str) -> None:
        self.mesh, self.folder, self.step, self.keep, self.id = mesh, folder, step, keep, id
        self.plan = Plan({}, {}, {})
        self.drafts: dict[str, Draft] = {}
        self.work = folder / f"{WORK}{id}"
        self.error: BaseException | None = None
        self.cancelled = False
        self.committing = False
        self.done = self.nbytes = 0
        self.lock: disk_calls.Lock | None = None
        self.known: Known | None = None
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None], *, background: bool) -> None:
        """Run, here or in a thread; what goes wrong is kept in `.error`."""

        def guarded() -> None:
            try:
                work()
            except BaseException as e:  # raised again where all ranks meet
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
        """This rank's files, and what rank 0 has to know of them."""
        mine: list[File] = []
        for kind, draft in self.drafts.items():
            self._write_file(kind, draft, mine)
        part = {"facts": self.plan.facts, **checkpoint_index.tables(tuple(mine), self.plan.tensors)}
        disk_calls.write_file(self._part(self.mesh.rank), json.dumps(part, default=plain).encode())

    def _part(self, rank: int) -> Path:
        return self.work / f"part-{rank:05d}.json"

    def _write_file(self, kind: str, draft: Draft, mine: list[File]) -> None:
        name = f"{kind}-{self.mesh.rank:05d}.safetensors"
        file = disk_calls.Stream(self.work / name)
        try:
            file.add(memoryview(draft.head))
            for piece, entry in draft.pieces:
                if self.cancelled:
                    raise Cancelled
                data = bytes_of(piece.read().to("cpu").contiguous())
                found = Slice(len(mine), entry.start, piece.offset, piece.shape, digest_of(data))
                file.add(data)
                whole = self.plan.tensors[piece.key]
                self.plan.tensors[piece.key] = Stored(whole.dtype, whole.shape, (*whole.slices, found))
                self.done += len(data)
            file.finish()
        finally:
            file.close()
        nbytes, head = draft.pieces[-1][1].stop, draft.head
        mine.append(File(name, self.mesh.rank, nbytes, len(head), hashlib.sha256(head).hexdigest()))

    # --- what rank 0 does

    def prepare(self) -> None:
        """The folder to write into. Raises SavingError where another process is saving to the same place."""
        disk_calls.make_folder(self.folder)
        try:
            self.lock = disk_calls.Lock(self.folder / LOCK)
        except BlockingIOError:
            fix = "give every run a folder of its own"
            raise SavingError("another process is saving to this folder", where=str(self.folder), fix=fix) from None
        if self.known is not None and (others := self.known.others(self.folder)):
            raise SavingError(
                f"checkpoints are there that this run neither saved nor loaded ({', '.join(others[:3])}): it would"
                " replace those of another run",
                where=str(self.folder),
                fix="load them to go on from there, save to another folder, or pass overwrite=True",
            )
        for name in os.listdir(self.folder):
            if name.startswith(WORK):  # of a process that ended: nobody else has the lock
                disk_calls.remove_folder(self.folder / name)
        disk_calls.make_folder(self.work)

    def commit(self) -> None:
        """Make it visible, from the parts of all ranks; then remove checkpoints that are not to be kept."""
        index = self._index([self._read(r) for r in range(self.mesh.layout.world)])
        disk_calls.write_file(self.work / checkpoint_index.NAME, checkpoint_index.to_bytes(index))
        for r in range(self.mesh.layout.world):
            disk_calls.unlink(self._part(r))
        disk_calls.sync_folder(self.work)
        path = free_name(self.folder, self.step)
        disk_calls.rename(self.work, path)
        disk_calls.sync_folder(self.folder)
        try:
            for g in generations(self.folder):
                if not g.replaced and g.step > self.step:
                    disk_calls.rename(g.path, aside(g))
            if self.keep is not None:
                prune(self.folder, self.keep, known=path)
        except OSError as e:
            what = f"the checkpoint of step {self.step} was saved, but others cannot be renamed or deleted: {e}"
            fix = "see who may write there"
            raise SavingError(what, where=str(self.folder), fix=fix) from e
        finally:
            if self.known is not None:
                self.known.see(self.folder)

    def _read(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            disk_calls.read_file(self._part(rank), checkpoint_index.MAX_BYTES), object_pairs_hook=text_file.unique
        )
        return found

    def _index(self, parts: Sequence[dict[str, Any]]) -> Index:
        every: list[File] = []
        tensors: dict[str, Stored] = {}
        for part in parts:
            mine, theirs = checkpoint_index.read_tables(part, partial=True)
            for name, t in theirs.items():
                known = tensors.setdefault(name, Stored(t.dtype, t.shape))
                if (known.dtype, known.shape) != (t.dtype, t.shape):
                    raise SavingError(
                        f"ranks have it in two forms: {known.dtype} {known.shape}, {t.dtype} {t.shape}", where=name
                    )
                moved = (Slice(s.file + len(every), s.place, s.offset, s.shape, s.digest) for s in t.slices)
                tensors[name] = Stored(t.dtype, t.shape, (*known.slices, *moved))
            every += mine
        facts = dict(parts[0]["facts"])
        for part in reversed(parts):
            facts["extra"] = {**facts["extra"], **part["facts"]["extra"]}
        optimizers = [part["facts"]["optimizer"] for part in parts if part["facts"]["optimizer"] is not None]
        facts["optimizer"] = together(optimizers) if optimizers else None
        return Index(id=self.id, step=self.step, files=tuple(every), tensors=tensors, **facts)

    def end(self, *, failed: bool) -> None:
        """Leave nothing behind."""
        if self.lock is not None:
            try:
                if failed:
                    with contextlib.suppress(OSError):
                        disk_calls.remove_folder(self.work)
            finally:
                self.lock.release()
