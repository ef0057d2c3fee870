"""Checkpoints that any mesh can load: how ranks write one together.

    every rank   plans what it writes (boxes.py) ─► its files, fsynced ─► part-RANK.json ─┐ agree
    rank 0                                     index.json from all parts, fsynced ─► one rename ─┴ agree ─► prune

Ranks meet only to agree: an error on one of them (a full disk, an I/O error) is an error on all, and what was there
before is as it was. All is written into a folder that gets its name at the very end (checkpoint_folder.py). What each
of them does by itself: save_plan.py, one_save.py.

In the background, the tensors are copied to memory of the host first, and a thread does the rest. It cannot meet other
ranks, whose main threads may be in the middle of a step; so it only notes how it went, and main threads agree on it
when they are between two steps (`Saves.poll`).
"""

from __future__ import annotations

import atexit
import hashlib
import json
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.mesh import agreement
from shardc.runtime.state import disk_calls
from shardc.runtime.state.boxes import Runs, model_parts
from shardc.runtime.state.checkpoint_folder import Known, SavingError, is_one
from shardc.runtime.state.checkpoint_index import plain
from shardc.runtime.state.one_save import Cancelled, Save
from shardc.runtime.state.save_plan import Plan, drafts, planned
from shardc.runtime.state.saving_optimizer import state_parts

if TYPE_CHECKING:
    from shardc.runtime.matrices.whole import WholeMatrices


class Saves:
    """The saves of one rank's engine: at most one is under way. All methods are collective, but for `progress`."""

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
        """Write a checkpoint. wait=False: copy the tensors, and write in the background. keep: how many checkpoints of
        the folder stay; None: all. overwrite: also where there are some that are not known. state: gives what this rank
        has.

        Raises SavingError, on all ranks, if this save fails or the one before it has.
        """
        self.finish()
        save = Save(self._mesh, folder.absolute(), step, keep, agreement.said(self._mesh, secrets.token_hex(8)))
        save.known = self._known
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
        _check_plain(save.plan.facts)  # what cannot be written is found before anything is
        save.nbytes = save.plan.nbytes
        save.drafts = drafts(save.plan, {"checkpoint": save.id, "step": str(save.step)})
        if self._mesh.rank == 0:
            save.prepare()
        if not wait:
            for draft in save.drafts.values():
                draft.copy_to_host()

    def loaded(self, folder: str | Path) -> None:
        """The checkpoints of a folder, or those beside one of them, are those that this run goes on from."""
        path = disk_calls.named(folder)
        self._known.see(path.parent if is_one(path) else path)

    def poll(self) -> None:
        """Have all ranks written? Then rank 0 makes the checkpoint visible, in the background too. Between two steps.

        Raises SavingError, on all ranks, if the save under way has failed.
        """
        if self._save is not None:
            self._advance(self._save, background=True)

    def finish(self) -> None:
        """Wait for the save under way."""
        while (save := self._save) is not None:
            save.join()
            self._advance(save, background=False)

    def finish_at_exit(self) -> None:
        """Wait for the save under way when the process ends, if it ends well: after an error the others may be in the
        middle of a step, and would not come.
        """
        if not self._at_exit:
            self._at_exit = True
            atexit.register(lambda: None if hasattr(sys, "last_value") else self.finish())

    @property
    def progress(self) -> tuple[int, int] | None:
        """(bytes written, bytes to write) by this rank of the save under way; None without one."""
        return (self._save.done, self._save.nbytes) if self._save is not None else None

    def _advance(self, save: Save, *, background: bool) -> None:
        here = not save.running
        done, failed = self._mesh.sum_on_host([int(here), int(here and save.error is not None)])
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
        """Raise on all ranks what went wrong on one. Nobody writes any more."""
        error = save.error if not isinstance(save.error, Cancelled) else None
        ranks, text = agreement.failures(self._mesh, _words(error) if error is not None else None)
        if not ranks:
            return
        self._save = None
        save.end(failed=True)
        if error is not None and not isinstance(error, OSError):
            raise error
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:4]))}{' ...' if len(ranks) > 4 else ''}"
        raise SavingError(
            f"the checkpoint of step {save.step} was not saved: {text} (on {who})",
            where=str(save.folder),
            fix="what was saved before is as it was; make room or name another folder, and save again",
        ) from error


def _words(error: BaseException) -> str:
    if isinstance(error, ShardcError):
        what = f"{error.where}: {error.what}" if error.where else error.what
        return f"{what}; {error.fix}" if error.fix else what
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return f"{type(error).__name__}: {error}"


def _check_plain(facts: dict[str, Any]) -> None:
    try:
        json.dumps(facts, default=plain)
    except (TypeError, ValueError) as e:
        raise ShardcError(
            f"the checkpoint's extra state or the optimizer's settings hold more than plain values: {e}",
            fix="pass numbers, strings, lists and dicts",
        ) from e


# --- of an engine


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
    matrices: WholeMatrices | None = None,
    saves: Saves | None = None,
    keep: int | None = None,
    wait: bool = True,
    overwrite: bool = True,
) -> None:
    """Write a checkpoint that any mesh can load into `folder`, as `step-N`. Collective; all ranks must see the same
    file system.

    params, buffers: this rank's, by placeholder name. optimizer: over these params; its step counts, moments,
    hyperparameters.
    runs: of which params this rank has a stretch of the flattened local part (ZeRO), and which.
    matrices: those that this rank owns, where optimizers step whole ones.
    extra: JSON-able values of the caller's: step, seed, a scheduler's state_dict; of each, what the first rank that has
    it says (a stage without anything to train has no scheduler). Its "step" is the checkpoint's.
    saves, keep, wait, overwrite: see `Saves`. Raises ShardcError, on all ranks; what was saved before is then as it
    was."""

    def state() -> Plan:
        parts, settings = model_parts(program, params, buffers, runs or {}, mesh), None
        if optimizer is not None:
            more, settings = state_parts(program, params, optimizer, runs or {}, mesh, matrices)
            parts |= more
        facts = {
            "model": program.meta.get("model", ""),
            "program": program_hash(program),
            "mesh": dict(mesh.layout.axes),
            "extra": dict(extra or {}),
            "optimizer": settings,
        }
        return planned(parts, facts, mesh)

    step = int((extra or {}).get("step", 0))
    (saves or Saves(mesh)).save(disk_calls.named(folder), state, step=step, keep=keep, wait=wait, overwrite=overwrite)


def program_hash(program: Program) -> str:
    """Of the tensors that a program has, and how it spreads them: tells runs apart, nothing more."""
    stored = [(x.name, x.shape, str(x.dtype), str(x.layout)) for x in program.stored]
    return hashlib.sha256(repr((program.mesh.axes, program.microbatches, stored)).encode()).hexdigest()[:16]
