"""Check the user's code, and what ranks share, at the moments of an engine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardc import torch_modes
from shardc.ir.program import Program
from shardc.runtime.checks import engine_options, padding, shared_facts, user_changes
from shardc.runtime.checks.checks import Checks
from shardc.runtime.checks.detached import SteppedLoss
from shardc.runtime.checks.hooks import CheckHooks
from shardc.runtime.checks.marks import OptimizerMarks
from shardc.runtime.checks.optimizer_steps import SteppedOnce
from shardc.runtime.data import inputs, same_samples
from shardc.runtime.data.loader import Loader
from shardc.runtime.mesh.agreement import Fact, stated
from shardc.runtime.zero.several_optimizers import learning_rates


class EngineChecks(Checks):
    """The checks of an engine: see CheckHooks."""

    def __init__(self, program: Program, mesh: Any) -> None:
        super().__init__(program, mesh, "an engine")
        self._params_read = self._padding_checked = False
        self._schedulers: Any = None
        self._optimizer: Optimizer | None = None

    def optimizer(self, optimizer: Optimizer | None) -> None:
        self._optimizer = optimizer
        self._once = SteppedOnce(optimizer)
        if optimizer is not None and self.compares:
            fix = "save with engine.save(folder) on all ranks, and load with engine.load(folder)"
            OptimizerMarks(self._model, fix).guard(optimizer)
        if self.compares:
            self.call("making an engine", *shared_facts.optimizer_facts(self._program, optimizer))

    def schedule(self, schedulers: Any) -> None:
        self._schedulers = schedulers
        self._once.note(schedulers.members if schedulers is not None else ())

    def loader(self, loader: Loader) -> None:
        if self.compares:
            self.call("making a loader", *shared_facts.loader_facts(loader.order))
        same_samples.check(self._mesh, loader)

    def forward(self, call: str, *, training: bool) -> None:
        if training:
            self._once.check()
            engine_options.check_trains(self._program)
            if self._schedulers is not None:
                self._schedulers.check_room(1)
            self._watched.check()
        torch_modes.check(call, self._mesh.device.type, training=training)
        self._look_at_model()

    def batch(self, batch: Any, *, local: bool) -> bool:
        training = self._model.rng.training
        if training:
            inputs.check_no_gradient(batch)
        return self.compares and self._compare_batch("a step" if training else "evaluating", batch, local=local)

    def ragged(self, batch: Any, take: padding.Take) -> None:
        self._padding_checked = self._padding_checked or padding.check(self._model, batch, take)

    def _between_steps(self) -> list[Fact]:
        """Return facts that ranks share between steps. Stages of a pipeline may have other parameter groups."""
        rng, axis = self._model.rng, self._program.axis
        stage = (axis,) if axis else ()
        return [
            stated("the number of steps done", rng.step, fix="load the same checkpoint on all ranks"),
            stated("the seed", rng.seed, fix="use the same seed on all ranks"),
            shared_facts.rates_fact(learning_rates(self._optimizer), stage),
            shared_facts.written(self._program, self._model.written),
            stated("which parameters are frozen", self._watched.frozen(), stage, fix=user_changes.FIX_FREEZE),
        ]

    def read_params(self) -> None:
        super().read_params()
        self._params_read = True
        self.gradients()

    def gradients(self, *, user_reads: bool = False) -> None:
        if user_reads or self._params_read:
            super().gradients()

    def loss(self, loss: Any) -> Any:
        return loss.as_subclass(SteppedLoss) if type(loss) is Tensor else loss

    def stepping(self) -> AbstractContextManager[None]:
        return self._once.engine_step()

    def updated(self) -> None:
        offloads = self._program.spec.data.offload.used
        if self._check_every and self._model.rng.step % self._check_every == 0 and not offloads:
            self._compare_copies("a step", self._optimizer)

    def saving(self, optimizer: Optimizer | None) -> None:
        if self._check_every:
            self._compare_copies("saving", optimizer)
        else:
            self.call("saving")

    def follow(self, other: CheckHooks) -> None:
        if isinstance(other, EngineChecks):
            self._source = other._source
