"""What an engine saves, loads and hands out: the state of its training."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardc.ir.program import Program
from shardc.runtime import state
from shardc.runtime.checks.given_model import GivenModel
from shardc.runtime.data.loader import Loaders
from shardc.runtime.matrices.whole import WholeMatrices
from shardc.runtime.mesh import TorchMesh, agreement
from shardc.runtime.mesh.agreement import SAME_CALLS, stated
from shardc.runtime.offload import Offload
from shardc.runtime.reshard import training
from shardc.runtime.reshard.between import End, Reshard, move_weights
from shardc.runtime.reshard.moves import Key
from shardc.runtime.reshard.places import Plan
from shardc.runtime.rng import Rng
from shardc.runtime.stage.clip_grad_norm import parameter_norms
from shardc.runtime.state.boxes import Part
from shardc.runtime.state.checkpoint_folder import KEEP
from shardc.runtime.state.checkpoint_index import Index
from shardc.runtime.state.saving_optimizer import fill, room_for, state_parts
from shardc.runtime.step import lr, resumed
from shardc.runtime.step.loss_scale import LossScaler
from shardc.runtime.step.lr import NewSchedule, steps_of
from shardc.runtime.zero.buckets import Buckets
from shardc.runtime.zero.offloaded_optimizer import Paged

#: What to do instead of writing to parameters on some ranks.
WRITE_ALIKE = "write to engine.params, under torch.no_grad(), on all ranks alike"


class EngineState:
    """The part of `shardc.runtime.step.engine.Engine` that deals with its state."""

    program: Program
    mesh: Any
    owned: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    buckets: Buckets
    optimizer: torch.optim.Optimizer | None
    scaler: LossScaler | None
    loaders: Loaders
    rng: Rng
    _schedulers: lr.Schedulers | None
    _new_schedule: NewSchedule | None
    _saves: state.Saves
    _offload: Offload
    _paged: Paged | None
    _checks: bool
    _check_every: int
    _whole: bool
    _skeleton: Any
    _folder: Any
    _given: GivenModel
    _matrices: WholeMatrices | None
    reshards: MutableMapping[End, Reshard]

    @property
    def _written(self) -> bool:
        raise NotImplementedError

    def _check(self) -> None:
        raise NotImplementedError

    def _compare_replicas(self, call: str) -> None:
        raise NotImplementedError

    def _gather_written(self) -> None:
        raise NotImplementedError

    def _note_schedulers(self) -> None:
        raise NotImplementedError

    def _tell(self, note: str) -> None:
        raise NotImplementedError

    def save(self, folder: str | Path, *, wait: bool = True, keep: int | None = KEEP, overwrite: bool = False) -> None:
        """Write a checkpoint that any mesh can load, `folder/step-N`: parameters, buffers, optimizer, scheduler,
        loaders, step, seed. Collective.

        wait: False copies the state and returns; it is written in the background, at most one at a time, and what goes
            wrong is raised by the next `step` or `save`, on all ranks. `finish_save` waits for it, as `close` does.
        keep: how many checkpoints of the folder stay, the last ones; None: all.
        overwrite: replace those of another run, too: that this engine has neither saved nor loaded.
        Raises shardc.runtime.state.SavingError, on all ranks; what was saved before is then as it was.
        """
        self._check()
        extra = self._beside_tensors()
        if not wait and isinstance(self.mesh, TorchMesh):
            self._saves.finish_at_exit()
        with self.mesh.together(f"saving step {self.rng.step}"), self._offload.at_home():
            if self._check_every:
                self._compare_replicas("saving")
            elif self._checks:
                agreement.check(self.mesh, [], "saving")
            state.save(
                folder,
                self.program,
                self.mesh,
                self.owned,
                self.buffers,
                self.optimizer,
                extra,
                runs=self.buckets.runs,
                matrices=self._matrices,
                saves=self._saves,
                keep=keep,
                wait=wait,
                overwrite=overwrite,
            )

    def _beside_tensors(self) -> dict[str, Any]:
        """What a checkpoint has beside tensors, and the optimizer's settings."""
        extra: dict[str, Any] = {"step": self.rng.step, "seed": self.rng.seed, **resumed.record(self.program)}
        if self.scaler is not None:
            extra["loss_scale"] = self.scaler.state_dict()
        if self._schedulers is not None:
            extra["scheduler"] = self._schedulers.state_dict()
        return extra | {"loaders": self.loaders.state_dict()}

    def finish_save(self) -> None:
        """Wait until a save in the background is on the disk. Collective. Raises what went wrong."""
        with self.mesh.together("saving"):
            self._saves.finish()

    @property
    def saving(self) -> tuple[int, int] | None:
        """(bytes written, bytes to write) by this rank of the save in the background; None without one."""
        return self._saves.progress

    def load(
        self, folder: str | Path, *, last_good: bool = False, new_schedule: bool = False, new_data: bool = False
    ) -> None:
        """Read a checkpoint that any mesh wrote. Collective.

        folder: where checkpoints were saved to: the last one is read; or one of them. last_good: if that one is
            damaged, read the last one that is not.
        new_schedule: learning rates (momenta, betas) are not the checkpoint's: the schedulers are made anew, from what
            `optimizer` made, and stand at the checkpoint's step, as if they had been there from the first.
        new_data: the engine's loaders begin with their first epoch, wherever the checkpoint's stood: for a dataset that
            has grown, or another one.
        The seed and the settings of optimizer and schedulers are then the checkpoint's; what they replace is told.
        """
        before, seed = resumed.settings(self.optimizer, self._schedulers), self.rng.seed
        self._make_ready()
        room = self._paged.room if self._paged is not None else None
        with self.mesh.together("loading a checkpoint"), self._offload.at_home():
            if self._checks:
                agreement.check(self.mesh, [], "loading a checkpoint")
            extra = state.load(
                folder,
                self.program,
                self.mesh,
                self.owned,
                self.buffers,
                self.optimizer,
                runs=self.buckets.runs,
                matrices=self._matrices,
                room=room,
                last_good=last_good,
                accept=functools.partial(self._accept, new_schedule=new_schedule, new_data=new_data),
                changing=self._changing,
            )
        self._saves.loaded(folder)
        self.buckets.publish()
        self._filled()
        self._go_on_from(extra, new_schedule=new_schedule, new_data=new_data)
        after = resumed.settings(self.optimizer, self._schedulers)
        for note in resumed.replaced(before, after, schedule=not new_schedule):
            self._tell(note)
        for note in resumed.changed(self.program, extra):
            self._tell(note)
        if self.rng.seed != seed:
            self._tell(f"seed: the checkpoint's {self.rng.seed} is used, not {seed}")

    def _make_ready(self) -> None:
        """Before parameters are filled: nothing reads or writes them any more."""
        self.finish_save()
        self.buckets.reset(forward=True)
        self.buckets.wait_for_gathers()

    def _filled(self) -> None:
        """Parameters are filled, and other ranks have them, too."""
        self._offload.changed()
        if self._paged is not None:
            self._paged.rest()
        if self._matrices is not None:
            self._matrices.gather()

    def _go_on_from(self, extra: Mapping[str, Any], *, new_schedule: bool = False, new_data: bool = False) -> None:
        """Parameters and the optimizer's state are those of other training: go on from where that stood."""
        self.rng.step, self.rng.seed = int(extra["step"]), int(extra["seed"])
        if self.scaler is not None and "loss_scale" in extra:
            self.scaler.load_state_dict(extra["loss_scale"])
        if new_schedule and self._new_schedule is not None and self.optimizer is not None:
            self._schedulers = self._new_schedule.begin(self.optimizer, steps_of(extra))
            self._note_schedulers()
        elif self._schedulers is not None and "scheduler" in extra:
            self._schedulers.load_state_dict(extra["scheduler"])
            self._note_schedulers()
        if new_data:
            self.loaders.restart()
        else:
            self.loaders.load_state_dict(extra.get("loaders", {}))
        self._whole = True

    def _accept(self, extra: Mapping[str, Any], *, new_schedule: bool, new_data: bool) -> None:
        """Do schedulers and loaders continue these?"""
        if self._schedulers is not None and new_schedule:
            self._schedulers.check_end(steps_of(extra))
        elif self._schedulers is not None and "scheduler" in extra:
            self._schedulers.check(extra["scheduler"])
        if not new_data:
            self.loaders.check(extra.get("loaders", {}))

    def _changing(self) -> None:
        self._whole = False  # if what follows fails, or does not fit

    # --- to another plan

    @property
    def weights_end(self) -> End:
        """This engine, as what has weights."""
        return self

    @property
    def checks(self) -> bool:
        """Are the ranks' calls compared?"""
        return self._checks

    @contextmanager
    def sending(self) -> Iterator[None]:
        """See shardc.runtime.reshard.between.End."""
        self._check()
        self._gather_written()
        self.buckets.wait_for_gathers()
        with self._offload.at_home():
            yield

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """See shardc.runtime.reshard.between.End."""
        self._make_ready()
        with self._offload.at_home():
            yield
        self.buckets.filled()
        self._filled()

    def weights_to(self, other: Any) -> Reshard:
        """Copy this engine's weights into those of another engine, of a module, or of what runs a forward-only program,
        of the same model on the same ranks: parameters, and buffers that both programs have. Collective.

        Each element goes once to each rank that needs it and does not have it (shardc.runtime.reshard); who sends what
        to whom is found out the first time. Returns that: `.sent` and `.received`, bytes by rank. The other's optimizer
        and step stay as they are. Raises ShardcError for a program of another model, or of other ranks.
        """
        return move_weights(self, other)

    def _move_to(self, other: EngineState) -> None:
        """All of the state, into an engine whose training has not begun. Collective."""
        self.finish_save()
        old, new, mesh = Plan(self.program), Plan(other.program), self.mesh
        with mesh.together("moving to another plan"), self.sending(), other.receiving():
            have, settings = self._optimizer_parts()
            facts = {"optimizer": settings, "extra": self._beside_tensors()}
            told = training.told(mesh, self.program, self.owned, have, **facts)
            index, need = training.index_of(self.program, told), dict[str, Part]()
            rooms = other._room_for(index, need)
            other._accept(index.extra, new_schedule=False, new_data=False)
            wanted = training.told(mesh, other.program, other.owned, need)
            more = training.states(old, new, *([said["tensors"] for said in each] for each in (told, wanted)))
            tensors: dict[Key, Tensor] = {("from", "state", k): part.local.detach() for k, part in have.items()}
            tensors |= {("to", "state", k): part.local for k, part in need.items()}
            Reshard(self, other, more, all_buffers=True)(self, other, tensors)
            if other.optimizer is not None and index.optimizer is not None:
                fill(other.program, other.owned, other.optimizer, index.optimizer, rooms, other._matrices)
        other._go_on_from(index.extra)

    def _optimizer_parts(self) -> tuple[dict[str, Part], dict[str, Any] | None]:
        """This rank's parts of the optimizer's state, and its settings; None without one."""
        if self.optimizer is None:
            return {}, None
        runs, matrices = self.buckets.runs, self._matrices
        return state_parts(self.program, self.owned, self.optimizer, runs, self.mesh, matrices, copies=True)

    def _room_for(self, index: Index, parts: dict[str, Part]) -> dict[str, dict[str, Any]]:
        """New state of the optimizer, to be filled, and in `parts` its tensors."""
        if self.optimizer is None or index.optimizer is None:
            return {}
        room, runs = self._paged.room if self._paged is not None else None, self.buckets.runs
        where = (index, parts, "engine.to", runs, room, self.mesh, self._matrices)
        return room_for(self.program, self.owned, self.optimizer, *where)

    def norms(self, *, grad: bool = False) -> dict[str, float]:
        """{name of a parameter: 2-norm of all of it}, on every rank, for a log. Collective. grad: of the gradients of
        the last step or `backward` instead, 0 where none came; after a step they are clipped.
        """
        with self.mesh.together("norms"):
            if self._checks:
                agreement.check(self.mesh, [stated("grad", grad, where="engine.norms", fix=SAME_CALLS)], "norms")
            return parameter_norms(self.program, self.owned, self.mesh, grad=grad)

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """{fqn: whole tensor on the CPU}, as the unsharded model's state_dict gives it, on every rank; rank0_only: on
        the first, and {} on the others, which then keep nothing. Collective.
        """
        self._given.handed_out = True
        with self.mesh.together("full_state_dict"):
            if self._checks:
                stage = (self.program.axis,) if self.program.axis else ()
                written = stated("whether parameters were written to", self._written, stage, fix=WRITE_ALIKE)
                agreement.check(self.mesh, [stated("rank0_only", rank0_only), written], "full_state_dict")
            return state.full_state_dict(self.program, self.mesh, self.wholes(), self.buffers, rank0_only=rank0_only)

    def export(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = 5_000_000_000,
        overwrite: bool = False,
        merge: bool = False,
    ) -> list[Path]:
        """Write the weights for others: a folder that transformers (or peft, of a model with adapters) loads, with
        config and tokenizer; of other models safetensors files; of a `.safetensors` path one file. All ranks write, and
        see one file system. Collective.

        merge: the whole model, with the adapters of the spec added to the weights that they are beside.

        dtype: of floating-point tensors; None: as they are held. max_file_bytes: what is more goes into numbered files
        with an index. overwrite: replace weights, too, that shardc did not write, such as those of a pretrained model.
        Returns the folders written. Raises ShardcError, on all ranks, where it cannot be written.
        """
        self._check()
        with self.mesh.together("exporting"), self._offload.at_home():
            if self._checks:
                agreement.check(self.mesh, [], "exporting")
            self._gather_written()
            self.buckets.wait_for_gathers()
            return state.export_safetensors(
                folder,
                self.program,
                self.mesh,
                self.owned,
                self.buffers,
                runs=self.buckets.runs,
                wholes=self.wholes(),
                model=self._skeleton,
                carried=self._folder,
                dtype=dtype,
                max_file_bytes=max_file_bytes,
                overwrite=overwrite,
                merge=merge,
            )

    def wholes(self) -> Mapping[str, Tensor]:
        """{placeholder name: this rank's whole local part, detached}. What ZeRO keeps cut is gathered when it is asked
        for, a bucket at a time: all ranks must ask alike.
        """
        self._gather_written()
        return self.buckets.wholes()

    def close(self) -> None:
        """Wait for a save in the background; remove the files of `data.offload`; leave torch.distributed's world, if
        this engine joined it.
        """
        self._saves.finish()
        self._offload.close()
        if isinstance(self.mesh, TorchMesh):
            self.mesh.close()
