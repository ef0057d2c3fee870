"""Save and load the state of an engine's training, and move it to an engine with another plan."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from shardc.runtime import state
from shardc.runtime.checks import shared_facts
from shardc.runtime.checks.moments import Moments
from shardc.runtime.data.loader import Loaders
from shardc.runtime.mesh import TorchMesh
from shardc.runtime.mesh.agreement import stated
from shardc.runtime.reshard import training
from shardc.runtime.reshard.between import End, Reshard
from shardc.runtime.reshard.moves import Key
from shardc.runtime.reshard.places import Plan
from shardc.runtime.state.boxes import Part
from shardc.runtime.state.checkpoint_index import Index
from shardc.runtime.state.saving_optimizer import fill, room_for, state_parts
from shardc.runtime.step import resumed
from shardc.runtime.step.local_model import LocalModel
from shardc.runtime.step.schedulers import steps_of
from shardc.runtime.step.update import Update


class Saver:
    """Saves, loads, exports and moves an engine's state.

    like, folder: the source module and folder of the weights: `export` writes their configuration. A saver is also an
    end of a weight transfer (shardc.runtime.reshard.between.End).
    """

    def __init__(
        self, model: LocalModel, update: Update, loaders: Loaders, checks: Moments, like: Any, folder: Any
    ) -> None:
        self._model, self._update, self._loaders, self._checks = model, update, loaders, checks
        self.like, self.folder = like, folder
        self.program, self.mesh, self.buckets, self.owned = model.program, model.mesh, model.buckets, model.owned
        self.saves = state.Saves(model.mesh)
        self.reshards: MutableMapping[End, Reshard] = WeakKeyDictionary()

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        return self._model.buffers

    @property
    def checks(self) -> bool:
        return self._checks.compares

    def save(self, folder: str | Path, *, wait: bool, keep: int | None, overwrite: bool) -> None:
        self._update.check_whole()
        model = self._model
        extra = self._beside_tensors()
        if not wait and isinstance(self.mesh, TorchMesh):
            self.saves.finish_at_exit()
        with self.mesh.together(f"saving step {model.rng.step}"), model.offload.at_home():
            self._checks.saving(self._update.optimizer)
            state.save(
                folder,
                self.program,
                self.mesh,
                self.owned,
                model.buffers,
                self._update.optimizer,
                extra,
                runs=self.buckets.runs,
                matrices=model.matrices,
                saves=self.saves,
                keep=keep,
                wait=wait,
                overwrite=overwrite,
            )

    def _beside_tensors(self) -> dict[str, Any]:
        """Return what a checkpoint has apart from tensors and the optimizer's settings."""
        rng, scaler, schedulers = self._model.rng, self._update.scaler, self._update.schedulers
        extra: dict[str, Any] = {"step": rng.step, "seed": rng.seed, **resumed.record(self.program)}
        if scaler is not None:
            extra["loss_scale"] = scaler.state_dict()
        if schedulers is not None:
            extra["scheduler"] = schedulers.state_dict()
        return extra | {"loaders": self._loaders.state_dict()}

    def finish(self) -> None:
        with self.mesh.together("saving"):
            self.saves.finish()

    def load(self, folder: str | Path, *, last_good: bool, new_schedule: bool, new_data: bool) -> None:
        model, update = self._model, self._update
        before, seed = resumed.settings(update.optimizer, update.schedulers), model.rng.seed
        self._make_ready()
        with self.mesh.together("loading a checkpoint"), model.offload.at_home():
            self._checks.call("loading a checkpoint")
            extra = state.load(
                folder,
                self.program,
                self.mesh,
                self.owned,
                model.buffers,
                update.optimizer,
                runs=self.buckets.runs,
                matrices=model.matrices,
                room=update.paged.room if update.paged is not None else None,
                last_good=last_good,
                accept=functools.partial(self._accept, new_schedule=new_schedule, new_data=new_data),
                changing=self._changing,
            )
        self.saves.loaded(folder)
        self.buckets.publish()
        self._filled()
        self._go_on_from(extra, new_schedule=new_schedule, new_data=new_data)
        after = resumed.settings(update.optimizer, update.schedulers)
        for note in resumed.replaced(before, after, schedule=not new_schedule):
            self.mesh.note(note)
        for note in resumed.changed(self.program, extra):
            self.mesh.note(note)
        if model.rng.seed != seed:
            self.mesh.note(f"seed: the checkpoint's {model.rng.seed} is used, not {seed}")

    def _make_ready(self) -> None:
        """Finish all that reads or writes parameters, before they are filled."""
        self.finish()
        self.buckets.reset(forward=True)
        self.buckets.wait_for_gathers()

    def _filled(self) -> None:
        """Refresh what depends on parameters, after they are filled and other ranks have them."""
        self._model.offload.changed()
        if self._update.paged is not None:
            self._update.paged.rest()
        if self._model.matrices is not None:
            self._model.matrices.gather()

    def _go_on_from(self, extra: Mapping[str, Any], *, new_schedule: bool = False, new_data: bool = False) -> None:
        """Set step, seed, schedules, loss scale and loaders to those of a checkpoint or another engine."""
        rng, update = self._model.rng, self._update
        rng.step, rng.seed = int(extra["step"]), int(extra["seed"])
        if update.scaler is not None and "loss_scale" in extra:
            update.scaler.load_state_dict(extra["loss_scale"])
        if new_schedule and update.new_schedule is not None and update.optimizer is not None:
            update.schedule(update.new_schedule.begin(update.optimizer, steps_of(extra)))
        elif update.schedulers is not None and "scheduler" in extra:
            update.schedulers.load_state_dict(extra["scheduler"])
            update.schedule(update.schedulers)
        if new_data:
            self._loaders.restart()
        else:
            self._loaders.load_state_dict(extra.get("loaders", {}))
        update.whole = True

    def _accept(self, extra: Mapping[str, Any], *, new_schedule: bool, new_data: bool) -> None:
        """Raise if schedulers or loaders cannot continue from these."""
        schedulers = self._update.schedulers
        if schedulers is not None and new_schedule:
            schedulers.check_end(steps_of(extra))
        elif schedulers is not None and "scheduler" in extra:
            schedulers.check(extra["scheduler"])
        if not new_data:
            self._loaders.check(extra.get("loaders", {}))

    def _changing(self) -> None:
        self._update.whole = False  # stays so if the load fails

    def full_state_dict(self, *, rank0_only: bool) -> dict[str, Tensor]:
        self._checks.handed_out()
        model = self._model
        with self.mesh.together("full_state_dict"):
            written = shared_facts.written(self.program, model.written)
            self._checks.call("full_state_dict", stated("rank0_only", rank0_only), written)
            return state.full_state_dict(self.program, self.mesh, model.wholes(), model.buffers, rank0_only=rank0_only)

    def export(self, folder: str | Path, **options: Any) -> list[Path]:
        self._update.check_whole()
        model = self._model
        with self.mesh.together("exporting"), model.offload.at_home():
            self._checks.call("exporting")
            model.gather_written()
            self.buckets.wait_for_gathers()
            return state.export_safetensors(
                folder,
                self.program,
                self.mesh,
                self.owned,
                model.buffers,
                runs=self.buckets.runs,
                wholes=model.wholes(),
                model=self.like,
                carried=self.folder,
                **options,
            )

    def close(self) -> None:
        self.saves.finish()
        self._model.offload.close()
        if isinstance(self.mesh, TorchMesh):
            self.mesh.close()

    # --- to another plan

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Prepare weights for sending: see shardc.runtime.reshard.between.End."""
        self._update.check_whole()
        self._model.gather_written()
        self.buckets.wait_for_gathers()
        with self._model.offload.at_home():
            yield

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Prepare weights for receiving: see shardc.runtime.reshard.between.End."""
        self._make_ready()
        with self._model.offload.at_home():
            yield
        self.buckets.filled()
        self._filled()

    def move_to(self, other: Saver) -> None:
        """Move all of the state into an engine whose training has not begun. Collective."""
        self.finish()
        other.like, other.folder, other._model.takes = self.like, self.folder, self._model.takes
        other._checks.follow(self._checks)
        old, new, mesh = Plan(self.program), Plan(other.program), self.mesh
        with mesh.together("moving to another plan"), self.sending(), other.receiving():
            have, settings = self._optimizer_parts()
            facts = {"optimizer": settings, "extra": self._beside_tensors()}
            senders = training.told(mesh, self.program, self.owned, have, **facts)
            index, need = training.index_of(self.program, senders), dict[str, Part]()
            rooms = other._room_for(index, need)
            other._accept(index.extra, new_schedule=False, new_data=False)
            receivers = training.told(mesh, other.program, other.owned, need)
            tensors_of = ([each["tensors"] for each in ranks] for ranks in (senders, receivers))
            more = training.states(old, new, *tensors_of)
            tensors: dict[Key, Tensor] = {("from", "state", k): part.local.detach() for k, part in have.items()}
            tensors |= {("to", "state", k): part.local for k, part in need.items()}
            Reshard(self, other, more, all_buffers=True)(self, other, tensors)
            optimizer = other._update.optimizer
            if optimizer is not None and index.optimizer is not None:
                fill(other.program, other.owned, optimizer, index.optimizer, rooms, other._model.matrices)
        other._go_on_from(index.extra)

    def _optimizer_parts(self) -> tuple[dict[str, Part], dict[str, Any] | None]:
        """Return this rank's parts of the optimizer's state, and its settings; None without one."""
        if self._update.optimizer is None:
            return {}, None
        where = self.buckets.runs, self.mesh, self._model.matrices
        return state_parts(self.program, self.owned, self._update.optimizer, *where, copies=True)

    def _room_for(self, index: Index, parts: dict[str, Part]) -> dict[str, dict[str, Any]]:
        """Make new optimizer state that is filled later, and add its tensors to `parts`."""
        update = self._update
        if update.optimizer is None or index.optimizer is None:
            return {}
        room = update.paged.room if update.paged is not None else None
        where = (index, parts, "engine.to", self.buckets.runs, room, self.mesh, self._model.matrices)
        return room_for(self.program, self.owned, update.optimizer, *where)
