"""Save, load and export the state of a program's module."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.optional import needed
from shardc.runtime.checks import marks
from shardc.runtime.mesh.agreement import SAME_CALLS, stated
from shardc.runtime.stage.clip_grad_norm import parameter_norms
from shardc.runtime.state import KEEP
from shardc.runtime.state.loading import load
from shardc.runtime.state.owners import Owners, OwnersOptimizer, RankState
from shardc.runtime.state.parts import full_state_dict
from shardc.runtime.state.saving import planned
from shardc.runtime.step import resumed
from shardc.runtime.step.module_running import Running
from shardc.runtime.zero.several_optimizers import as_one


class ModuleState(nn.Module):
    """The part of `shardc.runtime.step.module.ShardedModule` that handles its state."""

    _running: Running

    def _buffers_by_name(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's parts, as `state_dict` returns them.

        Raises ShardcError for whole weights if this rank has parts, for slices of another rank, and for `assign`.
        """
        if assign:
            fault = "the program uses its own parameters, and this would replace them"
            fix = "leave assign out: then values are written into the parameters"
            raise ShardcError(fault, where="module.load_state_dict(..., assign=True)", fix=fix)
        parts = dict(self.named_parameters(remove_duplicate=False))
        if marks.KEY in getattr(state_dict, "_metadata", {}).get("", {}):
            parts = {}  # its marks say what it has
        split = [n for n, x in state_dict.items() if n in parts and isinstance(x, Tensor) and x.shape != parts[n].shape]
        program = self._running.program
        if whole := [n for n in split if tuple(state_dict[n].shape) == program.param(n).shapes[n]]:
            fault = f"a whole weight {list(state_dict[whole[0]].shape)}, of which this rank has a part"
            fault += f" {list(parts[whole[0]].shape)} ({len(whole)} such)"
            fix = "make the module from whole weights, which it shards: program.module(model, weights=state_dict)"
            raise ShardcError(fault, where=f"module.load_state_dict: {whole[0]}", fix=fix)
        return super().load_state_dict(state_dict, strict)

    def save(
        self,
        folder: str | Path,
        optimizer: Any = None,
        *,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = KEEP,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint that any mesh can load, to `folder/step-N`. N: training forwards. Collective.

        Has parameters, buffers, the optimizer's state, step, seed. All ranks see one file system.
        optimizer: of `parameters()`, or a list of them. extra: plain values (numbers, strings, lists, dicts), such as a
        scheduler's state_dict; `load` returns them. keep: how many checkpoints of the folder stay, the last ones; None:
        all.
        overwrite: also replace those of another run, which this module has neither saved nor loaded. Raises
        shardc.runtime.state.checkpoint_folder.SavingError, on all ranks; earlier checkpoints are then unchanged.
        """
        r = self._running
        held = self._held(optimizer)
        facts = {"step": r.rng.step, "seed": r.rng.seed, "module": dict(extra or {})} | resumed.record(r.program)
        with r.mesh.together(f"saving step {r.rng.step}"):
            r.checks.saving(held.optimizer)
            r.saves.save(folder, functools.partial(planned, held, facts), keep=keep, overwrite=overwrite)

    def load(self, folder: str | Path, optimizer: Any = None, *, last_good: bool = False) -> dict[str, Any]:
        """Read a checkpoint that `save`, or an engine's, wrote on any mesh; return its `extra`. Collective.

        folder: where checkpoints were saved (the last one is read), or one checkpoint. optimizer: as of `save`.
        last_good: if that one is damaged, read the last one that is not. Raises ShardcError, on all ranks, for a
        checkpoint of another model or optimizer, before anything changes.
        """
        r = self._running
        held = self._held(optimizer)
        with r.mesh.together("loading a checkpoint"), r.receiving():
            r.checks.call("loading a checkpoint")
            extra = load(folder, held, last_good=last_good)
        r.saves.loaded(folder)
        r.rng.step, r.rng.seed = int(extra["step"]), int(extra.get("seed", r.rng.seed))
        for note in resumed.changed(r.program, extra):
            r.mesh.note(note)
        return dict(extra.get("module", {}))

    def _held(self, optimizer: Any) -> RankState:
        """Return what this rank holds. optimizer: of a custom loop, or its wrapper with owners."""
        r, owners = self._running, Owners()
        if isinstance(optimizer, OwnersOptimizer):
            optimizer, owners = optimizer.made, optimizer.owners
        elif optimizer is not None:
            optimizer = as_one(optimizer)
        buffers, owned = self._buffers_by_name(), r.buckets.owned
        return RankState(r.program, r.mesh, owned, buffers, optimizer, r.buckets.shards, owners)

    @property
    def weights_holder(self) -> Running:
        """The object that holds the weights."""
        return self._running

    def weights_to(self, other: Any) -> Any:
        """Copy this module's weights to an engine, another module, or a forward-only program's. Collective.

        See Engine.weights_to. Not between forward and backward.
        """
        return needed("reshard", "runtime", "move_weights")(self.weights_holder, other)

    def norms(self, *, grad: bool = False) -> dict[str, float]:
        """Return {parameter: 2-norm of all of it}, on every rank; grad: of `.grad`, 0 if None. Collective."""
        r = self._running
        with r.mesh.together("norms"):
            r.checks.call("norms", stated("grad", grad, where="module.norms", fix=SAME_CALLS), steps=True)
            return parameter_norms(r.program, r.buckets.owned, r.mesh, grad=grad)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return {fqn: whole tensor on the CPU}, on every rank, as the unsharded state_dict. Collective."""
        r = self._running
        with r.mesh.together("full_state_dict"):
            r.checks.call("full_state_dict", stated("whether parameters changed", r.updates.due), steps=True)
            r.updates.carry_out()
            r.updates.finish_gather()
            r.checks.note_weights_read()
            return full_state_dict(r.program, r.mesh, r.buckets.wholes(), self._buffers_by_name())


def mark(module: ModuleState, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    slices = module._running.slices
    for name in slices.split:
        if isinstance(x := state_dict.get(prefix + name), Tensor):
            marks.refuse_checkpoint(x, name)
    metadata[marks.KEY] = slices.mark()


def check_marks(module: ModuleState, given: Mapping[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
    if module._running.slices.check(given, prefix, metadata.get(marks.KEY)):
        module._running.checks.loaded_unmarked()
