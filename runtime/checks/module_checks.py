"""Check a module in a custom loop: its forward checks what was done since the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc import torch_modes
from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.checks import marks, shared_facts, tensor_parts, user_changes
from shardc.runtime.checks.checks import Checks
from shardc.runtime.checks.detached import ValueBeside
from shardc.runtime.checks.loop_watch import LoopWatch
from shardc.runtime.data import inputs
from shardc.runtime.mesh import agreement
from shardc.runtime.mesh.agreement import SAME_CALLS, DisagreementError, Fact, stated
from shardc.runtime.zero.several_optimizers import learning_rates
from shardc.torch_private import current_backward

_FIX_EVALUATE = (
    "all ranks must run a forward under torch.no_grad(), like every forward: call it outside of `if rank == 0:`; one "
    "rank may print the result"
)
_FIX_ROWS = (
    "leave bad samples out of the dataset, not out of a batch; engine.step takes parts of which some have fewer rows"
)
_FIX_ZERO_GRAD = "call optimizer.zero_grad(), or set p.grad to None, on all ranks"


class ModuleChecks(Checks):
    """The checks of a module: see CheckHooks. A module's forward is a step of its loop."""

    def __init__(self, program: Program, mesh: Any, *, copied: bool = False) -> None:
        super().__init__(program, mesh, "a module", copied=copied)
        self._unmarked = False

    def new_model(self, model: Any, module: nn.Module | None = None) -> None:
        assert module is not None
        super().new_model(model)
        fixed = [p for name, p in self._model.owned.items() if name in self._model.buckets.shards]
        self._module, self._updates = user_changes.Snapshot(module, fixed), model.updates
        self._loop = LoopWatch(self._model, compares=self.compares)
        self.read_params()

    def mode(self, *, training: bool) -> None:
        if training and self._program.eval_mode:
            self._note({"module.train()": user_changes.EVAL_MODE})

    def forward(self, call: str, *, training: bool) -> None:
        tensor_parts.end_plain()  # begun by an optimizer's step that failed
        torch_modes.check(call, self._mesh.device.type, training=False)
        if current_backward() is not None:
            fault = "forward is run inside of backward, as torch.utils.checkpoint does: its gradients would be lost"
            fix = "call the module directly; the spec's `checkpoint:` says what is recomputed"
            raise ShardcError(fault, where=call, fix=fix)
        self._watched.check()
        if training and torch.is_grad_enabled():
            self._loop.check_model(self._source.idle_optimizer, changed=self._model.written)
        user_changes.check_module(self._module, self._program.still)
        module: Any = self._module.model()  # the user's own train() sets attributes by the mode
        self._look_at_model(module.named_modules() if training else ())

    def batch(self, batch: Any, *, local: bool) -> bool:
        if torch.is_grad_enabled():
            inputs.check_no_gradient(batch)
        if not self.compares:
            return False
        if self._compare_batch("forward", batch, local=local):
            raise DisagreementError(f"{shared_facts.ROWS} differs between ranks", where="module(...)", fix=_FIX_ROWS)
        if self._unmarked:
            marks.check_loaded(self._model)
            self._unmarked = False
        step = self._model.rng.step
        if self._model.rng.training and self._check_every and step and step % self._check_every == 0:
            self._compare_copies("a step", None)
        return False

    def _between_steps(self) -> list[Fact]:
        return [
            stated("the number of steps done", self._model.rng.step, fix=SAME_CALLS),
            stated("whether the module trains", self._model.rng.training, fix="call train() or eval() on all ranks"),
            stated("whether parameters changed", self._updates.due, fix="update parameters equally on all ranks"),
            stated("whether weights were loaded", self._unmarked, fix="load the same weights on all ranks"),
            stated("which parameters have a gradient", self._with_gradients(), fix=_FIX_ZERO_GRAD),
            stated("which parameters are frozen", self._watched.frozen(), fix=user_changes.FIX_FREEZE),
            stated("whether gradients are on", torch.is_grad_enabled(), fix=_FIX_EVALUATE),
            *self._loop.facts(),
        ]

    def _with_gradients(self) -> str:
        owned = self._model.owned
        return f"{sum(p.grad is not None for p in owned.values())} of {len(owned)}"

    def returned(self, result: Any) -> Any:
        if not (isinstance(result, tuple) and torch.is_grad_enabled()):
            return result
        loss, named = result
        return loss, {n: x.as_subclass(ValueBeside) if type(x) is Tensor else x for n, x in named.items()}

    def _compare(self, call: str, facts: Sequence[Fact]) -> Sequence[Fact]:
        """Compare facts, and parameters of no module after a step, over ranks; return the equal facts."""
        after_step = self._loop.others
        equal_facts = agreement.check(self._mesh, facts, call)
        if after_step:
            self._loop.check_others(self._mesh)
        return equal_facts

    def loss_gradient(self, gradient: Tensor) -> None:
        self._loop.note_gradient(gradient)

    def owners_step(self, optimizer: Optimizer, *, written: bool) -> None:
        if self.compares:
            facts = [
                shared_facts.rates_fact(learning_rates(optimizer)),
                stated("whether parameters were written to", written, fix="write to parameters equally on all ranks"),
            ]
            agreement.check(self._mesh, facts, "the optimizer's step")

    def call(self, name: str, *facts: Fact, steps: bool = False) -> None:
        if steps and self.compares:  # no forward may follow that compares the loop's last step
            self._compare(name, [*facts, *self._loop.facts(last=True)])
        else:
            super().call(name, *facts)

    def saving(self, optimizer: Optimizer | None) -> None:
        self.call("saving", stated("the number of steps done", self._model.rng.step, fix=SAME_CALLS), steps=True)
        if self._check_every:
            self._compare_copies("saving", optimizer)

    def loaded_unmarked(self) -> None:
        self._unmarked = True

    def copy(self, model: Any) -> ModuleChecks:
        copied = ModuleChecks(self._program, self._mesh, copied=True)
        copied._check_every = self._check_every
        copied.follow_model(model)
        return copied
