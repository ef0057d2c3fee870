"""Save and load the state of an engine's training."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from shardc.runtime.checks import shared_facts
from shardc.runtime.checks.hooks import CheckHooks
from shardc.runtime.data.loader import Loaders
from shardc.runtime.mesh import TorchMesh
from shardc.runtime.mesh.agreement import stated
from shardc.runtime.state.export import export_safetensors
from shardc.runtime.state.loading import load
from shardc.runtime.state.owners import RankState
from shardc.runtime.state.parts import full_state_dict
from shardc.runtime.state.saving import Saves, planned
from shardc.runtime.step import resumed
from shardc.runtime.step.local_model import LocalModel
from shardc.runtime.step.schedulers import steps_of
from shardc.runtime.step.update import Update


class Saver:
    """Saves, loads and exports an engine's state.

    like, folder: the source module and folder of the weights: `export` writes their configuration. A saver is also an
    end of a weight transfer (shardc.features.reshard.runtime.End).
    """

    def __init__(
        self, model: LocalModel, update: Update, loaders: Loaders, checks: CheckHooks, like: Any, folder: Any
    ) -> None:
        self.model, self.update, self._loaders, self.hooks = model, update, loaders, checks
        self.like, self.folder = like, folder
        self.program, self.mesh, self.buckets, self.owned = model.program, model.mesh, model.buckets, model.owned
        self.saves = Saves(model.mesh)
        self.extra = dict[str, Any]()  # of the user and of `shardc run`

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        return self.model.buffers

    @property
    def held(self) -> RankState:
        """What this rank holds, with its optimizer."""
        model, optimizer, shards = self.model, self.update.optimizer, self.buckets.shards
        return RankState(self.program, self.mesh, self.owned, model.buffers, optimizer, shards, model.owners)

    def save(self, folder: str | Path, *, wait: bool, keep: int | None, overwrite: bool) -> None:
        self.update.check_consistent()
        model = self.model
        extra = self.extra_state()
        if not wait and isinstance(self.mesh, TorchMesh):
            self.saves.finish_at_exit()
        with self.mesh.together(f"saving step {model.rng.step}"), model.offload.params_on_host():
            self.hooks.saving(self.update.optimizer)
            plan = functools.partial(planned, self.held, extra)
            self.saves.save(folder, plan, keep=keep, wait=wait, overwrite=overwrite)

    def extra_state(self) -> dict[str, Any]:
        """Return what a checkpoint has apart from tensors and the optimizer's settings."""
        rng, scaler, schedulers = self.model.rng, self.update.scaler, self.update.schedulers
        extra: dict[str, Any] = {"step": rng.step, "seed": rng.seed, **resumed.record(self.program)}
        extra["clip_norm"] = self.update.clip_norm
        if scaler is not None:
            extra["loss_scale"] = scaler.state_dict()
        if schedulers is not None:
            extra["scheduler"] = schedulers.state_dict()
        # a copy: it is written in the background
        return extra | {"loaders": self._loaders.state_dict(), "user": copy.deepcopy(self.extra)}

    def finish(self) -> None:
        with self.mesh.together("saving"):
            self.saves.finish()

    def load(self, folder: str | Path, *, last_good: bool, new_schedule: bool, new_data: bool) -> None:
        model, update = self.model, self.update
        before, seed = resumed.settings(update.optimizer, update.schedulers), model.rng.seed
        with self.mesh.together("loading a checkpoint"), self.receiving():
            self.hooks.call("loading a checkpoint")
            extra = load(
                folder,
                self.held,
                room=update.paged.room if update.paged is not None else None,
                last_good=last_good,
                accept=functools.partial(self.accept, new_schedule=new_schedule, new_data=new_data),
                changing=self._changing,
            )
        self.saves.loaded(folder)
        self.go_on_from(extra, new_schedule=new_schedule, new_data=new_data)
        after = resumed.settings(update.optimizer, update.schedulers)
        for note in resumed.replaced(before, after, schedule=not new_schedule):
            self.mesh.note(note)
        for note in resumed.changed(self.program, extra):
            self.mesh.note(note)
        if (clipped := extra.get("clip_norm", update.clip_norm)) != update.clip_norm:
            self.mesh.note(f"clip_norm: today's {update.clip_norm} is used; the checkpoint was trained with {clipped}")
        if model.rng.seed != seed:
            self.mesh.note(f"seed: the checkpoint's {model.rng.seed} is used, not {seed}")

    def go_on_from(self, extra: Mapping[str, Any], *, new_schedule: bool = False, new_data: bool = False) -> None:
        """Set step, seed, schedules, loss scale and loaders to those of a checkpoint or another engine."""
        rng, update = self.model.rng, self.update
        rng.step, rng.seed = int(extra["step"]), int(extra.get("seed", rng.seed))
        self.extra.clear()
        self.extra.update(extra.get("user", {}))
        if update.scaler is not None and "loss_scale" in extra:
            update.scaler.load_state_dict(extra["loss_scale"])
        if new_schedule and update.new_schedule is not None and update.optimizer is not None:
            update.schedule(update.new_schedule.begin(update.optimizer, steps_of(extra)))
        elif update.schedulers is not None and "scheduler" in extra:
            update.schedulers.load_state_dict(extra["scheduler"])
            update.schedule(update.schedulers)
        elif update.schedulers is not None and rng.step:
            note = "the checkpoint has none, so this one begins at step 0; to begin at the checkpoint's:"
            self.mesh.note(f"scheduler: {note} load(folder, new_schedule=True), run: --new-schedule")
        if new_data:
            self._loaders.restart()
        else:
            self._loaders.load_state_dict(extra.get("loaders", {}))
        update.consistent = True

    def accept(self, extra: Mapping[str, Any], *, new_schedule: bool = False, new_data: bool = False) -> None:
        """Raise if schedulers or loaders cannot continue from these."""
        schedulers = self.update.schedulers
        if schedulers is not None and new_schedule:
            schedulers.check_end(steps_of(extra))
        elif schedulers is not None and "scheduler" in extra:
            schedulers.check(extra["scheduler"])
        if not new_data:
            self._loaders.check(extra.get("loaders", {}))

    def _changing(self) -> None:
        self.update.consistent = False  # stays so if the load fails

    def full_state_dict(self, *, rank0_only: bool) -> dict[str, Tensor]:
        self.hooks.note_weights_read()
        model = self.model
        with self.mesh.together("full_state_dict"):
            written = shared_facts.written(self.program, model.written)
            self.hooks.call("full_state_dict", stated("rank0_only", rank0_only), written)
            return full_state_dict(self.program, self.mesh, model.wholes(), model.buffers, rank0_only=rank0_only)

    def export(self, folder: str | Path, **options: Any) -> list[Path]:
        self.update.check_consistent()
        model = self.model
        with self.mesh.together("exporting"), model.offload.params_on_host():
            self.hooks.call("exporting")
            model.gather_written()
            self.buckets.wait_for_gathers()
            return export_safetensors(
                folder, self.held, wholes=model.wholes(), model=self.like, carried=self.folder, **options
            )

    def close(self) -> None:
        self.saves.finish()
        self.model.offload.close()
        if isinstance(self.mesh, TorchMesh):
            self.mesh.close()

    # --- to another plan

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Prepare weights for sending: see shardc.features.reshard.runtime.End."""
        self.hooks.call("moving weights")
        self.update.check_consistent()
        self.model.gather_written()
        self.buckets.wait_for_gathers()
        with self.model.offload.params_on_host():
            yield

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Let this rank's stored parts be filled; then other ranks, and owners, get the copies that they need."""
        self.finish()
        self.buckets.reset(forward=True)
        self.buckets.wait_for_gathers()
        with self.model.offload.params_on_host():
            yield
        self.buckets.publish()
        self.model.offload.changed()
        if self.update.paged is not None:
            self.update.paged.rest()
        self.model.owners.gather()
