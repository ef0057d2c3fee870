"""End a step: finished gradients, their norm, clipping, the optimizer's step, learning rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.runtime.checks.hooks import CheckHooks
from shardc.runtime.stage import not_finite
from shardc.runtime.stage.clip_grad_norm import GradNorm
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.stage.not_finite import NotFiniteError
from shardc.runtime.stage.run import Values
from shardc.runtime.step.local_model import LocalModel
from shardc.runtime.step.loss_scale import LossScaler
from shardc.runtime.step.means import LOSS, MeanDivisors
from shardc.runtime.step.schedulers import NewSchedule, SchedulerOf, Schedulers
from shardc.runtime.zero.optimizer_check import OverlappedStep
from shardc.runtime.zero.paged_optimizer import Paged
from shardc.runtime.zero.several_optimizers import prefer_fused


class Update:
    """The optimizer's half of a step.

    In each step: `begin`, backward, `check_loss`, `replace_buffers`, `reduced` for each bucket whose sum has ended,
    `finish_gradients`, `apply`, `step_schedule`. If gradients go to the owners of
    matrices during backward, backward calls `reduced`.
    optimizer: of what this rank owns; None: it has nothing to train. trains: the engine has an optimizer.
    .consistent: all of the state is of one step. .norm: the gradient's 2-norm, before clipping; None: nothing needs it.
    """

    def __init__(
        self,
        model: LocalModel,
        optimizer: Optimizer | None,
        scheduler: SchedulerOf | None,
        checks: CheckHooks,
        options: Mapping[str, Any],
        *,
        trains: bool,
    ) -> None:
        self.model, self.optimizer, self.trains, self._checks = model, optimizer, trains, checks
        program = model.program
        if optimizer is not None and model.mesh.device.type == "cuda" and not model.offload.places:
            prefer_fused(optimizer)  # not with offload, where optimizer state moves between host and device
        self.new_schedule = NewSchedule(optimizer, scheduler) if optimizer is not None else None
        checks.optimizer(optimizer)
        self.paged = Paged(optimizer, model.offload) if optimizer is not None and model.offload.places else None
        schedule = Schedulers.make(scheduler, optimizer) if scheduler is not None and optimizer is not None else None
        self.schedule(schedule)
        scale = program.spec.precision.loss_scale
        self.scaler = LossScaler(scale, model.mesh) if scale is not None else None
        self._norm = GradNorm(program, model.owned, model.mesh)
        self.norm: Tensor | None = None
        self.consistent = True
        self._skipping = self.updated = False  # whether this step leaves out its update; whether the last one updated
        self._steps_early = self._sends_early = False  # see `begin`
        self._buffers_before = model.buffers  # put back if gradients are not finite
        self.set_options(**options)

    def set_options(
        self, *, clip_norm: float | None, norm: bool, nonfinite: not_finite.Action, check_every: int
    ) -> None:
        """Apply the options that `engine.set` may change."""
        self.clip_norm, self._nonfinite = clip_norm, nonfinite
        self._needs_norm = norm or clip_norm is not None or nonfinite != "ignore"
        needs_all = clip_norm is not None or nonfinite != "ignore" or self.scaler is not None
        #: Whether an update may begin before all gradients are there.
        self._may_begin_early = not needs_all and not self.model.offload.places
        overlaps = self._may_begin_early and not self.model.owners.moves and self.model.buckets.sums_outlast_backward
        optimizer = self.optimizer if overlaps else None
        self._overlapped = OverlappedStep(optimizer, self.model.owned) if optimizer is not None else None
        self._checks.compare_every(check_every)

    def schedule(self, schedulers: Schedulers | None) -> None:
        """Set the engine's schedulers."""
        self.schedulers = schedulers
        self._checks.schedule(schedulers)

    def check_consistent(self) -> None:
        """Raise ShardcError after an error in an update: nobody knows which parameters were updated."""
        if not self.consistent:
            fault, fix = "an update or a load failed halfway", "load a checkpoint into this engine, or make a new one"
            fault += ": some parameters may be updated, others not, and ranks may differ"
            raise ShardcError(fault, where="Engine.update", fix=fix)

    @property
    def scale(self) -> Callable[[Tensor], Tensor]:
        """Function that multiplies the gradient of the loss by the loss scale."""
        return self.scaler.scale if self.scaler is not None else lambda gradient: gradient

    def begin(self, *, early: bool) -> None:
        """Clear the last step's gradients. early: buckets may be updated or sent while others are summed."""
        model = self.model
        self._steps_early = early and self._overlapped is not None and self._overlapped.begin_if_possible()
        self._sends_early = early and self._may_begin_early and model.owners.moves
        for p in model.owned.values():
            p.grad = None
        model.owners.forget()
        model.buckets.early = self.reduced if self._sends_early else None
        self._norm.start()

    def check_loss(self, loss: Tensor, interpreter: Interpreter, values: Values) -> None:
        """Decide whether this step updates anything. Loss scaling checks the gradients instead."""
        step = self.model.rng.step + 1
        try:
            self._skipping = self.scaler is None and not_finite.skips_loss(
                self._nonfinite, loss, interpreter, values, step=step
            )
        except NotFiniteError as e:
            divisor = MeanDivisors(interpreter.program).of(self.model.mesh, values).get(LOSS)
            if divisor is None or divisor.value:
                raise
            fault = f"the loss of step {step} is {float(loss)}: {not_finite.NOTHING}"
            raise NotFiniteError(fault, where=e.where, fix=not_finite.FIX_NOTHING) from e

    def replace_buffers(self, new: Mapping[str, Tensor]) -> None:
        """Replace buffers by their new values, unless the step is left out."""
        self._buffers_before = self.model.buffers
        if not self._skipping:
            self.model.replace_buffers(new)

    def reduced(self, names: Sequence[str]) -> None:
        """Unscale gradients whose sums have ended, add them to the norm, and step or send them early."""
        if self.scaler is not None:
            self.scaler.unscale(self.model.owned[n].grad for n in names)
        if self._needs_norm:
            self._norm.add(names)
        if self._sends_early:
            self.model.owners.begin(names)
        if self._steps_early and self._overlapped is not None and names and not self._skipping:
            self.consistent = False
            with self._checks.stepping():
                self._overlapped.step(names)

    def finish_gradients(self) -> None:
        """Finish the gradients that are in no bucket, after all sums have ended; agree on an overflow."""
        self.reduced(self.model.buckets.unsummed)
        if self.scaler is not None:
            self.scaler.sync_overflow()

    def apply(self) -> None:
        """Clip, and step the optimizer, unless the step is left out."""
        model = self.model
        if self.trains and self._needs_norm:
            self.norm = self._norm.total()
            if self.scaler is None and not self._skipping:
                self._check_gradients(self.norm)
        self.updated = self.trains and not self._skipping and (self.scaler is None or not self.scaler.overflow)
        if self.updated:
            self.consistent = False
            if self.clip_norm is not None and self.norm is not None:
                self._norm.clip(self.clip_norm, self.norm)
            if self.optimizer is not None and not self._steps_early:
                self._step(self.optimizer)
            model.buckets.publish()
        model.buckets.narrow_grads()
        if self.scaler is not None:
            self.scaler.update()

    def _step(self, optimizer: Optimizer) -> None:
        with self.model.owners.stepping(), self._checks.stepping():
            (self.paged or optimizer).step()

    def _check_gradients(self, norm: Tensor) -> None:
        """Skip or stop if gradients are not finite. Buffers then have their old values, also on a raise."""
        model = self.model
        new, model.buffers = model.buffers, self._buffers_before
        self._skipping = not_finite.skips_gradient(self._nonfinite, norm, model)
        if not self._skipping:
            model.buffers = new

    def step_schedule(self) -> None:
        """Step the user's schedulers, unless the update was skipped. They may raise."""
        if self.schedulers is not None and self.updated:
            try:
                self.schedulers.step()
            finally:
                self._checks.schedule(self.schedulers)
